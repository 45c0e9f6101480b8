"""What a row thinks before its answer: free text up to a marker, or to the end of its own budget, or to where the model
would end the output.

The marker is found in bytes, so it may be one token, several, or a part of one. The answer begins at a border between
tokens: one that reaches beyond the marker is replaced. Knows no grammar engine and no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache

from engine.closing import Closer
from engine.forced import CONTEXT_TOKENS
from engine.states import SharedMatcher
from engine.text import Text
from engine.types import Detokenizer, Ids, Sequence
from schemas.records import Sampling, Thinking

ENCODINGS_KEPT = 1024


class Thought:
    """The thinking of one row, which owns it. It keeps what the row needs for its answer, until that begins."""

    matcher: SharedMatcher | None = None
    closer: Closer | None = None
    detokenizer: Detokenizer | None = None

    def __init__(self, end: str, max_tokens: int) -> None:
        """``max_tokens`` before the marker ``end``."""
        self.max_tokens = max_tokens
        self._end = end.encode()
        self._tail = b""  # of what is written: where the marker may have begun

    def read(self, piece: bytes) -> int | None:
        """Take in the bytes of a token; returns how many of them the marker ends behind, None if it does not end."""
        text = self._tail + piece
        at = text.find(self._end)
        self._tail = text[max(0, len(text) - len(self._end) + 1) :]
        return None if at < 0 else at + len(self._end) - (len(text) - len(piece))

    def missing(self) -> str:
        """What is missing of the marker; a character that was begun is written again."""
        begun = max(size for size in range(len(self._end)) if self._tail.endswith(self._end[:size]))
        whole = self._end[:begun].decode(errors="ignore").encode()
        return self._end[len(whole) :].decode()


class Thoughts:
    """Follows the thinking of one engine's rows. All methods belong to the loop's thread."""

    def __init__(self, text: Text, pieces: Callable[[], Seq[bytes]]) -> None:
        """``pieces`` returns the bytes of all tokens, special ones by their names."""
        self._text = text
        self._pieces = pieces
        self._encode = lru_cache(ENCODINGS_KEPT)(text.encode_after)

    def begin(self, sequence: Sequence) -> None:
        """Let a row think if that was asked for: it has no constraint and no stop strings until that ends."""
        if thinking := sequence.request.sampling.thinking:
            thought = Thought(thinking.end, fit(thinking, sequence.request.sampling, sequence.max_tokens))
            thought.matcher, sequence.matcher = sequence.matcher, None
            thought.closer, sequence.closer = sequence.closer, None
            thought.detokenizer, sequence.detokenizer = sequence.detokenizer, None
            sequence.thought = thought

    def extend(self, sequence: Sequence, drawn: Ids, logprob: float) -> int:
        """Append a drawn token, if there is one, or what ends the thinking in its place; returns how many tokens.

        After the end the row has no ``thought`` any more and all that its answer needs.
        """
        thought = sequence.thought
        assert thought is not None, "it thinks"
        end = self._end(sequence, thought, drawn)
        tokens = drawn if end is None else end
        if end is not None and (end != drawn or thought.matcher):
            sequence.void_in_flight()  # what was launched goes on from another token, or without the constraint
        sequence.token_ids.extend(tokens)
        num_kept = len(drawn) if tokens[: len(drawn)] == drawn else 0
        sequence.logprobs.extend((*(logprob,) * num_kept, *(0.0,) * (len(tokens) - num_kept)))
        sequence.num_thought = sequence.num_output
        if end is not None:
            sequence.matcher, sequence.closer = thought.matcher, thought.closer
            sequence.detokenizer, sequence.thought = thought.detokenizer, None
        return len(tokens)

    def reasoning(self, sequence: Sequence) -> str | None:
        """What was thought, without the markers around it; None if no thinking was asked for."""
        thinking = sequence.request.sampling.thinking
        if thinking is None:
            return None
        text = self._text.decode(sequence.output_ids[: sequence.num_thought])
        return text.partition(thinking.end)[0].strip().removeprefix(thinking.start).lstrip()

    def _end(self, sequence: Sequence, thought: Thought, drawn: Ids) -> Ids | None:
        """The tokens that end the thinking in the place of ``drawn``; None if it goes on."""
        if not sequence.request.sampling.ignore_eos and self._text.eos_token_ids.intersection(drawn):
            return self._force(sequence, (), thought.missing())
        piece = b"".join(map(self._piece, drawn))
        if (size := thought.read(piece)) is not None:
            return drawn if size == len(piece) else self._force(sequence, (), piece[:size].decode(errors="ignore"))
        if sequence.num_output + len(drawn) < thought.max_tokens:
            return None
        return self._force(sequence, drawn, thought.missing())

    def _piece(self, token_id: int) -> bytes:
        pieces = self._pieces()
        return pieces[token_id] if token_id < len(pieces) else b""  # the model's padding

    def _force(self, sequence: Sequence, kept: Ids, text: str) -> Ids:
        """``kept`` and the tokens of ``text``, as far as the row has room."""
        before = (*sequence.token_ids[-CONTEXT_TOKENS:], *kept)
        tokens = (*kept, *self._encode(before[-CONTEXT_TOKENS:], text))
        return tokens[: sequence.max_tokens - sequence.num_output]


def fit(thinking: Thinking, sampling: Sampling, max_tokens: int) -> int:
    """Tokens of the thinking before its marker: of fewer tokens than were asked for, the same share."""
    room = max_tokens - 1 - len(thinking.end.encode())  # beside the marker and a token of the answer
    return max(0, min(thinking.max_tokens * max_tokens // sampling.budget, room))
