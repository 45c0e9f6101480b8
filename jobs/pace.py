"""How steadily the engine answered: the rate while its batch was full, apart from what starts and ends a job.

A job of many rows runs at that rate; a short one is mostly start and end. Knows no jobs and no rows.
"""

import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schemas.records import Completion, Record

MAX_MARKS = 64
"""Of a chunk: enough to tell a batch from the next, and a few kilobytes in its part."""
MAX_PIECES = 8
LONE_ERROR, UNKNOWN_ERROR = 0.15, 0.4
"""Of a rate from a single batch, and of one with the start and the end of a run in it."""


class Mark(Record):
    """What was answered until a moment: completions, and the tokens that were computed for them."""

    at_s: float  # since 1970
    num_done: int
    num_prompt_tokens: int  # without what the prefix cache had
    num_output_tokens: int


class Pace(Record):
    """Of one chunk; every try at a row counts."""

    first_admitted_s: float
    last_admitted_s: float  # afterwards no request waits, and the batch drains
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class SteadyRate:
    """``error`` 0.1: runs like this one would differ by 10 %. Without ``is_steady`` the batch was not full for long."""

    is_steady: bool
    completions_per_s: float
    tokens_per_s: float  # computed
    prompt_tokens: float  # computed for a completion: later ones find in the cache what the first ones put there
    error: float


class Answer(NamedTuple):
    """A completion's time and work, without its texts and tokens: a chunk notes thousands."""

    at_s: float
    admitted_s: float
    num_prompt_tokens: int  # without what the prefix cache had
    num_output_tokens: int

    @classmethod
    def of(cls, completion: Completion, at_s: float) -> "Answer":
        """A completion that came at ``at_s``."""
        num_prompt_tokens = completion.num_prompt_tokens - completion.num_cached_tokens
        return cls(at_s, at_s - completion.seconds, num_prompt_tokens, len(completion.token_ids))


class PaceMeter:
    """Notes completions as they come in, from any thread; owned by one run of a chunk."""

    def __init__(self) -> None:
        self._answers: list[Answer] = []

    def note(self, future: Future[Completion]) -> None:
        """Take a completion now; a callback of its future. One that the engine never gave is none."""
        if not future.cancelled() and future.exception() is None:
            self._answers.append(Answer.of(future.result(), time.time()))

    def read(self) -> Pace | None:
        """What was noted so far; None if that is nothing."""
        return make_pace(self._answers.copy())


def make_pace(answers: Sequence[Answer]) -> Pace | None:
    """``answers`` in the order in which they came."""
    if not answers:
        return None
    admitted = [answer.admitted_s for answer in answers]
    works = [(1, answer.num_prompt_tokens, answer.num_output_tokens) for answer in answers]
    sums = np.cumsum(np.array(works, dtype=np.int64), axis=0).tolist()
    kept = np.unique(np.linspace(0, len(answers) - 1, MAX_MARKS).round().astype(int)).tolist()
    marks = tuple(_mark(answers[index].at_s, *sums[index]) for index in kept)
    return Pace(first_admitted_s=round(min(admitted), 3), last_admitted_s=round(max(admitted), 3), marks=marks)


def _mark(at_s: float, num_done: int, num_prompt_tokens: int, num_output_tokens: int) -> Mark:
    return Mark(
        at_s=round(at_s, 3),
        num_done=num_done,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
    )


def steady_rate(paces: Sequence[Pace]) -> SteadyRate | None:
    """The rate of chunks that ran together, between the first full batch's end and the last request's admission.

    What runs at either border is in the same state of being half done, so completions between them are the work
    that was done between them. Where there is less than one batch between them, it is the rate of everything, which
    is too slow by what filling and draining cost. None if nothing was answered.
    """
    if not paces:
        return None
    at_s, sums = _merge(paces)
    last = max(0, int(np.searchsorted(at_s, max(pace.last_admitted_s for pace in paces), side="right")) - 1)
    num_running = int(sums[-1, 0] - sums[last, 0])  # when the last request was admitted: a full batch
    first = int(np.searchsorted(sums[:, 0], num_running))
    if num_running and at_s[first] < at_s[last] and sums[last, 0] - sums[first, 0] >= num_running:
        seconds, work = float(at_s[last] - at_s[first]), sums[last] - sums[first]
        error = _standard_error(at_s[first : last + 1], sums[first : last + 1, 0], num_running)
        return _rate(work, seconds, error, is_steady=True)
    seconds, work = max(1e-3, float(at_s[-1]) - min(pace.first_admitted_s for pace in paces)), sums[-1]
    return _rate(work, seconds, UNKNOWN_ERROR, is_steady=False)


def _rate(work: np.ndarray, seconds: float, error: float, *, is_steady: bool) -> SteadyRate:
    done, prompt_tokens, output_tokens = work.tolist()
    return SteadyRate(
        is_steady=is_steady,
        completions_per_s=done / seconds,
        tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        prompt_tokens=prompt_tokens / done,
        error=error,
    )


def _merge(paces: Sequence[Pace]) -> tuple[np.ndarray, np.ndarray]:
    """Times in order, and the sums over all chunks at each: [marks, 3]."""
    at_s = np.array([mark.at_s for pace in paces for mark in pace.marks])
    steps = [
        np.diff([(m.num_done, m.num_prompt_tokens, m.num_output_tokens) for m in pace.marks], axis=0, prepend=0)
        for pace in paces
    ]
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(np.concatenate(steps)[order], axis=0)


def _standard_error(at_s: np.ndarray, num_done: np.ndarray, num_running: int) -> float:
    """The relative one of the rate, from pieces of a batch or more: what is in one batch ends together."""
    num_pieces = min(MAX_PIECES, int(num_done[-1] - num_done[0]) // num_running)
    borders = np.unique(np.searchsorted(num_done, np.linspace(num_done[0], num_done[-1], num_pieces + 1)))
    if len(borders) < 3:
        return LONE_ERROR
    paces: list[float] = (np.diff(at_s[borders]) / np.diff(num_done[borders])).tolist()
    return statistics.stdev(paces) / statistics.mean(paces) / math.sqrt(len(paces))
