"""Removal: what may still run, the newest of a name, and what lies outside the jobs root always stay."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.finish import try_finish
from jobs.gc import DAY_S, Garbage, collect, find_garbage
from jobs.job import Job
from jobs.ledger import LEDGER, Ledger, scope_of
from jobs.store import open_store
from tests.jobs.verbs import Machine, commit, json_lines
from tests.tiny_jobs import make_job, run_job

ENDINGS: dict[str, Callable[[Job], object]] = {
    "done": lambda job: try_finish(run_job(job)),
    "cancelled": Job.cancel,
    "failed": lambda job: job.fail("no engine"),
    "paused": Job.pause,
    "queued": lambda job: None,
    "running": lambda job: run_job(job).store.delete("parts/part-00000.parquet"),
}


def age(directory: str, days: float) -> None:
    """Make everything in a directory look older."""
    then = time.time() - days * DAY_S
    for top, _, names in os.walk(directory):
        for name in names:
            os.utime(Path(top) / name, (then, then))


def names(garbage: list[Garbage]) -> set[str]:
    return {item.name for item in garbage}


@pytest.mark.parametrize("ending", ENDINGS)
def test_only_what_ended_long_ago_can_go(tmp_path: Path, ending: str) -> None:
    job, store = make_job(tmp_path, name=ending), open_store(str(tmp_path / "jobs"))
    ENDINGS[ending](job)
    assert find_garbage(store, min_age_s=DAY_S, num_kept=0) == []
    age(job.store.locate(""), 2)
    can_go = ending in ("done", "cancelled", "failed")
    assert names(find_garbage(store, min_age_s=DAY_S, num_kept=0)) == ({job.job_id} if can_go else set())
    assert find_garbage(store, min_age_s=3 * DAY_S, num_kept=0) == []


def test_the_newest_jobs_of_each_name_stay(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path, name=name, seed=seed) for name in ("a", "b") for seed in range(3)]
    for number, job in enumerate(jobs):
        try_finish(run_job(job))
        age(job.store.locate(""), 50 - number)
    found = find_garbage(open_store(str(tmp_path / "jobs")), min_age_s=DAY_S, num_kept=2)
    assert names(found) == {jobs[0].job_id, jobs[3].job_id}


def test_labels_that_no_job_has_asked_for_in_a_while_can_go_and_used_ones_stay(tmp_path: Path) -> None:
    jobs, store = [make_job(tmp_path, seed=seed) for seed in range(2)], open_store(str(tmp_path / "jobs"))
    for job in jobs:
        try_finish(run_job(job))
    age(store.locate(LEDGER), 40)
    Ledger(store, jobs[1].spec).mark_used()
    found = find_garbage(store, min_age_s=30 * DAY_S, num_kept=2)
    assert names(found) == {f"{LEDGER}/{scope_of(jobs[0].spec)}"}
    assert collect(store, found[0], min_age_s=30 * DAY_S)
    assert [bool(Ledger(store, job.spec)) for job in jobs] == [False, True]


def test_the_sample_of_an_interrupted_dry_run_goes_after_a_day(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "jobs"))
    store.create("_samples/abc/rows.parquet", b"")
    assert find_garbage(store, min_age_s=0, num_kept=0) == []
    age(str(tmp_path / "jobs"), 2)
    (garbage,) = find_garbage(store, min_age_s=30 * DAY_S, num_kept=2)
    assert collect(store, garbage, min_age_s=30 * DAY_S)
    assert not (tmp_path / "jobs" / "_samples" / "abc").exists()


def test_a_job_that_came_back_to_life_is_not_removed(tmp_path: Path) -> None:
    job, store = make_job(tmp_path), open_store(str(tmp_path / "jobs"))
    job.cancel()
    age(job.store.locate(""), 9)
    (garbage,) = find_garbage(store, min_age_s=DAY_S, num_kept=0)
    job.uncancel()
    assert not collect(store, garbage, min_age_s=DAY_S)
    assert Job.open(store, job.job_id).pending()


def test_what_an_interrupted_removal_leaves_is_found_again_and_a_fresh_submit_is_not(tmp_path: Path) -> None:
    job, store = run_job(make_job(tmp_path)), open_store(str(tmp_path / "jobs"))
    job.store.delete("job.json")
    (tmp_path / "jobs" / "notes").mkdir()
    (tmp_path / "jobs" / "notes" / "mine.txt").write_text("not a job")
    assert find_garbage(store, min_age_s=DAY_S, num_kept=0) == []
    age(str(tmp_path / "jobs"), 1)
    (garbage,) = find_garbage(store, min_age_s=DAY_S, num_kept=0)
    assert collect(store, garbage, min_age_s=DAY_S)
    assert store.list() == ["notes"]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def test_the_verb_removes_only_with_yes(machine: Machine) -> None:
    output = machine.path / "out"
    assert machine.submit(machine.write_rows(3), "--no-wait", "--output", str(output)).exit_code == 0
    job = machine.job()
    commit(job, [0])
    assert machine.run("resume", job.job_id).exit_code == 0
    assert "0 directories" in machine.run("gc").stdout
    arguments = ("--older-than", "0", "--keep", "0")
    shown = machine.run("gc", *arguments)
    assert job.job_id in shown.stdout
    assert "1 directories" in shown.stdout
    assert machine.job_ids() == [job.job_id]
    (fields,) = json_lines(machine.run("gc", *arguments, "--yes", "--json"))
    assert (fields["name"], fields["is_removed"]) == (job.job_id, True)
    assert machine.job_ids() == []
    assert list(output.glob("*.parquet"))
