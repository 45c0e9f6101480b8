"""Request bodies: what is understood, that both APIs mean the same, and what is refused with its cause."""

import json
from typing import Any

import pytest

from jobs.openai_requests import BadRequest, Question, read_body
from schemas.constraints import Decision, enforcement_plan, load_constraint, make_validator
from schemas.records import Sampling

X = {"name": "x"}
ASK = [{"role": "user", "content": "Hi"}]
CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/c"}},
    "required": ["city"],
    "$defs": {"c": {"type": "string"}},
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip


def chat(**parameters: Any) -> Question:
    return read_body(json.dumps({"messages": ASK, **parameters}))


def judged(question: Question, document: Any) -> str | None:
    assert question.constraint is not None
    constraint = load_constraint(question.constraint.kind, question.constraint.source)
    return make_validator(constraint).check(document if isinstance(document, str) else json.dumps(document))[1]


def test_parameters_become_sampling_and_what_is_not_said_is_the_jobs() -> None:
    question = chat(max_completion_tokens=9, temperature=0.5, top_p=0.9, stop="END", seed=3, model="any", user="me")
    job = Sampling(max_tokens=100, top_k=7)
    assert question.resolve_sampling(job) == Sampling(max_tokens=9, temperature=0.5, top_k=7, top_p=0.9, stop=("END",))
    assert question.seed == 3
    assert chat().resolve_sampling(job) is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "body: "),
        ("[]", "body: "),
        ('{"messages": []}', "messages is empty"),
        ('{"messages": [{"role": "user"}]}', "role user has no content"),
        ('{"messages": [{"role": "narrator", "content": "x"}]}', "messages"),
        (json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "image_url"),
        (json.dumps({"messages": ASK, "top_a": 1}), "unknown field `top_a`"),
        (json.dumps({"messages": ASK, "n": 2}), r"\$\.n"),
        (json.dumps({"messages": ASK, "stream": True}), r"\$\.stream"),
        (json.dumps({"messages": ASK, "presence_penalty": 0.5}), r"\$\.presence_penalty"),
        (json.dumps({"messages": ASK, "max_tokens": "many"}), r"\$\.max_tokens"),
        (json.dumps({"messages": ASK, "response_format": {"type": "json_schema"}}), "has no json_schema"),
        (json.dumps({"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "function": X}}), "'x'"),
        (json.dumps({"input": 3}), "input must be text or a list"),
        (json.dumps({"input": "x", "previous_response_id": "resp_1"}), "previous_response_id cannot be honoured"),
        (json.dumps({"input": [{"type": "image_generation_call"}]}), "image_generation_call"),
        ('{"messages": ' + "[" * 100_000, "body: "),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_asked_says_why(text: str, cause: str) -> None:
    with pytest.raises(BadRequest, match=cause):
        read_body(text)


def test_sampling_out_of_range_and_foreign_endpoints_are_refused() -> None:
    with pytest.raises(BadRequest, match="top_p must be in"):
        chat(top_p=2).resolve_sampling(Sampling())
    with pytest.raises(BadRequest, match=r"/v1/embeddings.* is not served"):
        read_body('{"input": "x"}', "/v1/embeddings")


def test_a_response_format_is_the_constraint_and_the_model_is_told() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    question = chat(response_format=named, messages=[{"role": "developer", "content": "Be brief"}, *ASK])
    assert json.loads(question.constraint.source) == schema
    system, user = question.messages
    assert (system.role, user.content) == ("system", "Hi")
    assert system.content.startswith("Be brief\n\nAnswer with one JSON document")
    assert json.dumps(schema) in system.content
    assert judged(chat(response_format={"type": "json_object"}), [1]) is not None
    assert chat(response_format={"type": "text"}).constraint is None


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({}, [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}, {"content": "Hi"}],
         [{"name": "weather", "arguments": {}}, {"name": "other", "arguments": {}}, "Hi", {"content": 3}]),
        ({"tool_choice": "required"}, [{"name": "now", "arguments": {}}], [{"content": "Hi"}]),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}},
         [{"name": "weather", "arguments": {"city": "Rome"}}], [{"name": "now", "arguments": {}}]),
        ({"parallel_tool_calls": True}, [[{"name": "now", "arguments": {}}] * 2], [[{"name": "now", "arguments": {}}]]),
        ({"response_format": {"type": "json_object"}}, [{"content": {"a": 1}}], [{"content": "text"}]),
    ],
)  # fmt: skip
def test_tools_are_a_constraint_that_the_decoder_keeps(parameters: Any, good: list[Any], bad: list[Any]) -> None:
    question = chat(tools=TOOLS, **parameters)
    assert question.calls_tools
    assert [judged(question, document) for document in good] == [None] * len(good)
    assert None not in [judged(question, document) for document in bad]
    assert {row.decision for row in enforcement_plan(question.constraint)} == {Decision.ENFORCED}
    assert '"name": "weather"' in question.messages[0].content


def test_tools_that_must_not_be_called_are_no_constraint() -> None:
    question = chat(tools=TOOLS, tool_choice="none")
    assert (question.constraint, question.calls_tools, len(question.messages)) == (None, False, 1)


def test_calls_and_their_results_are_told_as_texts() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]}]  # fmt: skip
    messages = chat(messages=history).messages
    assert [message.role for message in messages] == ["user", "assistant", "user"]
    assert json.loads(messages[1].content) == {"name": "weather", "arguments": {"city": "Rome"}}
    assert messages[2].content == "Result of weather: rain"


def test_a_responses_body_asks_what_the_same_chat_body_asks() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    responses = {
        "model": "m", "instructions": "Be brief", "max_output_tokens": 5, "temperature": 0.2, "store": False,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "summary": []},
            {"type": "function_call", "call_id": "c1", **function},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
        "tools": [{"type": "function", "name": "weather", "parameters": CITY}],
        "tool_choice": {"type": "function", "name": "weather"},
    }  # fmt: skip
    call = {"id": "c1", "type": "function", "function": function}
    equal = {
        "messages": [
            {"role": "system", "content": "Be brief"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        ],
        "max_completion_tokens": 5,
        "temperature": 0.2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": CITY}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    assert read_body(json.dumps(responses))._replace(chat={}) == read_body(json.dumps(equal))._replace(chat={})
    assert read_body('{"input": "Hi"}').messages == chat().messages
