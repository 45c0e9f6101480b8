"""Labelled rows as result lines of the OpenAI batch API: responses where there is an answer, else errors.

A line's request decides its form, a row's status what it says. Knows no files.
"""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from jobs.arrow_types import output_names
from jobs.deepseek import read_message
from jobs.job import Job
from jobs.lines import BODY
from jobs.openai_requests import RESPONSES_URL, Question, endpoint, read_body
from schemas.records import ChatEncoding, JobSpec, RowStatus, short_hash

REFUSED = {
    RowStatus.INPUT_ERROR: "invalid_request",
    RowStatus.PROMPT_TOO_LONG: "context_length_exceeded",
    RowStatus.CONSTRAINT_ERROR: "invalid_schema",
}
"""Statuses that are the request's own fault, answered as the API would; the other failures are the batch's."""


class Answer(NamedTuple):
    """What a request got."""

    identity: str
    model: str
    created: int  # Unix time
    content: str | None
    calls: tuple[tuple[str, str], ...]  # name and arguments
    reasoning: str | None
    is_cut: bool
    num_prompt_tokens: int
    num_output_tokens: int
    num_reasoning_tokens: int
    num_cached_tokens: int


def result_line(job: Job, row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the result of one output row; ``number`` is the row's among all of the job.

    A truncated answer is one that ended by its length, as the API has it: its text need not be valid.
    """
    names = output_names(job.spec.output_column)
    status, raw, error, meta = (row[name] for name in (names.status, names.raw, names.error, names.meta))
    reasoning = row.get(names.reasoning)  # None also where it stands among calls
    identity = short_hash(job.job_id, str(number), digits=24)
    line = {"id": f"batch_req_{identity}", "custom_id": row.get("custom_id"), "response": None, "error": None}
    if status in REFUSED:
        fault = {"message": error, "type": "invalid_request_error", "param": None, "code": REFUSED[status]}
        return line | {"response": _response(identity, 400, {"error": fault})}
    if status not in (RowStatus.OK, RowStatus.CLOSED, RowStatus.TRUNCATED):
        return line | {"error": {"code": str(status), "message": error}}
    text, url = row[job.spec.body_column or BODY], row.get("url")
    question = read_body(text, url)
    is_truncated = status == RowStatus.TRUNCATED
    content, calls = (raw, ()) if is_truncated else _content_and_calls(question, row[names.label])
    answer = Answer(
        identity=identity,
        model=job.spec.model.name,
        created=int(datetime.fromisoformat(job.created).timestamp()),
        content=content,
        calls=calls,
        reasoning=_reasoning(job.spec, question, raw) if reasoning is None else reasoning,
        is_cut=status != RowStatus.OK,
        num_prompt_tokens=meta["prompt_tokens"],
        num_output_tokens=meta["output_tokens"],
        num_reasoning_tokens=meta.get("reasoning_tokens") or 0,
        num_cached_tokens=meta["cached_tokens"],
    )
    is_responses = endpoint(json.loads(text), url) == RESPONSES_URL
    body = responses_body(answer, question) if is_responses else chat_body(answer)
    return line | {"response": _response(identity, 200, body)}


def chat_body(answer: Answer) -> dict[str, Any]:
    """Return the body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {"id": _call_id(answer, number), "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(answer.calls)
        ]
    reason = "length" if answer.is_cut else "tool_calls" if answer.calls else "stop"
    return {
        "id": f"chatcmpl-{answer.identity}",
        "object": "chat.completion",
        "created": answer.created,
        "model": answer.model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": answer.num_prompt_tokens,
            "completion_tokens": answer.num_output_tokens,
            "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
        },
    }


def responses_body(answer: Answer, question: Question) -> dict[str, Any]:
    """Return the body of a response."""
    status = "incomplete" if answer.is_cut else "completed"
    output: list[dict[str, Any]] = []
    if answer.reasoning:
        thought = [{"type": "reasoning_text", "text": answer.reasoning}]
        output.append({"type": "reasoning", "id": f"rs_{answer.identity}", "summary": [], "content": thought})
    for number, (name, arguments) in enumerate(answer.calls):
        call = {"call_id": _call_id(answer, number), "name": name, "arguments": arguments, "status": status}
        output.append({"type": "function_call", "id": f"fc_{answer.identity}_{number}", **call})
    if answer.content is not None:
        content = [{"type": "output_text", "text": answer.content, "annotations": []}]
        message = {"role": "assistant", "status": status, "content": content}
        output.append({"type": "message", "id": f"msg_{answer.identity}", **message})
    choice = question.chat.get("tool_choice") or "auto"
    return {
        "id": f"resp_{answer.identity}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "model": answer.model,
        "output": output,
        "parallel_tool_calls": bool(question.chat.get("parallel_tool_calls")),
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice["function"]["name"]},
        "tools": [
            {"strict": None, **tool["function"], "type": "function"} for tool in question.chat.get("tools") or ()
        ],
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
            "total_tokens": answer.num_prompt_tokens + answer.num_output_tokens,
        },
    }


def _response(identity: str, status_code: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status_code, "request_id": f"req_{identity}", "body": body}


def _content_and_calls(question: Question, label: str) -> tuple[str | None, tuple[tuple[str, str], ...]]:
    if not question.calls_tools:
        return label, ()
    document = json.loads(label)
    calls = document if isinstance(document, list) else [document] if "name" in document else []
    if calls:
        return None, tuple((call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls)
    content = document["content"]
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False), ()


def _call_id(answer: Answer, number: int) -> str:
    return f"call_{answer.identity}_{number}"


def _reasoning(spec: JobSpec, question: Question, raw: str) -> str | None:
    if spec.chat_encoding is ChatEncoding.TEMPLATE:
        return None
    thinks_first = spec.sampling.thinking is not None
    return read_message(spec.chat_encoding, question.chat, raw, thinks_first=thinks_first).get("reasoning_content")
