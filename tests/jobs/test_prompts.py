"""Prompts: what each kind of job asks, what is refused for the job, and what only ends one row."""

import json
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from jobs.prompts import Prompt, PromptBuilder, Refusal, system_text
from schemas.errors import ConstraintError, InputDataError, PromptError
from schemas.records import Constraint, ConstraintKind, JobSpec, RowStatus, Sampling, Thinking
from tests.tiny_jobs import MODEL, YES_NO, json_schema


def builder_of(row: dict[str, Any], **fields: Any) -> PromptBuilder:
    schema = fields.pop("schema", None) or pa.Table.from_pylist([row]).schema
    return PromptBuilder(JobSpec(name="t", inputs=(), model=MODEL, **fields), schema)


def build(row: dict[str, Any], **fields: Any) -> Prompt | Refusal:
    return builder_of(row, **fields).build(row)


def text_of(row: dict[str, Any], **fields: Any) -> str:
    prompt = build(row, **fields)
    assert isinstance(prompt, Prompt), prompt
    return prompt.text if prompt.messages is None else prompt.messages[-1].content


def roles_of(prompt: Prompt | Refusal) -> list[str]:
    assert isinstance(prompt, Prompt)
    assert prompt.messages is not None
    return [message.role for message in prompt.messages]


def test_a_prompt_column_is_asked_as_it_is() -> None:
    assert text_of({"a": "x", "q": "  why? {{ a }}\n"}, prompt_column="q") == "  why? {{ a }}\n"


@pytest.mark.parametrize("value", [None, "", " \n", 7, 1.5, b"bytes", ["x"]])
def test_a_null_empty_or_non_text_prompt_ends_its_row(value: Any) -> None:
    schema = pa.schema({"q": pa.string()})
    refusal = builder_of({}, schema=schema, prompt_column="q").build({"q": value})
    assert isinstance(refusal, Refusal)
    assert refusal.status is RowStatus.INPUT_ERROR
    assert refusal.error.startswith("q is ")


def test_without_column_and_template_all_columns_but_gold_and_outputs_are_asked() -> None:
    row = {"title": "Hi", "n": 3, "tags": ["a", "ü"], "ok": True, "none": None, "image": b"png", "truth": "yes"}
    lines = 'title: Hi\nn: 3\ntags: ["a", "ü"]\nok: true'
    assert text_of({**row, "x_raw": "old"}, gold_column="truth", output_column="x") == lines


def test_a_single_column_is_asked_without_its_name() -> None:
    assert text_of({"text": "Hi", "truth": "yes"}, gold_column="truth") == "Hi"


def test_a_row_of_nulls_ends_with_an_input_error() -> None:
    schema = pa.schema({"a": pa.string(), "b": pa.string()})
    assert builder_of({}, schema=schema).build({"a": None, "b": ""}) == (
        RowStatus.INPUT_ERROR,
        "all columns are null or empty",
    )


def test_a_template_sees_its_columns_and_reads_no_others() -> None:
    row = {"a": "x", "b c": "y", "other": "z"}
    builder = builder_of(row, prompt_template="{{ a }} {{ row['b c'] }}{% for i in range(2) %}!{% endfor %}")
    assert builder.columns == ("a", "b c")
    prompt = builder.build({"a": "x", "b c": "y"})
    assert isinstance(prompt, Prompt)
    assert prompt.messages[-1].content == "x y!!"
    assert builder_of(row, prompt_template="{{ row }}").columns == ("a", "b c", "other")
    assert builder_of(row, prompt_template="the same for all").columns == ()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ aa }}", r"no column 'aa'; there are: a\. Did you mean 'a'"),
        ("{{ row['zz'] }}", "no column 'zz'"),
        ("{{ a", "wrong in line 1"),
        ("{% if a %}", "wrong in line 1"),
        ("{{ truth }}", "gold and output columns never enter a prompt"),
        ("{{ row['truth'] }}", "gold and output columns never enter a prompt"),
        ("{{ label_raw }}", "gold and output columns never enter a prompt"),
    ],
)
def test_a_template_that_no_row_can_render_is_refused_at_submit(template: str, message: str) -> None:
    with pytest.raises((PromptError, InputDataError), match=message):
        builder_of({"a": "x", "truth": "y"}, gold_column="truth", prompt_template=template)


def test_a_gold_column_is_no_prompt_column() -> None:
    with pytest.raises(PromptError, match="gold and output columns never enter a prompt"):
        builder_of({"a": "x", "truth": "y"}, gold_column="truth", prompt_column="truth")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ a }}", "null"),
        ("{{ a.b.c }}", "no attribute"),
        ("{{ a + 1 }}", "TypeError"),
        ("{{ a or '' }}", "is empty"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|no attribute|unsafe"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
    ],
)
def test_a_template_that_fails_on_a_row_ends_only_that_row(template: str, reason: str) -> None:
    refusal = builder_of({}, schema=pa.schema({"a": pa.string()}), prompt_template=template).build({"a": None})
    assert isinstance(refusal, Refusal)
    assert refusal.status is RowStatus.INPUT_ERROR
    assert any(part in refusal.error for part in reason.split("|")), refusal.error


MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]


@pytest.mark.parametrize("value", [MESSAGES, json.dumps(MESSAGES), [{**m, "name": None} for m in MESSAGES]])
def test_a_conversation_comes_as_structs_or_as_json(value: Any) -> None:
    schema = pa.schema({"m": pa.string()})
    prompt = builder_of({}, schema=schema, messages_column="m", system="mine").build({"m": value})
    assert isinstance(prompt, Prompt)
    assert [(m.role, m.content) for m in prompt.messages] == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize(
    "value",
    [None, [], "", "no json", "{}", "[1]", "3", [{"role": "user"}], [{"role": "user", "content": None}],
     [{"role": "", "content": "x"}], [{"role": "user", "content": ["x"]}],
     [{"role": "user", "content": "x", "tool_calls": [1]}]],
)  # fmt: skip
def test_a_malformed_conversation_ends_its_row(value: Any) -> None:
    refusal = builder_of({}, schema=pa.schema({"m": pa.string()}), messages_column="m").build({"m": value})
    assert isinstance(refusal, Refusal)
    assert refusal.status is RowStatus.INPUT_ERROR


def test_the_system_text_says_what_the_constraint_wants() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {}}}
    prompt = build({"q": "x"}, prompt_column="q", constraint=json_schema(schema))
    assert roles_of(prompt) == ["system", "user"]
    assert json.dumps(schema) in prompt.messages[0].content
    assert "yes\nno" in build({"q": "x"}, prompt_column="q", constraint=YES_NO).messages[0].content
    for kind, source in ((ConstraintKind.REGEX, "[ab]+"), (ConstraintKind.EBNF, 'root ::= "a"')):
        constraint = Constraint(kind=kind, source=source)
        spec = JobSpec(name="t", inputs=(), model=MODEL, constraint=constraint)
        assert source in system_text(spec)
        thinking = msgspec.structs.replace(spec, sampling=Sampling(thinking=Thinking(max_tokens=9)))
        assert system_text(thinking).startswith("Think step by step first. Then answer with text")


def test_the_users_own_system_text_or_template_stands() -> None:
    row = {"q": "x"}
    assert build(row, constraint=YES_NO, system="mine").messages[0].content == "mine"
    assert roles_of(build(row, constraint=YES_NO, system="")) == ["user"]
    assert roles_of(build(row, constraint=YES_NO, prompt_template="{{ q }}?")) == ["user"]


def test_a_plain_completion_is_text_and_only_the_users_system_text_comes_before_it() -> None:
    assert build({"q": "x"}, chat=False, constraint=YES_NO)[:2] == ("x", None)
    assert build({"q": "x"}, chat=False, system="S")[:2] == ("S\n\nx", None)


def test_a_plain_completion_says_which_of_its_text_is_the_rows() -> None:
    def data(row: dict[str, Any], **fields: Any) -> list[str]:
        prompt = build(row, chat=False, **fields)
        assert isinstance(prompt, Prompt)
        return [prompt.text[start:end] for start, end in prompt.data_spans]

    assert data({"q": "x<|im_end|>"}, system="<|im_start|>") == ["x<|im_end|>"]
    assert data({"a": "1", "b": "\ufdd0"}) == ["a: 1\nb: "]
    template = "{% set both %}{{ a }}+{{ b }}{% endset %}<s>{{ a | upper }}</s>{% if b %}{{ both }}{% endif %}."
    assert data({"a": "x", "b": 2}, prompt_template=template) == ["X", "x+2"]
    assert build({"a": "x", "b": 2}, chat=False, prompt_template=template).text == "<s>X</s>x+2."


def test_equal_questions_have_equal_content_keys_and_others_do_not() -> None:
    keys = {
        build({"q": q}, constraint=c, chat=chat).content_key
        for q in "xy"
        for c in (None, YES_NO)
        for chat in (True, False)
    }
    assert len(keys) == 8
    assert build({"q": "x", "id": 1}, prompt_column="q").content_key == build({"q": "x"}, prompt_column="q").content_key


def test_rows_for_which_the_filter_is_false_are_skipped() -> None:
    builder = builder_of({"lang": "de", "n": 1, "q": "x"}, prompt_column="q", where="lang == 'de' and n > 0")
    assert isinstance(builder.build({"lang": "de", "n": 1, "q": "x"}), Prompt)
    assert builder.build({"lang": "fr", "n": 1, "q": "x"}) == (RowStatus.SKIPPED, None)
    assert builder.build({"lang": "fr", "n": 1, "q": None}) == (RowStatus.SKIPPED, None)
    assert builder.columns == ("lang", "n", "q")
    null = builder.build({"lang": "de", "n": None, "q": "x"})
    assert (null.status, "filter" in null.error) == (RowStatus.INPUT_ERROR, True)


@pytest.mark.parametrize(
    ("where", "message"),
    [("lang = 'de'", "compare with =="), ("language == 'de'", "no column 'language'"), ("", "wrong in line"),
     ("lang }} {{ lang", "wrong in line"), ("row['x'] == 1", "no column 'x'")],
)  # fmt: skip
def test_a_filter_that_cannot_work_is_refused_at_submit(where: str, message: str) -> None:
    with pytest.raises((PromptError, InputDataError), match=message):
        builder_of({"lang": "de"}, where=where)


def test_a_filter_may_use_the_gold_column_and_odd_names() -> None:
    row = {"q": "x", "my gold": "yes"}
    builder = builder_of(row, prompt_column="q", gold_column="my gold", where='row["my gold"] is not none')
    assert isinstance(builder.build(row), Prompt)
    assert builder.build({**row, "my gold": None}) == (RowStatus.SKIPPED, None)


def test_a_constraint_column_gives_each_row_its_own() -> None:
    builder = builder_of(
        {"q": "x", "c": "a"}, prompt_column="q", constraint_column="c", constraint_column_kind=ConstraintKind.REGEX
    )
    first, second = (builder.build({"q": "x", "c": source}) for source in ("[ab]", "[cd]"))
    assert (first.constraint.source, second.constraint.source) == ("[ab]", "[cd]")
    assert first.content_key != second.content_key
    for source in ("[ab", None, "", 3):
        refusal = builder.build({"q": "x", "c": source})
        assert (refusal.status, bool(refusal.error)) == (RowStatus.CONSTRAINT_ERROR, True)


def test_a_constraint_column_may_mix_kinds_row_by_row() -> None:
    row = {"q": "x", "c": {"kind": "regex", "source": "[ab]"}}
    builder = builder_of(row, prompt_column="q", constraint_column="c")
    for kind, source in (("regex", "[ab]"), ("choice", '["[ab]"]'), ("ebnf", 'root ::= "a"'), ("json_schema", "{}")):
        constraint = builder.build({"q": "x", "c": {"kind": kind, "source": source}}).constraint
        assert (constraint.kind, constraint.source) == (kind, source)
    for cell in (None, {"kind": None, "source": "a"}, {"kind": "xml", "source": "a"}, {"kind": "regex", "source": ""}):
        assert builder.build({"q": "x", "c": cell}).status == RowStatus.CONSTRAINT_ERROR
    with pytest.raises(ConstraintError, match="leave out --constraint-kind"):
        builder_of(row, prompt_column="q", constraint_column="c", constraint_column_kind=ConstraintKind.REGEX)
    with pytest.raises(ConstraintError, match="structs of kind and source"):
        builder_of({"q": "x", "c": {"kind": "regex"}}, prompt_column="q", constraint_column="c")


@pytest.mark.parametrize("fields", [{"prompt_column": "zz"}, {"messages_column": "zz"}, {"constraint_column": "zz"}])
def test_an_unknown_column_is_refused(fields: dict[str, str]) -> None:
    with pytest.raises(InputDataError, match="no column 'zz'; there are: q"):
        builder_of({"q": "x"}, **fields)


def test_two_sources_of_the_prompt_are_refused() -> None:
    with pytest.raises(PromptError, match="not several"):
        builder_of({"q": "x"}, prompt_column="q", prompt_template="{{ q }}")


def test_an_input_without_a_column_to_ask_about_is_refused() -> None:
    with pytest.raises(PromptError, match="no column is left"):
        builder_of({"truth": "x", "image": b"x"}, gold_column="truth")
