"""The prompt of a request as token ids, or what is wrong with it. Knows no engine and no other request."""

from __future__ import annotations

from array import array
from typing import TypeAlias

from engine.overlong import TooLong
from engine.text import Text
from schemas.errors import PromptError
from schemas.records import Request

Prompt: TypeAlias = "array[int] | PromptError | TooLong"
"""Token ids, or why there are none."""


def read_prompt(request: Request, text: Text, *, max_tokens: int, vocab_size: int) -> Prompt:
    """Tokenise and check a prompt of at most ``max_tokens``, for a model with ``vocab_size`` tokens."""
    try:
        token_ids = array("q", text.encode_request(request, max_tokens))
        _check(request, token_ids, max_tokens, vocab_size)
    except (PromptError, TooLong) as error:
        return error
    return token_ids


def _check(request: Request, token_ids: array[int], max_tokens: int, vocab_size: int) -> None:
    if not token_ids:
        raise PromptError("the prompt has no tokens")
    if len(token_ids) > max_tokens:
        raise TooLong(len(token_ids))
    if request.token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise PromptError(f"the prompt has a token id outside 0 .. {vocab_size - 1}")
    if (golden := request.golden_token_ids) and not 0 <= min(golden) <= max(golden) < vocab_size:
        raise PromptError(f"the golden tokens have an id outside 0 .. {vocab_size - 1}")
