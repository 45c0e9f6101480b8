"""Text that a grammar forces, as tokens: computed as one run with the next draw, never sampled. Knows no scheduling.

The tokens are those that the tokenizer gives the text in its context. The last one is left to the model while a longer
token could still be drawn in its place, so forcing changes no choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from engine.spelling import Way
from engine.text import Text
from engine.types import Ids, Matcher

CONTEXT_TOKENS = 4
"""Tokens before the forced text that are encoded again with it: pre-tokenizers look back a few characters."""

ENCODINGS_KEPT = 4096
MEMOS_KEPT = 16
"""Contexts of one state: after a few tokens of output it has one, at the start one for each end of a prompt."""


class ForcedText:
    """Turns forced text into tokens; rows of one job force the same texts, so encodings are kept."""

    def __init__(self, text: Text) -> None:
        self._encode = lru_cache(ENCODINGS_KEPT)(text.encode_after)

    def advance(self, matcher: Matcher, token_ids: Sequence[int], limit: int) -> Ids:
        """Move ``matcher`` over the forced text after ``token_ids``; returns its tokens, at most ``limit``."""
        if limit <= 0:
            return ()
        context, memo = tuple(token_ids[-CONTEXT_TOKENS:]), matcher.memo
        if memo is not None and (known := memo.get(context)) is not None:
            return tuple(itertools.takewhile(matcher.accept, known[:limit]))
        found = self._find(matcher, context, limit)
        if memo is not None and len(found) < limit and len(memo) < MEMOS_KEPT:
            memo[context] = found
        return found

    def _find(self, matcher: Matcher, context: Ids, limit: int) -> Ids:
        found: Ids = ()
        while len(found) < limit:
            way, before = matcher.way, (*context, *found)[-CONTEXT_TOKENS:]
            more = self._spelled(matcher, way) if way else self._plain(matcher, before, limit - len(found))
            found += more
            if not more or way is matcher.way:
                break
        return found

    def _spelled(self, matcher: Matcher, way: Way) -> Ids:
        """The next token of a closed choice if all its texts have the same."""
        token_id = way.only
        return () if token_id is None or not matcher.accept(token_id) else (token_id,)

    def _plain(self, matcher: Matcher, context: Ids, limit: int) -> Ids:
        """The forced text as far as no closed choice is near, which has its own spellings."""
        span, forced = matcher.forced_text(), list[int]()
        for token_id in self._encode(context, span)[:limit] if span else ():
            if not matcher.accept(token_id):
                break
            forced.append(token_id)
            if matcher.way:
                return tuple(forced)
        if forced and not matcher.is_at_end():
            matcher.rollback(1)
            if matcher.allows_longer(forced[-1]):
                return tuple(forced[:-1])
            matcher.accept(forced[-1])
        return tuple(forced)
