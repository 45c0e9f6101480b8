"""A batch file's way: good and bad lines in, one result line each out, as the OpenAI client's types have it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from jobs.api import Submission, prepare
from jobs.export import export
from jobs.finish import try_finish
from jobs.job import Job
from jobs.source import scan_inputs
from schemas.errors import InputDataError, JobError, PromptError
from schemas.records import Completion, FinishReason, Request, RetryPolicy, Sampling, Thinking
from schemas.settings import Settings
from tests.tiny_jobs import Answer, ScriptedEngine, completion, make_job, prompt_of, run_job, write_input
from tests.tiny_models import write_tiny_model

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '{"name": "weather", "arguments": {}}'


def line(custom_id: str, body: dict[str, Any], url: str = "/v1/chat/completions") -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def ask(text: str, **parameters: Any) -> dict[str, Any]:
    return {"model": "gpt", "messages": [{"role": "user", "content": text}], **parameters}


LINES = [
    line("free", ask("Hi there")),
    line("schema", ask('{"a": 1}', response_format=FORMAT)),
    '{"custom_id": "torn", "body": {"mess',
    line("wrong", ask("maybe", response_format=FORMAT)),
    line("cut", ask("cut", max_tokens=3)),
    line("long", ask("too long")),
    line("bad schema", ask("x", response_format={"type": "json_schema", "json_schema": {"schema": {"type": "text"}}})),
    line("unknown", ask("x", top_a=1)),
    line("tool", ask(CALL, tools=TOOLS)),
    line("said", ask('{"content": "no need"}', tools=TOOLS)),
    line("response", {"input": "Hello"}, "/v1/responses"),
    line("response cut", {"input": "cut", "max_output_tokens": 3}, "/v1/responses"),
    line("response tool", {"input": CALL, "tools": [{"type": "function", "name": "weather"}]}, "/v1/responses"),
    line("no body", {}) .replace(', "body": {}', ""),
]  # fmt: skip


def echo(request: Request) -> Answer:
    """Say what was asked, or fail as asked."""
    text = prompt_of(request)
    reasons = {"cut": FinishReason.LENGTH, "too long": FinishReason.PROMPT_TOO_LONG}
    return (text, reasons.get(text, FinishReason.STOP))


def run_batch(root: Path, path: Path, **fields: Any) -> tuple[Job, ScriptedEngine]:
    engine = ScriptedEngine(echo)
    job = make_job(root, [path], body_column="body", retry=RetryPolicy(max_attempts=1), **fields)
    run_job(job, engine)
    assert try_finish(job)
    return job, engine


def exported(job: Job, path: Path) -> list[dict[str, Any]]:
    export(job, "openai-batch", str(path))
    return [json.loads(text) for text in path.read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(LINES))
    return path


def test_every_line_has_its_result_and_good_ones_are_what_the_clients_types_hold(tmp_path: Path, batch: Path) -> None:
    results = exported(run_batch(tmp_path, batch)[0], tmp_path / "results.jsonl")
    ids = [json.loads(text)["custom_id"] if "torn" not in text else None for text in LINES]
    assert [result["custom_id"] for result in results] == ids
    assert len({result["id"] for result in results}) == len(results)
    by_id = {result["custom_id"]: result for result in results}
    codes = {name: result["response"] and result["response"]["status_code"] for name, result in by_id.items()}
    bad = {None: 400, "wrong": None, "long": 400, "bad schema": 400, "unknown": 400, "no body": 400}
    assert codes == dict.fromkeys(ids, 200) | bad
    assert by_id["wrong"]["error"]["code"] == "invalid"
    assert by_id["unknown"]["response"]["body"]["error"]["message"].startswith("body: ")
    assert by_id["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
    chats = {
        name: ChatCompletion.model_validate(by_id[name]["response"]["body"], strict=True)
        for name in ("free", "schema", "cut", "tool", "said")
    }
    assert {name: chat.choices[0].finish_reason for name, chat in chats.items()} == {
        "free": "stop", "schema": "stop", "cut": "length", "tool": "tool_calls", "said": "stop",
    }  # fmt: skip
    assert chats["schema"].choices[0].message.content == '{"a": 1}'
    assert chats["said"].choices[0].message.content == "no need"
    assert chats["tool"].choices[0].message.tool_calls[0].function.name == "weather"
    assert chats["free"].usage.total_tokens == 7 + len("Hi there")
    response, cut, tool = (
        Response.model_validate(by_id[name]["response"]["body"])
        for name in ("response", "response cut", "response tool")
    )
    assert (response.output_text, response.status) == ("Hello", "completed")
    assert (cut.output_text, cut.status, cut.incomplete_details.reason) == ("cut", "incomplete", "max_output_tokens")
    assert (tool.output[0].type, tool.output[0].arguments, tool.tools[0].name) == ("function_call", "{}", "weather")


def test_what_was_thought_stands_beside_the_answer_and_is_counted(tmp_path: Path) -> None:
    def answer(request: Request) -> Completion:
        return msgspec.structs.replace(completion(request, "Hi there"), reasoning="since", num_reasoning_tokens=3)

    path = tmp_path / "requests.jsonl"
    response = {"input": "Hi", "model": "m"}
    path.write_text("\n".join([line("chat", ask("Hi")), line("response", response, "/v1/responses")]))
    sampling = Sampling(thinking=Thinking(max_tokens=9))
    job = run_job(make_job(tmp_path, [path], body_column="body", sampling=sampling), ScriptedEngine(answer))
    assert try_finish(job)
    chat, response = (result["response"]["body"] for result in exported(job, tmp_path / "results.jsonl"))
    message = chat["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Hi there", "since")
    assert ChatCompletion.model_validate(chat).usage.completion_tokens_details.reasoning_tokens == 3
    parsed = Response.model_validate(response)
    assert (parsed.output[0].type, parsed.output[0].content[0].text, parsed.output_text) == (
        *("reasoning", "since", "Hi there"),
    )
    assert parsed.usage.output_tokens_details.reasoning_tokens == 3


def test_each_line_is_asked_with_its_own_constraint_and_sampling(tmp_path: Path, batch: Path) -> None:
    _, engine = run_batch(tmp_path, batch)
    asked = {prompt_of(request): request for request in engine.requests}
    assert asked["Hi there"].constraint_key is None
    assert len({asked[text].constraint_key for text in ("Hi there", '{"a": 1}', CALL)}) == 3
    assert (asked["cut"].sampling.max_tokens, asked["Hi there"].sampling.max_tokens) == (3, 256)


def test_questions_that_differ_in_sampling_or_seed_alone_are_asked_apart(tmp_path: Path) -> None:
    bodies = [ask("x"), ask("x"), ask("x", temperature=1), ask("x", seed=1), ask("x", seed=2)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(line(str(number), body) for number, body in enumerate(bodies)))
    _, engine = run_batch(tmp_path, path, chunk_rows=8)
    assert len(engine.requests) == 4
    assert len({request.seed for request in engine.requests}) == 4


def test_bodies_in_a_parquet_column_give_the_same_labels(tmp_path: Path, batch: Path) -> None:
    good = [json.loads(text) for text in LINES if "torn" not in text and "no body" not in text]
    rows = [{**row, "body": json.dumps(row["body"])} for row in good]
    path = write_input(tmp_path / "rows.parquet", pa.Table.from_pylist(rows))
    first = {r["custom_id"]: r for r in exported(run_batch(tmp_path, batch)[0], tmp_path / "a.jsonl")}
    second = exported(run_batch(tmp_path, path)[0], tmp_path / "b.jsonl")

    def answer(result: dict[str, Any]) -> Any:
        body = result["response"] and result["response"]["body"]
        return result["error"], body and [body.get(name) for name in ("error", "usage", "status")]

    assert len(second) == len(good)
    assert [answer(first[result["custom_id"]]) for result in second] == [answer(result) for result in second]


def test_a_batch_file_needs_no_option(tmp_path: Path, batch: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    submission = Submission(inputs=(str(batch),), model=str(model))
    prepared = prepare(submission, Settings(state_dir=tmp_path / "state"))
    assert prepared.spec.body_column == "body"
    assert prepared.example.messages[-1].content == "Hi there"
    assert str(prepared.label_type) == "string"


def test_batch_files_and_tables_are_separate_jobs(tmp_path: Path, batch: Path) -> None:
    (tmp_path / "table.jsonl").write_text('{"text": "x"}')
    with pytest.raises(InputDataError, match="submit them as separate jobs"):
        scan_inputs([str(batch), str(tmp_path / "table.jsonl")])


def test_what_cannot_go_with_bodies_is_refused(tmp_path: Path, batch: Path) -> None:
    for fields in ({"num_completions": 2}, {"chat": False}, {"prompt_template": "x"}):
        with pytest.raises(PromptError):
            run_batch(tmp_path, batch, **fields)
    write_input(tmp_path / "plain.parquet", {"text": ["x"]})
    job = run_job(make_job(tmp_path, [tmp_path / "plain.parquet"]))
    assert try_finish(job)
    with pytest.raises(JobError, match="no request bodies"):
        export(job, "openai-batch", str(tmp_path / "x.jsonl"))
