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

from jobs.arrow_types import output_names
from jobs.lines import LINE_FORMATS, MALFORMED
from jobs.source import check_columns
from schemas.constraints import load_constraint
from schemas.errors import ConstraintError, PromptError
from schemas.records import Constraint, ConstraintKind, JobSpec, Message, RowStatus, short_hash

ROW_NAME = "row"
"""In templates and filters, ``row["any name"]`` reaches columns whose names are no identifiers."""

DATA_EDGE = "\ufdd0"
"""Around a row's values while a plain completion's text is made; a code point that Unicode gives to nobody."""

KEY_DIGITS = 32
"""Rows with equal content keys share one answer: too long to be hit by chance, or on purpose."""


class Prompt(NamedTuple):
    """What is asked for one row: ``text`` or ``messages``. Equal content keys are equal questions."""

    text: str | None
    messages: tuple[Message, ...] | None
    constraint: Constraint | None
    constraint_key: str | None
    content_key: str
    data_spans: tuple[tuple[int, int], ...] = ()  # where ``text`` is the row's: no special token is read there


class Refusal(NamedTuple):
    """Why a row is not asked at all."""

    status: RowStatus
    error: str | None


class _RowError(Exception):
    """A row's content cannot be made into a prompt."""


class PromptBuilder:
    """Turns rows of one job into prompts; compiled once, used by one thread."""

    def __init__(self, spec: JobSpec, schema: pa.Schema) -> None:
        """Check the spec against the input's columns. Raises PromptError, InputDataError or ConstraintError."""
        self._spec = spec
        self._hidden = {*output_names(spec.output_column), spec.gold_column}
        self._visible = [name for name in schema.names if name not in self._hidden]
        finalize = _refuse_null if spec.chat else _mark_data
        self._environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, finalize=finalize)
        self._columns: set[str] = set()
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
        except _RowError as error:
            return Refusal(RowStatus.INPUT_ERROR, str(error))
        keyed = self._constraint
        if self._spec.constraint_column is not None:
            loaded = self._load_constraint(row[self._spec.constraint_column])
            if isinstance(loaded, Refusal):
                return loaded
            keyed = loaded
        return self._prompt(content, keyed)

    def _prompt(self, content: str | tuple[Message, ...], keyed: "_Keyed") -> Prompt:
        constraint_key = keyed.key or ""
        if self._spec.chat:
            messages = (Message(role="user", content=content),) if isinstance(content, str) else content
            if self._system and messages[0].role != "system":
                messages = (Message(role="system", content=self._system), *messages)
            parts = [part for message in messages for part in (message.role, message.content)]
            return Prompt(None, messages, *keyed, short_hash(constraint_key, *parts, digits=KEY_DIGITS))
        text = content if isinstance(content, str) else "\n\n".join(message.content for message in content)
        marked = text if self._spec.prompt_template is not None else _mark_data(text)
        text, data_spans = _split_data(f"{self._system}\n\n{marked}" if self._system else marked)
        content_key = short_hash(constraint_key, text, *map(str, data_spans), digits=KEY_DIGITS)
        return Prompt(text, None, *keyed, content_key, data_spans)

    def _compile_content(self, schema: pa.Schema) -> Callable[[Mapping[str, Any]], str | tuple[Message, ...]]:
        spec = self._spec
        given = [x for x in (spec.prompt_template, spec.prompt_column, spec.messages_column) if x is not None]
        if len(given) > 1:
            raise PromptError("give one of template, prompt column and messages column, not several")
        if spec.prompt_template is not None:
            return self._compile_template(spec.prompt_template, schema)
        if (name := spec.prompt_column or spec.messages_column) is not None:
            check_columns([name], schema, "prompt column" if spec.prompt_column else "messages column")
            self._refuse_hidden({name}, "the prompt")
            self._columns.add(name)
            read = _text_of if spec.prompt_column else _messages_of
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

    def _load_constraint(self, cell: Any) -> "_Keyed | Refusal":
        try:
            constraint = row_constraint(self._spec, cell)
            if constraint not in self._constraints:
                self._constraints[constraint] = _keyed(load_constraint(constraint.kind, constraint.source))
        except ConstraintError as error:
            return Refusal(RowStatus.CONSTRAINT_ERROR, str(error))
        return self._constraints[constraint]


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
    stands_alone = spec.prompt_template is not None or spec.messages_column is not None or not spec.chat
    if stands_alone or spec.constraint is None:
        return None
    source = spec.constraint.source
    match spec.constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return (
                "Answer with one JSON document on one line that follows this JSON Schema, and nothing else:\n"
                + json.dumps(json.loads(source), ensure_ascii=False)
            )
        case ConstraintKind.CHOICE:
            return "Answer with exactly one of these, and nothing else:\n" + "\n".join(json.loads(source))
        case ConstraintKind.REGEX:
            return f"Answer with text that matches this regular expression, and nothing else:\n{source}"
        case ConstraintKind.EBNF:
            return f"Answer with text that follows this grammar, and nothing else:\n{source}"


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
