from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import api
from jobs.thresholds import Thresholds, find_breach, find_job_breach, parse_thresholds
from schemas.errors import InputDataError
from schemas.records import JobState, RowStatus
from tests.jobs.verbs import Machine, commit
from tests.tiny_jobs import make_job

TWO_PERCENT = Thresholds(max_share={RowStatus.INVALID: 0.02}, min_rows=100)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_a_share_at_the_limit_is_no_breach_and_one_row_more_is() -> None:
    assert find_breach(TWO_PERCENT, {RowStatus.OK: 98, RowStatus.INVALID: 2}) is None
    assert find_breach(TWO_PERCENT, {RowStatus.OK: 97, RowStatus.INVALID: 3}) == (
        "3.0% of the first 100 rows are invalid, the limit is 2.0%"
    )


def test_too_few_rows_prove_nothing() -> None:
    assert find_breach(TWO_PERCENT, {RowStatus.INVALID: 99}) is None


def test_rows_that_nobody_asked_do_not_dilute_a_share() -> None:
    counts = {RowStatus.OK: 1097, RowStatus.INVALID: 3, RowStatus.SKIPPED: 5000}
    assert find_breach(TWO_PERCENT, counts) is None
    assert find_breach(TWO_PERCENT, counts, num_copied=1000) is not None


def test_a_canary_has_limits_of_its_own_that_can_be_replaced() -> None:
    plain = parse_thresholds([], canary_rows=50)
    assert plain is not None
    assert (plain.canary_rows, plain.max_share) == (50, {RowStatus.INVALID: 0.1, RowStatus.TRUNCATED: 0.1})
    strict = parse_thresholds(["invalid=0"], canary_rows=50)
    assert strict is not None
    assert strict.max_share == {RowStatus.INVALID: 0.0, RowStatus.TRUNCATED: 0.1}


def test_a_canary_s_rows_are_enough_once_they_are_committed(machine: Machine) -> None:
    assert machine.submit(machine.write_rows(20), "--no-wait", "--canary", "8", "--chunk-rows", "6").exit_code == 0
    job = machine.job()
    assert [chunk.num_rows for chunk in job.chunks] == [8, 6, 6]
    assert job.pending() == (0,)
    assert machine.queue.depth(job.spec.model.queue) == 1
    assert find_job_breach(job, {RowStatus.INVALID: 5}) is None, "it still runs"
    commit(job, [0], status=RowStatus.INVALID)
    assert "100.0% of the first 8 rows are invalid" in (find_job_breach(job) or "")
    assert job.pending() == (1, 2)


def test_limits_are_written_as_shares_or_percent() -> None:
    assert parse_thresholds(["invalid=2%", "truncated = 0.5"], 7) == Thresholds(
        max_share={RowStatus.INVALID: 0.02, RowStatus.TRUNCATED: 0.5}, min_rows=7
    )
    assert parse_thresholds([]) is None


@pytest.mark.parametrize("limit", ["invalid", "invalid=", "invalid=many", "wrong=2%", "ok=2%", "invalid=200%"])
def test_a_limit_that_makes_no_sense_is_refused_by_name(limit: str) -> None:
    with pytest.raises(InputDataError, match=limit):
        parse_thresholds([limit])


def test_rows_of_a_running_chunk_count_too(tmp_path: Path) -> None:
    job = make_job(tmp_path, thresholds=Thresholds(max_share={RowStatus.FAILED: 0.5}, min_rows=6))
    commit(job, [0], label="yes")
    assert find_job_breach(job) is None
    assert find_job_breach(job, {RowStatus.FAILED: 5}) is not None


def test_an_aborted_job_stays_stopped_until_somebody_resumes_it(machine: Machine) -> None:
    data = machine.write_rows(10)
    arguments = (data, "--chunk-rows", "4", "--abort", "invalid=10%", "--abort-min-rows", "4", "--no-wait")
    machine.submit(*arguments)
    job = machine.job()
    commit(job, [0], status=RowStatus.INVALID)
    breach = find_job_breach(job)
    assert breach is not None
    job.fail(breach, is_abort=True)
    job.unfail()  # as a worker with an engine does
    machine.submit(*arguments)
    assert (job.state(), job.is_stopped()) == (JobState.FAILED, True)
    assert "100.0% of the first 4 rows are invalid" in machine.run("status", job.job_id).stdout
    api.resume(job, machine.settings)
    assert (job.state(), job.is_stopped(), find_job_breach(job)) == (JobState.RUNNING, False, None)


def test_a_job_that_was_aborted_ends_as_failed_even_if_the_last_chunks_came_in(machine: Machine) -> None:
    machine.submit(machine.write_rows(4), "--abort", "invalid=10%", "--no-wait")
    job = machine.job()
    job.fail("too many", is_abort=True)
    commit(job, [0])
    api.enqueue(job, machine.settings)
    assert job.state() is JobState.FAILED
