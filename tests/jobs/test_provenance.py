"""Sums over chunks against brute force: time that overlaps counts once, energy only while a chunk ran."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.provenance import (
    Provenance,
    Sample,
    busy_seconds,
    count_work,
    device_seconds,
    measure_energy,
    measure_throughput,
    merge_samples,
)
from schemas.records import Attempt, FinishReason, RowResult, RowStatus

spans = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def chunk(start: float, end: float, worker: str = "w", **fields: object) -> Provenance:
    return Provenance(started_s=start, finished_s=end, worker=worker, device="cuda:0", **fields)


@given(st.lists(spans, max_size=8))
def test_busy_time_is_that_of_the_seconds_in_which_any_chunk_ran(found: list[tuple[int, int]]) -> None:
    seconds = {second for start, end in found for second in range(start, end)}
    assert busy_seconds([chunk(start, end) for start, end in found]) == len(seconds)


@given(st.lists(spans, min_size=1, max_size=6), st.lists(st.integers(0, 5), min_size=56, max_size=56))
def test_energy_is_that_of_the_seconds_in_which_any_chunk_ran(found: list[tuple[int, int]], joules: list[int]) -> None:
    counter = [float(sum(joules[:second])) for second in range(len(joules))]
    chunks = [
        chunk(start, end, samples=tuple(Sample(at_s=s, energy_j=counter[s]) for s in range(start, end + 1)))
        for start, end in found
    ]
    seconds = {second for start, end in found for second in range(start, end)}
    expected = sum(joules[second] for second in seconds)
    assert (measure_energy(chunks) or 0.0) == expected


def test_without_a_counter_energy_is_unknown_and_not_zero() -> None:
    assert measure_energy([chunk(0, 9, samples=(Sample(at_s=1, power_w=5), Sample(at_s=2)))]) is None


def test_samples_that_chunks_share_are_there_once_and_workers_are_told_apart() -> None:
    shared = Sample(at_s=2.0, num_running=3)
    chunks = [
        chunk(2, 5, samples=(shared, Sample(at_s=3.0))),
        chunk(0, 2, samples=(Sample(at_s=1.0), shared)),
        chunk(0, 2, "other", samples=(shared,)),
    ]
    merged = merge_samples(chunks)
    assert [sample.at_s for sample in merged["w"]] == [1.0, 2.0, 3.0]
    assert merged["other"] == [shared]


def test_two_workers_at_once_hold_their_devices_twice_as_long_as_the_job_takes() -> None:
    chunks = [chunk(0, 10, gpus=("H", "H")), chunk(5, 15, gpus=("H", "H")), chunk(0, 10, "other")]
    assert device_seconds(chunks) == 2 * 15 + 10
    found = measure_throughput(chunks)
    assert found is not None
    assert (found.busy_s, found.num_workers, found.hardware) == (15, 2, "2 x H + cuda:0")
    assert found.rows_per_s is None
    assert measure_throughput([]) is None


@pytest.mark.parametrize("num_rows", [0, 3])
def test_only_rows_that_were_asked_count_as_work(num_rows: int) -> None:
    attempt = Attempt(status=RowStatus.OK, finish_reason=FinishReason.STOP, seed=0, max_tokens=9, num_output_tokens=2)
    asked = RowResult(
        row_index=0,
        status=RowStatus.OK,
        attempts=(attempt,),
        num_prompt_tokens=5,
        num_cached_tokens=4,
        num_output_tokens=2,
        num_draft_tokens=3,
        num_accepted_tokens=1,
    )
    skipped = RowResult(row_index=1, status=RowStatus.SKIPPED)
    assert count_work([asked] * num_rows + [skipped]) == {
        "num_asked": num_rows,
        "num_prompt_tokens": 5 * num_rows,
        "num_cached_tokens": 4 * num_rows,
        "num_output_tokens": 2 * num_rows,
        "num_draft_tokens": 3 * num_rows,
        "num_accepted_tokens": num_rows,
    }
