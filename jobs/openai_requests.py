"""Bodies of the OpenAI API, chat completions and responses, as questions: messages, constraint, sampling.

A responses body becomes a chat body first. Tools are a constraint too: the answer is one JSON document that calls a
function, or has content where the request lets the model choose. Knows no rows and no files.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from jobs.instructions import describe_constraint, describe_tools
from schemas.records import Constraint, ConstraintKind, Message, Sampling

MAX_CALLS = 16  # in one answer
CHAT_URL, RESPONSES_URL = "/v1/chat/completions", "/v1/responses"


class BadRequest(ValueError):
    """A body that cannot be asked: what is wrong and where."""


class Question(NamedTuple):
    """What a body asks, with only what it says itself."""

    messages: tuple[Message, ...]
    constraint: Constraint | None = None
    sampling: Mapping[str, Any] = {}
    seed: int | None = None
    calls_tools: bool = False  # the answer is a document of ``name`` and ``arguments``, a list of them, or ``content``
    chat: Mapping[str, Any] = {}  # the body for chat completions that means the same

    def resolve_sampling(self, defaults: Sampling) -> Sampling | None:
        """Return the job's sampling with what the body says, None if it says nothing. Raises BadRequest."""
        try:
            return msgspec.structs.replace(defaults, **self.sampling) if self.sampling else None
        except ValueError as error:
            raise BadRequest(f"body: {error}") from error


class _Part(msgspec.Struct):
    type: Literal["text", "input_text", "output_text"]
    text: str


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _Call(msgspec.Struct):
    function: _CalledFunction
    id: str = ""


class _ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _NamedSchema(msgspec.Struct):
    schema: dict[str, Any]


class _Format(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: _NamedSchema | None = None


class _Chosen(msgspec.Struct):
    name: str


class _ToolChoice(msgspec.Struct):
    type: Literal["function"]
    function: _Chosen


class _ChatBody(msgspec.Struct, forbid_unknown_fields=True):
    """Every parameter that is understood; one that is not is an error."""

    messages: list[_ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    response_format: _Format | None = None
    tools: list[_Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _ToolChoice | None = None
    thinking: dict[str, Any] | None = None  # of DeepSeek's checkpoints, as the next
    reasoning_effort: str | None = None
    n: Literal[1] | None = None
    stream: Literal[False] | None = None
    logprobs: Literal[False] | None = None
    frequency_penalty: Literal[0] | None = None
    presence_penalty: Literal[0] | None = None
    model: Any = None  # the job's model answers, whatever this says; what follows changes no answer here
    parallel_tool_calls: Any = None
    top_logprobs: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    stream_options: Any = None
    verbosity: Any = None


SAME_IN_RESPONSES = (
    "temperature", "top_p", "seed", "model", "parallel_tool_calls", "user", "metadata", "store", "service_tier",
    "safety_identifier", "prompt_cache_key", "stream",
)  # fmt: skip
"""Parameters of a responses body that a chat body has under the same name."""

DROPPED_OF_RESPONSES = ("include", "truncation", "reasoning", "background", "max_tool_calls", "top_logprobs")
"""Parameters that ask for more output or say how to serve; the answer is the same without."""


def read_body(text: str, url: str | None = None, *, several_calls: bool = False) -> Question:
    """Read a body, for the endpoint ``url`` or the one that it looks like. Raises BadRequest.

    An answer may call several functions if the body asks for that, or with ``several_calls``.
    """
    try:
        body = msgspec.json.decode(text, type=dict[str, Any])
        chat = body if endpoint(body, url) == CHAT_URL else _from_responses(body)
        return _question(msgspec.convert(chat, _ChatBody), chat, several_calls)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRequest(f"body: {error}") from error


def endpoint(body: Mapping[str, Any], url: str | None) -> str:
    """Return what the body was written for. Raises BadRequest for an endpoint that is not served."""
    found = url or (CHAT_URL if "messages" in body else RESPONSES_URL)
    if found not in (CHAT_URL, RESPONSES_URL):
        raise BadRequest(f"url {url!r} is not served: {CHAT_URL} and {RESPONSES_URL} are")
    return found


def _from_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """Say with a chat body what a responses body says."""
    rest = {name: value for name, value in body.items() if value is not None and name not in DROPPED_OF_RESPONSES}
    chat: dict[str, Any] = {name: rest.pop(name) for name in SAME_IN_RESPONSES if name in rest}
    chat["messages"] = _messages_of_input(rest.pop("input", None), rest.pop("instructions", None))
    chat["max_completion_tokens"] = rest.pop("max_output_tokens", None)
    if found := (rest.pop("text", None) or {}).get("format"):
        is_schema = found.get("type") == "json_schema"
        chat["response_format"] = {"type": found.get("type"), **({"json_schema": found} if is_schema else {})}
    if "tools" in rest:
        chat["tools"] = [{"type": tool.get("type"), "function": tool} for tool in rest.pop("tools")]
    if choice := rest.pop("tool_choice", None):
        named = {"type": choice.get("type"), "function": choice} if isinstance(choice, dict) else choice
        chat["tool_choice"] = named
    if rest:
        raise BadRequest(f"body: {', '.join(rest)} cannot be honoured")
    return chat


def _messages_of_input(items: Any, instructions: Any) -> list[dict[str, Any]]:
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise BadRequest("body: input must be text or a list of items")
    for item in items:
        match item.get("type", "message"):
            case "message":
                messages.append({"role": item.get("role"), "content": item.get("content")})
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
            case "function_call_output":
                messages.append({"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")})
            case "reasoning":
                pass  # of an earlier answer, for people
            case other:
                raise BadRequest(f"body: an input item of type {other!r} cannot be passed on")
    return messages


def _question(body: _ChatBody, chat: dict[str, Any], several_calls: bool) -> Question:
    tools = [tool.function for tool in body.tools or ()] if body.tool_choice != "none" else []
    schema = _call_schema(tools, body, several_calls) if tools else _format_schema(body)
    constraint = None if schema is None else _constraint(schema)
    instructions = ""
    if tools:
        instructions = describe_tools(msgspec.to_builtins(tools), may_answer=body.tool_choice in (None, "auto"))
    elif constraint is not None:
        instructions = describe_constraint(constraint)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    sampling = {
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "stop": None if stop is None else tuple(stop),
        **{name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    }
    return Question(
        messages=_messages(body.messages, instructions),
        constraint=constraint,
        sampling={name: value for name, value in sampling.items() if value is not None},
        seed=body.seed,
        calls_tools=bool(tools),
        chat=chat,
    )


def _constraint(schema: dict[str, Any]) -> Constraint:
    return Constraint(kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema, ensure_ascii=False))


def _format_schema(body: _ChatBody) -> dict[str, Any] | None:
    if body.response_format is None or body.response_format.type == "text":
        return None
    if body.response_format.type == "json_object":
        return {"type": "object"}
    if body.response_format.json_schema is None:
        raise BadRequest("body: response_format of type json_schema has no json_schema")
    return body.response_format.json_schema.schema


def _call_schema(tools: Sequence[_Function], body: _ChatBody, several_calls: bool) -> dict[str, Any]:
    """The schema of an answer that calls functions, or has content where that may be."""
    if isinstance(body.tool_choice, _ToolChoice):
        wanted = body.tool_choice.function.name
        tools = [tool for tool in tools if tool.name == wanted]
        if not tools:
            raise BadRequest(f"body: tool_choice names {wanted!r}, which is none of the tools")
    definitions = {}
    branches = []
    for tool in tools:
        place = f"arguments of {tool.name}"
        definitions[place] = _moved(tool.parameters or {"type": "object", "properties": {}}, _pointer(place))
        branches.append(_object({"name": {"const": tool.name}, "arguments": {"$ref": _pointer(place)}}))
    if several_calls or body.parallel_tool_calls is True:
        branches.append({"type": "array", "items": {"anyOf": [*branches]}, "minItems": 2, "maxItems": MAX_CALLS})
    if body.tool_choice in (None, "auto"):
        definitions["content"] = _moved(_format_schema(body) or {"type": "string"}, _pointer("content"))
        branches.append(_object({"content": {"$ref": _pointer("content")}}))
    return {"$defs": definitions, "anyOf": branches}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _pointer(name: str) -> str:
    return "#/$defs/" + name.replace("~", "~0").replace("/", "~1").replace(" ", "%20")


def _moved(schema: Any, place: str) -> Any:
    """The schema with its references as they are once it lies at ``place``."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


def _messages(messages: Sequence[_ChatMessage], instructions: str) -> tuple[Message, ...]:
    """The conversation as roles and texts that every chat template knows; instructions end the system message."""
    if not messages:
        raise BadRequest("body: messages is empty")
    names = {call.id: call.function.name for message in messages for call in message.tool_calls or ()}
    plain = [_plain_message(message, names) for message in messages]
    if instructions:
        system = [plain.pop(0).content] if plain[0].role == "system" else []
        plain.insert(0, Message(role="system", content="\n\n".join([*system, instructions])))
    return tuple(plain)


def _plain_message(message: _ChatMessage, names: Mapping[str, str]) -> Message:
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    role = "system" if message.role == "developer" else message.role
    if message.role == "tool":
        role, text = "user", f"Result of {names.get(message.tool_call_id or '', 'the function')}: {text}"
    for call in message.tool_calls or ():
        text += f'{{"name": {json.dumps(call.function.name)}, "arguments": {call.function.arguments}}}'
    if not text:
        raise BadRequest(f"body: a message of role {message.role} has no content")
    return Message(role=role, content=text)
