"""Text that a grammar forces, as tokens: computed as one run with the next draw, never sampled. Knows no scheduling.

The tokens are those that the tokenizer gives the text in its context. The last one is left to the model while a longer
token could still be drawn in its place, so forcing changes no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from engine.text import Text
from engine.types import Matcher

CONTEXT_TOKENS = 4
"""Tokens before the forced text that are encoded again with it: pre-tokenizers look back a few characters."""


ENCODINGS_KEPT = 4096


class ForcedText:
    """Turns forced text into tokens; rows of one job force the same texts, so encodings are kept."""

    def __init__(self, text: Text) -> None:
        self._encode = lru_cache(ENCODINGS_KEPT)(text.encode_after)

    def advance(self, matcher: Matcher, token_ids: Sequence[int], limit: int) -> list[int]:
        """Move ``matcher`` over the forced text after ``token_ids``; returns its tokens, at most ``limit``."""
        forced: list[int] = []
        if limit <= 0 or not (span := matcher.forced_text()):
            return forced
        for token_id in self._encode(tuple(token_ids[-CONTEXT_TOKENS:]), span)[:limit]:
            if not matcher.accept(token_id):
                break
            forced.append(token_id)
        if forced and not matcher.is_at_end():
            matcher.rollback(1)
            if matcher.allows_longer(forced[-1]):
                forced.pop()
            else:
                matcher.accept(forced[-1])
        return forced
