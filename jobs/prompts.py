"""Rows to prompts: a column as it is, a template, a conversation, or all columns. Knows no engine and no files.

Gold and output columns never enter a prompt. What is wrong for every row raises; what is wrong for one is a Refusal.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jinja2
import msgspec
import pyarrow as pa
from jinja2 import meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jobs.arrow_types import result_fields
from jobs.deepseek import check_recipe, render
from jobs.instructions import describe_constraint
from jobs.lines import LINE_FORMATS, MALFORMED
from jobs.openai_requests import BadRequest, Question, read_body
from jobs.source import check_columns
from schemas.constraints import load_constraint
from schemas.errors import ConstraintError, PromptError
from schemas.records import (
    ChatEncoding,
    Constraint,
    ConstraintKind,
    JobSpec,
    Message,
    RowStatus,
    Sampling,
    encode_json,
    short_hash,
)

ROW_NAME = "row"
"""In templates and filters, ``row["any name"]`` reaches columns whose names are no identifiers."""

URL = "url"
"""The column beside a body that names the endpoint it was written for, where there is one."""

DATA_EDGE = "\ufdd0"
"""Around a row's values while a plain completion's text is made; a code point that Unicode gives to nobody."""

KEY_DIGITS = 32
"""Rows with equal content keys share one answer: too long to be hit by chance, or on purpose."""


class Prompt(NamedTuple):
    """What is asked for one row: ``text`` or ``messages``. Equal content keys: equal questions, sampling included."""

    text: str | None
    messages: tuple[Message, ...] | None
    constraint: Constraint | None
    constraint_key: str | None
    content_key: str
    data_spans: tuple[tuple[int, int], ...] = ()  # where ``text`` is the row's: no special token is read there
    has_start: bool = False  # ``text`` is a whole conversation, with the model's start token
    sampling: Sampling | None = None  # the row's own; None: the job's
    read: Callable[[str], str] | None = None  # finds the answer in what the model says; then nothing is enforced, and
    checked: Constraint | None = None  # the answer is held to this afterwards


class Refusal(NamedTuple):
    """Why a row is not asked at all."""

    status: RowStatus
    error: str | None


_Content = str | tuple[Message, ...] | Question
"""What a row asks: text, a conversation, or one that says how it wants to be answered."""


class _RowError(Exception):
    """A row's content cannot be made into a prompt."""


class PromptBuilder:
    """Turns rows of one job into prompts; compiled once, used by one thread."""

    def __init__(self, spec: JobSpec, schema: pa.Schema) -> None:
        """Check the spec against the input's columns. Raises PromptError, InputDataError or ConstraintError."""
        self._spec = spec
        self._hidden = {*(field.name for field in result_fields(spec)), spec.gold_column}
        self._visible = [name for name in schema.names if name not in self._hidden]
        finalize = _refuse_null if spec.chat else _mark_data
        self._environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=finalize)
        self._columns: set[str] = set()
        self._encoding = spec.chat_encoding if spec.chat else ChatEncoding.TEMPLATE
        if self._encoding is not ChatEncoding.TEMPLATE:
            check_recipe()
        self._is_kept = self._compile_where(schema) if spec.where is not None else None
        self._content = self._compile_content(schema)
        if spec.constraint_column is not None:
            _check_constraint_column(spec, spec.constraint_column, schema)
            self._columns.add(spec.constraint_column)
        self._constraint = _keyed(spec.constraint)
        self._constraints: dict[Constraint, _Keyed] = {}
        self._system = system_text(spec)
        columns = [name for name in schema.names if name in self._columns]
        has_lines = any(file.format in LINE_FORMATS for file in spec.inputs)
        self.columns = (*columns, MALFORMED) if has_lines else tuple(columns)

    def build(self, row: Mapping[str, Any]) -> Prompt | Refusal:
        """Return the row's prompt, or why it has none. ``row`` holds at least ``columns``."""
        if (error := row.get(MALFORMED)) is not None:
            return Refusal(RowStatus.INPUT_ERROR, error)
        try:
            if self._is_kept is not None and not self._is_kept(row):
                return Refusal(RowStatus.SKIPPED, None)
            content = self._content(row)
            return self._prompt(content, self._constraint_of(row, content))
        except (_RowError, BadRequest) as error:
            return Refusal(RowStatus.INPUT_ERROR, str(error))
        except ConstraintError as error:
            return Refusal(RowStatus.CONSTRAINT_ERROR, str(error))

    def _constraint_of(self, row: Mapping[str, Any], content: "_Content") -> "_Keyed":
        """What the row says of its answer, else what the job says."""
        if isinstance(content, Question) and content.constraint is not None:
            constraint = content.constraint
        elif self._spec.constraint_column is not None:
            constraint = row_constraint(self._spec, row[self._spec.constraint_column])
        else:
            return self._constraint
        if constraint not in self._constraints:
            self._constraints[constraint] = _keyed(load_constraint(constraint.kind, constraint.source))
        return self._constraints[constraint]

    def _prompt(self, content: "_Content", keyed: "_Keyed") -> Prompt:
        constraint_key = keyed.key or ""
        if isinstance(content, Question) or self._encoding is not ChatEncoding.TEMPLATE:
            return self._prompt_of_question(content, keyed)
        if self._spec.chat:
            messages = self._with_system(
                (Message(role="user", content=content),) if isinstance(content, str) else content
            )
            return Prompt(None, messages, *keyed, short_hash(constraint_key, *_parts(messages), digits=KEY_DIGITS))
        text = content if isinstance(content, str) else "\n\n".join(message.content for message in content)
        marked = text if self._spec.prompt_template is not None else _mark_data(text)
        text, data_spans = _split_data(f"{self._system}\n\n{marked}" if self._system else marked)
        content_key = short_hash(constraint_key, text, *map(str, data_spans), digits=KEY_DIGITS)
        return Prompt(text, None, *keyed, content_key, data_spans)

    def _prompt_of_question(self, content: "_Content", keyed: "_Keyed") -> Prompt:
        """A prompt with sampling of its own, or one that is rendered here since the checkpoint has no template."""
        if isinstance(content, str):
            content = (Message(role="user", content=content),)
        question = content if isinstance(content, Question) else Question(content)
        sampling = question.resolve_sampling(self._spec.sampling)
        messages = self._with_system(question.messages)
        if self._encoding is ChatEncoding.TEMPLATE:
            key = short_hash(keyed.key or "", *_parts(messages), *_own(sampling, question.seed), digits=KEY_DIGITS)
            return Prompt(None, messages, *keyed, key, sampling=sampling)
        chat = question.chat or {"messages": msgspec.to_builtins(messages)}
        thinks_first = self._spec.sampling.thinking is not None
        rendered = render(self._encoding, chat, thinks_first=thinks_first)
        if rendered.is_thinking:  # what the recipe gives a model that thinks
            sampling = msgspec.structs.replace(sampling or self._spec.sampling, temperature=1.0, top_p=1.0)
        if thinks_first and not (rendered.is_thinking and rendered.read is None):
            sampling = sampling or self._spec.sampling
            budget = sampling.budget if rendered.is_thinking else sampling.max_tokens
            sampling = msgspec.structs.replace(sampling, thinking=None, max_tokens=budget)
        parts = (rendered.text, *map(str, rendered.data_spans), *_own(sampling, question.seed))
        return Prompt(
            rendered.text,
            None,
            *(keyed if rendered.read is None else _keyed(None)),
            short_hash(keyed.key or "", *parts, digits=KEY_DIGITS),
            rendered.data_spans,
            has_start=True,
            sampling=sampling,
            read=rendered.read,
            checked=None if rendered.read is None else keyed.constraint,
        )

    def _with_system(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if self._system and messages[0].role != "system":
            return (Message(role="system", content=self._system), *messages)
        return messages

    def _compile_content(self, schema: pa.Schema) -> Callable[[Mapping[str, Any]], "_Content"]:
        spec = self._spec
        sources = (spec.prompt_template, spec.prompt_column, spec.messages_column, spec.body_column)
        if sum(x is not None for x in sources) > 1:
            raise PromptError("give one of template, prompt column, messages column and body column, not several")
        if spec.body_column is not None:
            return self._compile_bodies(spec.body_column, schema)
        if spec.prompt_template is not None:
            return self._compile_template(spec.prompt_template, schema)
        if (name := spec.prompt_column or spec.messages_column) is not None:
            check_columns([name], schema, "prompt column" if spec.prompt_column else "messages column")
            self._refuse_hidden({name}, "the prompt")
            self._columns.add(name)
            read: Callable[[str, Any], _Content] = _text_of if spec.prompt_column else _messages_of
            if spec.messages_column and self._encoding is not ChatEncoding.TEMPLATE:
                read = _conversation_of
            return lambda row: read(name, row[name])
        names = [name for name in self._visible if not _is_binary(schema.field(name).type)]
        if not names:
            raise PromptError(
                f"no column is left to ask about, the input has {', '.join(schema.names) or 'no columns'}"
            )
        self._columns.update(names)
        if len(names) == 1:
            return lambda row: _text_of(names[0], row[names[0]])
        return lambda row: _all_columns(names, row)

    def _compile_bodies(self, name: str, schema: pa.Schema) -> Callable[[Mapping[str, Any]], Question]:
        if not self._spec.chat or self._spec.num_completions > 1:
            raise PromptError("bodies are conversations with one answer each: leave out --no-chat and --n")
        check_columns([name], schema, "body column")
        self._refuse_hidden({name}, "the prompt")
        self._columns |= {name, URL} & {name, *schema.names}
        several_calls = self._encoding is not ChatEncoding.TEMPLATE
        return lambda row: read_body(_text_of(name, row[name]), row.get(URL), several_calls=several_calls)

    def _compile_template(self, source: str, schema: pa.Schema) -> Callable[[Mapping[str, Any]], str]:
        used, whole_row = self._names_in(source, "the template")
        self._refuse_hidden(used, "the template")
        check_columns(sorted(used), pa.schema([schema.field(name) for name in self._visible]), "the template")
        self._columns.update(self._visible if whole_row else used)
        template = self._environment.from_string(source.replace(DATA_EDGE, ""))
        visible = [name for name in self._visible if whole_row or name in used]

        def render(row: Mapping[str, Any]) -> str:
            values = {name: row[name] for name in visible}
            try:
                text = template.render({ROW_NAME: values, **values})
            except Exception as error:
                raise _RowError(f"template: {_reason(error)}") from error
            _text_of("the rendered template", text.replace(DATA_EDGE, ""))
            return text

        return render

    def _compile_where(self, schema: pa.Schema) -> Callable[[Mapping[str, Any]], bool]:
        source = self._spec.where or ""
        used, whole_row = self._names_in("{{ (" + source + "\n) }}", "the filter", shown=source)
        check_columns(sorted(used), schema, "the filter")
        names = schema.names if whole_row else sorted(used)
        self._columns.update(names)
        with _syntax_explained("the filter", source):
            expression = self._environment.compile_expression(source, undefined_to_none=False)

        def is_kept(row: Mapping[str, Any]) -> bool:
            values = {name: row[name] for name in names}
            try:
                return bool(expression({ROW_NAME: values, **values}))
            except Exception as error:
                raise _RowError(f"filter: {_reason(error)}") from error

        return is_kept

    def _names_in(self, source: str, what: str, shown: str | None = None) -> tuple[set[str], bool]:
        """Return the columns that a template names, and whether it may need any other too."""
        with _syntax_explained(what, source if shown is None else shown):
            tree = self._environment.parse(source)
        built_in = self._environment.globals.keys() - set(self._visible)
        used = meta.find_undeclared_variables(tree) - built_in
        if ROW_NAME not in used or ROW_NAME in self._visible:
            return used, False
        items = [item for item in tree.find_all(nodes.Getitem) if _is_row(item.node)]
        keys = [item.arg.value for item in items if isinstance(item.arg, nodes.Const)]
        num_uses = sum(_is_row(name) for name in tree.find_all(nodes.Name))
        return (used - {ROW_NAME}) | set(keys), num_uses > len(keys)

    def _refuse_hidden(self, used: set[str], what: str) -> None:
        if named := sorted(used & {name for name in self._hidden if name}):
            raise PromptError(f"{what} uses {', '.join(named)}: gold and output columns never enter a prompt")


def row_constraint(spec: JobSpec, cell: Any) -> Constraint:
    """Return what the constraint column holds: a source of the job's kind, or a struct of ``kind`` and ``source``.

    The source itself is not checked. Raises ConstraintError if there is none, or of no known kind.
    """
    kind: Any = spec.constraint_column_kind or ConstraintKind.JSON_SCHEMA
    source = cell
    if isinstance(cell, Mapping):
        kind, source = cell.get("kind"), cell.get("source")
    if not isinstance(source, str) or not source.strip():
        raise ConstraintError(f"constraint column {spec.constraint_column!r} is empty")
    if kind not in list(ConstraintKind):
        raise ConstraintError(f"constraint kind {kind!r} is none of {', '.join(ConstraintKind)}")
    return Constraint(kind=ConstraintKind(kind), source=source)


def _check_constraint_column(spec: JobSpec, name: str, schema: pa.Schema) -> None:
    check_columns([name], schema, "constraint column")
    kind = schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not pa.types.is_struct(kind):
        return
    if {field.name for field in kind} != {"kind", "source"}:
        raise ConstraintError(f"constraint column {name!r} is {kind}: give it text, or structs of kind and source")
    if spec.constraint_column_kind is not None:
        raise ConstraintError(f"constraint column {name!r} says each row's kind itself: leave out --constraint-kind")


def system_text(spec: JobSpec) -> str | None:
    """Return the job's system message: the user's, else one made from the constraint.

    A template, a conversation or a plain completion stands alone and gets none.
    """
    if spec.system is not None:
        return spec.system or None
    written_out = (spec.prompt_template, spec.messages_column, spec.body_column)
    stands_alone = any(x is not None for x in written_out) or not spec.chat
    if stands_alone or spec.constraint is None:
        return None
    return describe_constraint(spec.constraint, thinks_first=spec.sampling.thinking is not None)


@contextmanager
def _syntax_explained(what: str, source: str) -> Iterator[None]:
    try:
        yield
    except jinja2.TemplateSyntaxError as error:
        hint = " (compare with ==, not =)" if what == "the filter" and "=" in source else ""
        raise PromptError(f"{what} {source!r} is wrong in line {error.lineno}: {error.message}{hint}") from error


class _Keyed(NamedTuple):
    """A constraint and its key, which is a hash: made once, not for each row."""

    constraint: Constraint | None
    key: str | None


def _keyed(constraint: Constraint | None) -> _Keyed:
    return _Keyed(constraint, constraint.key if constraint else None)


def _parts(messages: tuple[Message, ...]) -> list[str]:
    return [part for message in messages for part in (message.role, message.content)]


def _own(sampling: Sampling | None, seed: int | None) -> tuple[str, ...]:
    """What makes equal prompts different questions."""
    return () if sampling is None and seed is None else (encode_json((sampling, seed)).decode(),)


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise _RowError('a value is null: write {{ name or "" }} if that is meant')
    return value


def _mark_data(value: Any) -> str:
    text = str(_refuse_null(value)).replace(DATA_EDGE, "")
    return f"{DATA_EDGE}{text}{DATA_EDGE}"


def _split_data(marked: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the text without its marks, and the spans that were between two of them."""
    parts = marked.split(DATA_EDGE)
    ends = list(itertools.accumulate(map(len, parts)))
    return "".join(parts), tuple((ends[index - 1], ends[index]) for index in range(1, len(parts), 2))


def _text_of(name: str, value: Any) -> str:
    if value is None:
        raise _RowError(f"{name} is null")
    if not isinstance(value, str):
        raise _RowError(f"{name} is {type(value).__name__}, not text: use a template to show it")
    if not value.strip():
        raise _RowError(f"{name} is empty")
    return value


def _messages_of(name: str, value: Any) -> tuple[Message, ...]:
    if value is None:
        raise _RowError(f"{name} is null")
    try:
        items = json.loads(value) if isinstance(value, str) else value
        messages = msgspec.convert([_role_and_content(item) for item in items], tuple[Message, ...])
    except (ValueError, TypeError, msgspec.ValidationError) as error:
        raise _RowError(f"{name} is not a list of {{role, content}}: {error}") from error
    if not messages or not all(message.role and message.content for message in messages):
        raise _RowError(f"{name} has no messages, or one without role or content")
    return messages


def _conversation_of(name: str, value: Any) -> Question:
    """Messages with all that they hold, such as calls of tools, for an encoding that knows what to do with it."""
    try:
        items = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise _RowError(f"{name} is not a list of messages: {error}") from error
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise _RowError(f"{name} is null, empty or not a list of messages")
    return Question((), chat={"messages": [{k: v for k, v in item.items() if v is not None} for item in items]})


def _role_and_content(item: Any) -> dict[str, Any]:
    """Keep the two fields a chat template gets; a set third one (tool calls, images) would be lost without a word."""
    if not isinstance(item, dict):
        raise TypeError(f"{type(item).__name__} instead of an object")
    if extra := [key for key, value in item.items() if key not in ("role", "content") and value is not None]:
        raise ValueError(f"cannot pass on {', '.join(map(str, extra))}")
    return {key: item.get(key) for key in ("role", "content")}


def _all_columns(names: list[str], row: Mapping[str, Any]) -> str:
    lines = [f"{name}: {_readable(row[name])}" for name in names if row[name] is not None and row[name] != ""]
    if not lines:
        raise _RowError("all columns are null or empty")
    return "\n".join(lines)


def _readable(value: Any) -> str:
    if isinstance(value, list | dict | bool):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view, pa.types.is_fixed_size_binary)
    return any(test(kind) for test in tests)


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and str(node.name) == ROW_NAME


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _RowError | jinja2.UndefinedError) else f"{type(error).__name__}: {error}"
