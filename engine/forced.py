"""Text that a grammar forces, as tokens: computed as one run with the next draw, never sampled. Knows no scheduling.

The tokens are those that the tokenizer gives the text in its context. The last one is left to the model while a longer
token could still be drawn in its place, so forcing changes no choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from engine.text import Text
from engine.types import Matcher

Ids = tuple[int, ...]
Path = tuple[str, Ids, Ids]

CONTEXT_TOKENS = 4
"""Tokens before the forced text that are encoded again with it: pre-tokenizers look back a few characters."""


ENCODINGS_KEPT = 4096
PATH_TOKENS, PATHS_KEPT = 16, 8192
"""Rows of one job pass through the same first states: what was found after a short output is kept for the next row."""


class ForcedText:
    """Turns forced text into tokens; rows of one job force the same texts, so encodings are kept."""

    def __init__(self, text: Text) -> None:
        self._encode = lru_cache(ENCODINGS_KEPT)(text.encode_after)
        self._known: dict[Path, tuple[int, ...]] = {}

    def advance(self, matcher: Matcher, grammar: str, token_ids: Sequence[int], num_prompt: int, limit: int) -> Ids:
        """Move ``matcher`` over the forced text after ``token_ids``; returns its tokens, at most ``limit``.

        ``grammar`` names the grammar, whose state after the output ``token_ids[num_prompt:]`` the matcher holds.
        """
        if limit <= 0:
            return ()
        context = tuple(token_ids[-CONTEXT_TOKENS:])
        if len(token_ids) - num_prompt > PATH_TOKENS:
            return self._find(matcher, context, limit)
        path = (grammar, tuple(token_ids[num_prompt:]), context)
        if (known := self._known.get(path)) is not None:
            return tuple(itertools.takewhile(matcher.accept, known[:limit]))
        found = self._find(matcher, context, limit)
        if len(found) < limit and len(self._known) < PATHS_KEPT:
            self._known[path] = found
        return found

    def _find(self, matcher: Matcher, context: Ids, limit: int) -> Ids:
        span = matcher.forced_text()
        forced = tuple(itertools.takewhile(matcher.accept, self._encode(context, span)[:limit])) if span else ()
        if forced and not matcher.is_at_end():
            matcher.rollback(1)
            if matcher.allows_longer(forced[-1]):
                return forced[:-1]
            matcher.accept(forced[-1])
        return forced
