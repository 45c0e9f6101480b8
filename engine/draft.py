"""Drafts: tokens that may come next, guessed without a second model and verified by the step that computes them.

A token is drawn after each of them, as without a draft, and the sequence keeps the draft as far as it was drawn: only
the number of steps changes. Decides what to guess and how much of it a step verifies. Knows no tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from engine.acceptance import Acceptance, StepCosts, choose_lengths
from engine.forced import CONTEXT_TOKENS, ForcedText
from engine.stats import EngineStats
from engine.types import NO_DRAFT, Draft, Ids, Room, Run, Sequence, SequenceStatus, StepPlan
from schemas.errors import SettingsError
from schemas.settings import EngineSettings

if TYPE_CHECKING:
    from engine.lookahead import Ahead, Lookahead, Place

MAX_MATCH = 8
"""Tokens that are compared; a longer context says no more about what follows."""
NUM_DRAFT_TOKENS = 8
"""Where the setting leaves it open: the chance that all of a longer draft is drawn is small."""

PREDICTED = -1
"""The kind of guess that a part of the model makes."""


class Guess(NamedTuple):
    """Tokens that may come next, and how well they are founded: guesses of one kind are right about as often."""

    token_ids: Seq[int]
    kind: int = 0
    chances: Seq[float] = ()  # that each is right if those before are; () where only experience tells


class DraftSource(Protocol):
    """Guesses tokens."""

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        """What may follow the tokens of ``sequence``, at most ``limit`` tokens; it may be wrong."""


class PromptLookup:
    """Guesses that a sequence goes on as it did where its last tokens stood before: an extraction copies its prompt.

    The kind is the number of last tokens that agree. Of several places the last one with the most counts.
    """

    def guess(self, sequence: Sequence, limit: int) -> Guess:
        """See DraftSource.guess; a text that repeats itself is guessed to go on doing so."""
        tokens = np.frombuffer(sequence.token_ids, dtype=np.int64)
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])
        if not len(ends):
            return Guess(())
        num_equal = 1
        while num_equal < MAX_MATCH:
            longer = ends[ends >= num_equal]
            longer = longer[tokens[longer - num_equal] == tokens[-1 - num_equal]]
            if not len(longer):
                break
            ends, num_equal = longer, num_equal + 1
        following = tokens[ends[-1] + 1 :][:limit].tolist()
        return Guess(tuple(itertools.islice(itertools.cycle(following), limit)), num_equal)


class DraftLimit(NamedTuple):
    """The most tokens that are guessed for a sequence, and whether measurements decide how many of them a step has."""

    num_tokens: int
    is_measured: bool


def resolve_num_drafts(settings: EngineSettings, device: torch.device) -> DraftLimit:
    """Fill in what ``engine.num_draft_tokens`` leaves open. Raises SettingsError where there can be no drafts."""
    wanted, has_parts = settings.num_draft_tokens, settings.context_parallel > 1
    if wanted is None:
        is_off = has_parts or (device.type == "cuda" and not settings.draft_model)
        return DraftLimit(0 if is_off else NUM_DRAFT_TOKENS, is_measured=True)
    if wanted and has_parts:
        raise SettingsError(
            f"engine.num_draft_tokens {wanted} with engine.context_parallel {settings.context_parallel}: ranks that "
            "share a prefill's rows verify no drafts, so leave one of them out"
        )
    return DraftLimit(wanted, is_measured=False)


class Drafter:
    """The drafts of one engine. All methods belong to the loop's thread."""

    def __init__(
        self,
        source: DraftSource,
        forced: ForcedText,
        end_token_ids: frozenset[int],
        limit: DraftLimit,
        stats: EngineStats,
    ) -> None:
        self._source, self._forced, self._end_token_ids = source, forced, end_token_ids
        self._limit, self._stats = limit, stats
        self._acceptance = Acceptance(limit.num_tokens)
        self.costs = StepCosts()

    def propose(self, sequence: Sequence) -> None:
        """Give a sequence that goes on a draft of what may follow its tokens, or none."""
        sequence.draft = NO_DRAFT
        if limit := self._limit_of(sequence):
            guess = self._source.guess(sequence, limit)
            if guess.token_ids and self._is_promising(sequence, guess.kind):
                self._take(sequence, guess)

    def look_ahead(
        self,
        lookahead: Lookahead,
        ahead: Ahead | None,
        places: Iterable[Place],
        reserve: Callable[[Sequence, int], bool],
    ) -> None:
        """Let a part of the model draft, behind these rows' draws, for the sequences that have no draft.

        ``reserve`` gives a sequence blocks for so many tokens, or does not.
        """
        open_places = [place for place in places if not place[0].draft.stops]
        limits = {sequence: self._limit_of(sequence) for sequence, _ in open_places}
        num_tokens = max(limits.values(), default=0)
        chosen = [
            (sequence, row)
            for sequence, row in open_places
            if limits[sequence]
            and self._is_promising(sequence, PREDICTED)
            and reserve(sequence, len(sequence.token_ids) + lookahead.num_slots(num_tokens))
        ]
        guesses = lookahead.guess(ahead, chosen, num_tokens) if chosen else []
        for (sequence, _), (token_ids, chances) in zip(chosen, guesses, strict=True):
            self._take(sequence, Guess(token_ids[: limits[sequence]], PREDICTED, chances))

    def _take(self, sequence: Sequence, guess: Guess) -> None:
        num_left = sequence.max_tokens - sequence.num_output - 1
        kind = (sequence.request.constraint_key, guess.kind)
        sequence.draft = self._follow(sequence, guess, num_left)._replace(kind=kind)

    def extend(self, plan: StepPlan, room: Room) -> StepPlan:
        """The plan with as much of its sequences' drafts as pays and as ``room`` holds."""
        drafted = [run for run in plan.runs if run.sequence.draft.stops and _can_have_draft(run)]
        if not drafted:
            return plan
        lengths: Iterable[int] = [len(run.sequence.draft.stops) for run in drafted]
        if self._limit.is_measured:
            lengths = self._choose_lengths(plan, drafted)
        drafts = {}
        for run, num_stops in zip(drafted, lengths, strict=True):
            draft, room = _fit(run.sequence, run.sequence.draft.cut(num_stops), room)
            if draft.stops:
                drafts[run.sequence] = draft
        singles = [run for run in plan.runs[: plan.num_decodes] if run.sequence not in drafts]
        longer = [run for run in plan.runs[: plan.num_decodes] if run.sequence in drafts]
        longer += plan.runs[plan.num_decodes :]
        runs = (*singles, *(run._replace(draft=drafts.get(run.sequence, NO_DRAFT)) for run in longer))
        return StepPlan(plan.preempted, runs, len(singles))

    def note(self, draft: Draft, num_accepted: int) -> None:
        """Learn how many of a draft's guesses were drawn."""
        self._acceptance.note(draft.kind, len(draft.stops), num_accepted)
        self._stats.count_draft(len(draft.stops), num_accepted)

    def _limit_of(self, sequence: Sequence) -> int:
        """Tokens that may be guessed: of a sequence that goes on, and of these the last one is always drawn."""
        if sequence.status is SequenceStatus.FINISHED:
            return 0
        return max(0, min(self._limit.num_tokens, sequence.max_tokens - sequence.num_output - 1))

    def _is_promising(self, sequence: Sequence, kind: int) -> bool:
        key = sequence.request.constraint_key
        return not self._limit.is_measured or self._acceptance.is_promising((key, kind))

    def _follow(self, sequence: Sequence, guess: Guess, num_left: int) -> Draft:
        """The draft that a guess makes: up to what the grammar refuses, with what it forces, without an end."""
        sampling = sequence.request.sampling
        matcher = sequence.matcher.fork() if sequence.matcher else None
        ends = frozenset() if sampling.ignore_eos else self._end_token_ids
        token_ids, stops, matchers = list(sequence.token_ids[-CONTEXT_TOKENS:]), [], []
        chances: list[float] = []
        num_before, index, chance = len(token_ids), 0, 1.0
        while index < len(guess.token_ids) and len(token_ids) - num_before < num_left:
            token_id = guess.token_ids[index]
            forced: Ids = ()
            if token_id in ends or (matcher and not matcher.accept(token_id)):
                break
            token_ids.append(token_id)
            if matcher and sampling.force_text:
                limit = num_left - (len(token_ids) - num_before)
                forced = self._forced.advance(matcher, token_ids[-CONTEXT_TOKENS - 1 :], limit)
            if matcher and matcher.is_at_end():
                break  # drawn, it ends the sequence without another step
            token_ids += forced
            stops.append(len(token_ids) - num_before)
            matchers.append(matcher.fork() if matcher else None)
            if guess.chances:
                chance *= guess.chances[index]
                chances.append(chance)
            index += 1 + len(forced)
            if tuple(guess.token_ids[index - len(forced) : index]) != forced:
                break
        end = num_before + stops[-1] if stops else num_before
        return Draft(tuple(token_ids[num_before:end]), tuple(stops), tuple(matchers), tuple(chances))

    def _choose_lengths(self, plan: StepPlan, drafted: Seq[Run]) -> list[int]:
        num_draws = sum(run.wants_logits for run in plan.runs)
        num_decode_rows = sum(run.num_tokens for run in plan.runs if run.sequence.num_output)
        chances = [self._acceptance.chances(run.sequence.draft) for run in drafted]
        most = sum(map(len, chances))
        more_s = self.costs.seconds(np.arange(plan.num_tokens, plan.num_tokens + most + 1))
        base_s = self.costs.seconds(np.array([max(1, num_decode_rows)]))
        return choose_lengths(chances, num_draws, base_s + more_s - more_s[0])


def _can_have_draft(run: Run) -> bool:
    return run.wants_logits and run.sequence.num_in_flight == 0


def _fit(sequence: Sequence, draft: Draft, room: Room) -> tuple[Draft, Room]:
    """As much of the draft as there is room for, and the room after it."""
    held = max(len(sequence.block_ids), -(-sequence.num_tokens // room.block_size))
    num_free_tokens = (held + room.num_blocks) * room.block_size - sequence.num_tokens
    num_tokens = min(room.num_rows, num_free_tokens)
    num_stops = sum(stop <= num_tokens for stop in draft.stops)
    draft = draft.cut(min(num_stops, room.num_draws))
    num_tokens = len(draft.token_ids)
    num_blocks = max(0, -(-(sequence.num_tokens + num_tokens) // room.block_size) - held)
    left = room._replace(
        num_rows=room.num_rows - num_tokens,
        num_draws=room.num_draws - len(draft.stops),
        num_blocks=room.num_blocks - num_blocks,
    )
    return draft, left
