"""The steady rate against a machine that is simulated: what it says of a short run holds for a long one."""

import heapq
import random
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.pace import MAX_MARKS, Answer, Pace, PaceMeter, SteadyRate, make_pace, steady_rate
from schemas.records import Completion, FinishReason

PREFIX, OWN = 200, 12


def completion(seconds: float, num_cached: int, num_output: int) -> Completion:
    return Completion(
        request_id="r",
        finish_reason=FinishReason.STOP,
        token_ids=(1,) * num_output,
        num_prompt_tokens=PREFIX + OWN,
        num_cached_tokens=num_cached,
        seconds=seconds,
    )


def simulate(num_rows: int, batch: int, lengths: random.Random, *, late_s: float = 0.0) -> Iterator[Answer]:
    """A continuous batch: the first row alone, then a step takes a fixed time and some for each of its tokens.

    The first row computes the shared prefix, and everything starts ``late_s`` after the run.
    """
    now_s, running = late_s, []  # type: ignore[var-annotated]
    waiting = [(number, lengths.randint(1, 40)) for number in range(num_rows)]
    while waiting or running:
        room = 1 if not running and len(waiting) == num_rows else batch
        started_s, num_tokens = now_s, len(running)
        while waiting and len(running) < room:
            number, length = waiting.pop(0)
            num_cached = PREFIX if number else 0
            num_tokens += PREFIX + OWN - num_cached
            heapq.heappush(running, (length, number, started_s, length, num_cached))
        now_s += 0.004 + 0.001 * num_tokens
        running = [(left - 1, *rest) for left, *rest in running]
        while running and running[0][0] == 0:
            _, _, started_s, length, num_cached = heapq.heappop(running)
            yield Answer.of(completion(now_s - started_s, num_cached, length), now_s)


def paced(answers: list[Answer]) -> SteadyRate:
    pace = make_pace(answers)
    assert pace is not None
    rate = steady_rate([pace])
    assert rate is not None
    return rate


def predict(answers: list[Answer], rate: SteadyRate, num_rows: int) -> float:
    """What jobs.rehearsal does: rows at the steady rate, and once what the short run took beside."""
    row_tokens = rate.prompt_tokens + sum(answer.num_output_tokens for answer in answers) / len(answers)
    row_s = row_tokens / rate.tokens_per_s
    return answers[-1].at_s - len(answers) * row_s + num_rows * row_s


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(2, 24),
    num_batches=st.integers(4, 9),
    num_rows=st.integers(300, 3000),
    late_s=st.floats(0, 20),
    seed=st.integers(0, 2**32),
)
def test_a_short_run_tells_how_long_a_long_one_takes(
    batch: int, num_batches: int, num_rows: int, late_s: float, seed: int
) -> None:
    short = list(simulate(batch * num_batches + 30, batch, random.Random(seed), late_s=late_s))
    rate = paced(short)
    assert rate.is_steady
    *_, last = simulate(num_rows, batch, random.Random(seed + 1), late_s=late_s)
    bound = 0.15 + 2 * rate.error
    assert predict(short, rate, num_rows) == pytest.approx(last.at_s, rel=bound)


def test_the_start_and_the_end_of_a_run_are_no_part_of_its_rate() -> None:
    """Where the rate of everything, which a job used to be forecast from, is off by a multiple."""
    short = list(simulate(96, 16, random.Random(3), late_s=5.0))
    *_, last = simulate(2000, 16, random.Random(4), late_s=5.0)
    rate = paced(short)
    assert predict(short, rate, 2000) == pytest.approx(last.at_s, rel=0.1)
    naive_s = short[-1].at_s * 2000 / 96
    assert naive_s > 2 * last.at_s
    assert rate.prompt_tokens == OWN, "what the first row computed is no work of the others"


def test_a_run_that_never_fills_its_batch_says_so_and_is_believed_less() -> None:
    alone = paced(list(simulate(20, 64, random.Random(0))))
    full = paced(list(simulate(200, 16, random.Random(0))))
    assert (alone.is_steady, full.is_steady) == (False, True)
    assert alone.error > full.error
    single = paced([Answer.of(completion(0.5, 0, 8), 1.0)])
    assert (single.is_steady, single.tokens_per_s) == (False, pytest.approx((PREFIX + OWN + 8) / 0.5, rel=0.01))


@given(st.integers(2, 2000), st.integers(2, 5))
def test_a_chunk_keeps_few_marks_and_chunks_together_say_what_one_would(num_rows: int, num_chunks: int) -> None:
    answers = [Answer.of(completion(1.0, PREFIX, 3), 1000.0 + number // 8) for number in range(num_rows)]
    whole = make_pace(answers)
    assert whole is not None
    assert len(whole.marks) == min(num_rows, MAX_MARKS)
    assert whole.marks[-1].num_done == num_rows
    parts = [pace for index in range(num_chunks) if (pace := make_pace(answers[index::num_chunks]))]
    together, alone = steady_rate(parts), steady_rate([whole])
    assert together is not None
    assert alone is not None
    if alone.is_steady and together.is_steady and num_rows < MAX_MARKS:
        assert together.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.25)


def test_only_what_the_engine_answered_is_noted() -> None:
    meter = PaceMeter()
    assert meter.read() is None
    good, bad, dropped = Future[Completion](), Future[Completion](), Future[Completion]()
    for future in (good, bad, dropped):
        future.add_done_callback(meter.note)
    good.set_result(completion(1.0, 0, 5))
    bad.set_exception(RuntimeError("gone"))
    assert dropped.cancel()
    pace = meter.read()
    assert isinstance(pace, Pace)
    assert [(mark.num_done, mark.num_prompt_tokens, mark.num_output_tokens) for mark in pace.marks] == [
        (1, PREFIX + OWN, 5)
    ]
    assert steady_rate([]) is None
