"""Conversations with DeepSeek V4 checkpoints, which have no chat template: written and read by deepseek-recipe.

What a model says there may hold reasoning and calls in a markup of its own. Knows no rows.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jobs.openai_requests import BadRequest
from schemas.errors import PromptError
from schemas.records import ChatEncoding

if TYPE_CHECKING:
    import deepseek_recipe

MODEL = "checkpoint"
"""The recipe knows model versions by the names of its users' models; ours has this one."""


class Rendered(NamedTuple):
    """A prompt. ``read`` finds the answer in what the model says, where that holds more than the answer."""

    text: str
    data_spans: tuple[tuple[int, int], ...]
    read: Callable[[str], str] | None
    is_thinking: bool


def check_recipe() -> None:
    """Raise PromptError unless deepseek-recipe is installed."""
    try:
        import deepseek_recipe  # noqa: F401
    except ImportError as error:
        raise PromptError(
            "conversations with this checkpoint need deepseek-recipe: pip install 'nightmill[deepseek]', "
            "or ask in plain text with --no-chat"
        ) from error


def render(encoding: ChatEncoding, chat: Mapping[str, Any], *, thinks_first: bool = False) -> Rendered:
    """Render the body of a chat completion. Raises BadRequest.

    It thinks only if it says so; with ``thinks_first`` unless it says not to, and the engine keeps thinking apart from
    answers without calls.
    """
    import deepseek_recipe as recipe

    request = _convert(encoding, chat, is_thinking=thinks_first)
    is_v4 = encoding is ChatEncoding.DEEPSEEK_V4
    rendered = (recipe.DeepseekV4Encoding if is_v4 else recipe.DeepseekV41Encoding)().render_conversation(
        request.conversation
    )
    is_thinking, has_tools = request.conversation.thinking_mode, bool(request.conversation.tools)
    return Rendered(
        rendered.prompt,
        _gaps(rendered.special_ranges, len(rendered.prompt)),
        (lambda text: answer_in(_read(request, text))) if has_tools or (is_thinking and not thinks_first) else None,
        is_thinking,
    )


def read_message(
    encoding: ChatEncoding, chat: Mapping[str, Any], text: str, *, thinks_first: bool = False
) -> dict[str, Any]:
    """Split what the model said into ``content``, ``reasoning_content`` and ``tool_calls``."""
    return _read(_convert(encoding, chat, is_thinking=thinks_first), text)


def answer_in(message: Mapping[str, Any]) -> str:
    """Return the content; of a message with calls, the document of ``jobs.openai_requests`` that says the same.

    Raises BadRequest if a call's arguments are no JSON.
    """
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    if not calls:
        return str(message.get("content") or "")
    try:
        documents = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
    except ValueError as error:
        raise BadRequest(f"the arguments of a call are no JSON: {error}") from error
    return json.dumps(documents[0] if len(documents) == 1 else documents, ensure_ascii=False)


def _convert(
    encoding: ChatEncoding, chat: Mapping[str, Any], *, is_thinking: bool
) -> "deepseek_recipe.ConversationRequest":
    import deepseek_recipe as recipe

    versions = recipe.ModelVersion
    version = versions.DeepseekV4Pro if encoding is ChatEncoding.DEEPSEEK_V4 else versions.DeepseekV41Flash
    options = recipe.ConversionOptions(default_thinking_mode=is_thinking).with_model_alias(MODEL, version)
    try:
        return recipe.ChatCompletionRequest({**chat, "model": MODEL}).convert(options)
    except (recipe.ConversionError, ValueError) as error:
        raise BadRequest(f"the conversation cannot be rendered: {error}") from error


def _read(request: "deepseek_recipe.ConversationRequest", text: str) -> dict[str, Any]:
    import deepseek_recipe as recipe

    generator = recipe.ChatCompletionRequest.chunk_generator(request, "", MODEL)
    stream = recipe.StreamProcessor(generator, request.parsing_options)
    events = [
        recipe.InferenceChunk.ready(prompt_usage=recipe.PromptUsage(prompt_tokens=0)),
        recipe.InferenceChunk.text(text, 0),
        recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop),
    ]
    response = recipe.ChatCompletionResponse("", MODEL, 0, 0, 0)
    for chunk in [*itertools.chain.from_iterable(map(stream.push, events)), *stream.finish()]:
        response.accumulate(cast("recipe.ChatCompletionChunk", chunk))
    message: dict[str, Any] = json.loads(response.to_json())["choices"][0]["message"]
    return message


def _gaps(ranges: list[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """The spans between ``ranges``: text that is no special token whatever it spells."""
    ends = [0, *(end for _, end in ranges)]
    starts = [*(start for start, _ in ranges), length]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
