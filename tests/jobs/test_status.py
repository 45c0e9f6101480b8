import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.status import _screen
from schemas.records import JobState, RowStatus
from tests.jobs.verbs import Machine, commit, json_lines


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


@pytest.fixture
def queued(machine: Machine) -> Machine:
    """A machine with one job of three chunks."""
    assert machine.submit(machine.write_rows(12), "--no-wait", "--chunk-rows", "4").exit_code == 0
    return machine


def test_status_of_a_running_job_counts_what_is_committed(queued: Machine) -> None:
    commit(queued.job(), [0])
    queued.queue.progress(queued.job().job_id, 1, {RowStatus.OK: 3})
    (fields,) = json_lines(queued.run("status", "--json"))
    assert fields["state"] == "running"
    assert (fields["counts"], fields["running"]) == ({"ok": 4}, {"ok": 3})
    assert (fields["num_chunks"], fields["num_committed"]) == (3, 1)
    assert "nobody serves" in fields["workers"]


def test_status_needs_no_broker(queued: Machine) -> None:
    commit(queued.job(), [0])
    queued.close()
    result = queued.run("status", "data")
    assert result.exit_code == 0, result.output
    assert "4 of 12 committed" in result.stdout
    for url in ("redis://127.0.0.1:1/0",):
        result = queued.run("status", "data", "--broker-url", url)
        assert result.exit_code == 0, result.output
        assert "cannot be used" in result.stdout


def test_a_beginning_names_a_job_if_it_names_one(queued: Machine) -> None:
    queued.submit(queued.write_rows(3, "data2.parquet"), "--no-wait")
    result = queued.run("status", "data")
    assert result.exit_code == 2
    assert all(job_id in result.stderr for job_id in queued.job_ids())
    assert queued.run("status", "data2").exit_code == 0
    assert queued.run("status", "nothing").exit_code == 2


def test_watching_ends_with_the_jobs_exit_code(queued: Machine) -> None:
    commit(queued.job(), [0, 1])
    commit(queued.job(), [2], status=RowStatus.TRUNCATED)
    assert queued.run("resume", "data").exit_code == 3
    result = queued.run("status", "data", "--watch", "--json")
    assert (result.exit_code, json_lines(result)[-1]["state"]) == (3, "done_with_errors")


def test_a_live_screen_shows_the_last_text_in_place_of_the_ones_before(capsys: pytest.CaptureFixture[str]) -> None:
    for is_live, shown in ((False, ["first", "last"]), (True, ["last"])):
        with _screen(is_live=is_live) as put:
            put("first")
            put("last")
        assert capsys.readouterr().out.split() == shown


def test_no_jobs_at_all_is_said(machine: Machine) -> None:
    assert machine.run("status").exit_code == 2
    assert "no jobs under" in machine.run("list").stdout


def test_list_shows_every_job_newest_first(queued: Machine) -> None:
    queued.submit(queued.write_rows(3, "other.parquet"), "--no-wait")
    lines = json_lines(queued.run("list", "--json"))
    assert {line["job_id"] for line in lines} == set(queued.job_ids())
    assert [line["created"] for line in lines] == sorted((line["created"] for line in lines), reverse=True)
    assert all(job_id in queued.run("list").stdout for job_id in queued.job_ids())


@pytest.mark.parametrize("verb", ["list", "status", "gc"])
def test_a_job_that_cannot_be_used_does_not_hide_the_others(queued: Machine, verb: str) -> None:
    job_id = queued.job().job_id
    queued.submit(queued.write_rows(3, "other.parquet"), "--no-wait")
    Path(queued.open_job("other").store.locate("plan.parquet")).unlink()
    result = queued.run(verb)
    assert result.exit_code == 0
    assert verb == "gc" or job_id in result.stdout
    assert ("job_unusable" in result.stderr, "plan.parquet is gone" in result.stderr) == (True, True)


def test_a_cancelled_job_goes_on_where_it_was(queued: Machine) -> None:
    commit(queued.job(), [0])
    assert queued.run("cancel", "data").exit_code == 0
    assert queued.job().state() is JobState.CANCELLED
    queued.queue._redis.flushall()
    assert queued.run("resume", "data", "--no-wait").exit_code == 0
    assert queued.job().state() is JobState.RUNNING
    assert queued.queue.depth(queued.job().spec.model.queue) == 2


def test_a_paused_job_waits_for_resume_or_unpause(queued: Machine) -> None:
    for verb in ("resume --no-wait", "unpause"):
        assert queued.run("pause", "data").exit_code == 0
        assert queued.job().state() is JobState.PAUSED
        assert queued.run(*verb.split(), "data").exit_code == 0
        assert queued.job().state() is JobState.QUEUED
    result = queued.run("unpause", "data")
    assert (result.exit_code, "is not paused but queued" in result.stderr) == (1, True)


@pytest.mark.parametrize("verb", ["cancel", "pause"])
def test_what_has_ended_cannot_be_stopped(queued: Machine, verb: str) -> None:
    commit(queued.job(), [0, 1, 2])
    queued.run("resume", "data")
    result = queued.run(verb, "data")
    assert (result.exit_code, "has ended already" in result.stderr) == (1, True)


def test_parked_chunks_are_tried_again_only_when_asked(queued: Machine) -> None:
    commit(queued.job(), [0, 1])
    job = queued.job()
    from tests.jobs.verbs import results

    assert job.commit_part(2, results(job, 2, status=RowStatus.FAILED), parked=True)
    assert queued.run("resume", "data").exit_code == 3
    assert json.loads(queued.run("status", "--json").stdout)["num_parked"] == 1
    assert queued.run("resume", "data", "--parked", "--no-wait").exit_code == 0
    assert queued.job().pending() == (2,)
    commit(queued.job(), [2])
    assert queued.run("resume", "data").exit_code == 0
