"""The one mutable object of the engine, and what planning says about it. Knows no torch, no grammar, no text."""

from __future__ import annotations

import time
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from schemas.records import Request

if TYPE_CHECKING:
    from engine.closing import Closer
    from engine.spelling import Way
    from engine.states import SharedMatcher
    from engine.thinking import Thought


class SequenceStatus(StrEnum):
    """Where a sequence is in its life."""

    WAITING = "waiting"  # for its grammar, or for blocks and a place in the batch
    RUNNING = "running"
    FINISHED = "finished"


Ids = tuple[int, ...]


class Matcher(Protocol):
    """A grammar's state after the output so far; it survives preemption because the tokens do."""

    @property
    def memo(self) -> dict[Ids, Ids] | None:
        """A place to keep the forced tokens after a context, where rows share the state."""

    @property
    def way(self) -> Way | None:
        """Where it is in the spelling of a closed choice, where rows share the state."""

    @property
    def is_terminated(self) -> bool:
        """Whether the end token was accepted."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, if the grammar does not allow it."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last accepted tokens."""

    def fork(self) -> Matcher:
        """A matcher in the same state that goes its own way."""

    def can_end(self) -> bool:
        """Whether the text is whole."""

    def is_at_end(self) -> bool:
        """Whether the end token is the only one allowed next."""

    def forced_text(self) -> str:
        """The text that every continuation begins with; "" where there is a choice."""

    def allows_longer(self, token_id: int) -> bool:
        """Whether a token is allowed whose bytes begin with, and go beyond, those of ``token_id``."""


class Detokenizer(Protocol):
    """Turns tokens into text one by one."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""


class Draft(NamedTuple):
    """Tokens that may come next: a step computes them, and draws and compares the token after each of ``stops``.

    Between stops lies what the grammar forces, which is as certain as the token before it.
    """

    token_ids: Ids = ()
    stops: tuple[int, ...] = ()  # numbers of tokens, ascending; the last one is all of them
    matchers: tuple[SharedMatcher | None, ...] = ()  # at each stop
    chances: tuple[float, ...] = ()  # that the draft is right up to each stop; () where only experience tells
    kind: Hashable = None  # drafts of one kind are accepted about as often

    def cut(self, num_stops: int) -> Draft:
        """The draft up to one of its stops; none of it for 0."""
        end = self.stops[num_stops - 1] if num_stops else 0
        return Draft(
            self.token_ids[:end], self.stops[:num_stops], self.matchers[:num_stops], self.chances[:num_stops], self.kind
        )


NO_DRAFT = Draft()


@dataclass(eq=False, slots=True)
class Sequence:
    """A request in the engine. Owned by the scheduler: only it, and the loop's update, change a sequence.

    ``token_ids`` is prompt then output, and every token in it is accepted. The first ``num_computed`` of them have
    their keys and values in ``block_ids``; the first ``num_registered`` blocks are known to the prefix cache.
    """

    request: Request
    token_ids: array[int]
    num_prompt: int
    max_tokens: int  # output tokens at most: the request's, clamped by the model's length
    matcher: SharedMatcher | None = None
    closer: Closer | None = None  # sees that the budget lasts to the grammar's end
    thought: Thought | None = None  # what is written is free until this has ended; it keeps the two above until then
    num_thought: int = 0  # output tokens before the answer
    num_steered: int = 0  # output tokens at the end that closed it
    draft: Draft = NO_DRAFT  # of what may follow ``token_ids``; with one, a step waits for the tokens in flight
    branch: tuple[int, ...] = ()  # these tokens' probabilities are asked for, instead of a token
    detokenizer: Detokenizer | None = None
    status: SequenceStatus = SequenceStatus.WAITING
    block_ids: array[int] = field(default_factory=lambda: array("q"))
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading full blocks, computed when first asked for
    num_computed: int = 0
    num_in_flight: int = 0  # tokens drawn by launched steps whose values the host has not read yet
    draw_row: int = 0  # of the last of them, in its step's draw
    num_void: int = 0  # draws of launched steps that do not count any more
    num_registered: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at the first admission
    num_preemptions: int = 0
    num_draft_tokens: int = 0  # verified so far
    num_accepted_tokens: int = 0  # of these, drawn as guessed
    text: str = ""  # what the detokenizer has returned; only for sequences with stop strings
    logprobs: list[float] = field(default_factory=list)
    admitted_at: float | None = None  # monotonic seconds
    first_drawn_at: float | None = None
    finished_at: float | None = None

    def set_status(self, status: SequenceStatus) -> None:
        """Change the status and stamp the time of the first admission and of the end."""
        assert self.status is not SequenceStatus.FINISHED, "a finished sequence is final"
        self.status = status
        if status is SequenceStatus.RUNNING and self.admitted_at is None:
            self.admitted_at = time.monotonic()
        if status is SequenceStatus.FINISHED:
            self.finished_at = time.monotonic()

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, those in flight included."""
        return len(self.token_ids) + self.num_in_flight

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def answer_start(self) -> int:
        """The place of the answer's first token: behind the prompt and what was thought."""
        return self.num_prompt + self.num_thought

    @property
    def num_answered(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.answer_start

    @property
    def num_drawn(self) -> int:
        """Output tokens, those in flight included; also the index of the next one to be drawn."""
        return self.num_output + self.num_in_flight

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose keys and values are still missing; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_ready(self) -> bool:
        """Whether the next step can be planned: constraint, penalty and draft must know the tokens in flight first."""
        if self.num_in_flight == 0:
            return True
        is_free = self.matcher is None and self.request.sampling.repetition_penalty == 1.0 and not self.draft.token_ids
        return is_free and self.num_drawn < self.max_tokens

    @property
    def output_ids(self) -> array[int]:
        """The output tokens, end token included (a copy)."""
        return self.token_ids[self.num_prompt :]

    def void_in_flight(self) -> None:
        """Make nothing of the tokens in flight, and compute anew what follows the last token that is known."""
        self.num_void += self.num_in_flight
        self.num_in_flight = 0
        self.num_computed = min(self.num_computed, len(self.token_ids))

    def note_drawn(self) -> None:
        """Stamp the time of the first token that was drawn; forced ones come for free."""
        if self.first_drawn_at is None:
            self.first_drawn_at = time.monotonic()

    @property
    def first_token_s(self) -> float | None:
        """From first admission to the first drawn token; None if none was drawn."""
        if self.admitted_at is None or self.first_drawn_at is None:
            return None
        return self.first_drawn_at - self.admitted_at

    @property
    def seconds(self) -> float:
        """From first admission to the end; 0 for a sequence that was never admitted."""
        if self.admitted_at is None or self.finished_at is None:
            return 0.0
        return self.finished_at - self.admitted_at


class Run(NamedTuple):
    """The next ``num_tokens`` tokens of a sequence, computed in one step."""

    sequence: Sequence
    start: int
    num_tokens: int
    wants_logits: bool  # it reaches the sequence's last token, so that the next one can be drawn
    draft: Draft = NO_DRAFT  # computed behind these tokens

    @property
    def num_rows(self) -> int:
        """Tokens computed, those of the draft included."""
        return self.num_tokens + len(self.draft.token_ids)

    @property
    def ahead(self) -> tuple[Ids, ...]:
        """For each token that is drawn if it ``wants_logits``, the part of the draft that stands before it."""
        return ((), *(self.draft.token_ids[:stop] for stop in self.draft.stops))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the next step does: whom it preempts, then the runs, the ``num_decodes`` of one token first."""

    preempted: tuple[Sequence, ...]
    runs: tuple[Run, ...]
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """Rows of the step."""
        return sum(run.num_rows for run in self.runs)


class Room(NamedTuple):
    """What a step has left: rows, of which so many may have logits, and blocks of ``block_size`` tokens."""

    num_rows: int
    num_draws: int
    num_blocks: int
    block_size: int
