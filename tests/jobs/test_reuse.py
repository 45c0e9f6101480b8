from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import api
from jobs.broker import broker_status
from jobs.finish import try_finish
from jobs.job import Job
from jobs.results import run_rows
from jobs.reuse import ASKED_SCHEMA, FirstAsked, read_known
from jobs.verify import verify
from schemas.records import Completion, FinishReason, JobState, Request, RowStatus, Sampling, Thinking, short_hash
from tests.jobs.verbs import Machine
from tests.tiny_jobs import YES_NO, Answer, ScriptedEngine, completion, prompt_of


class Night:
    """Submits, runs with a scripted engine what no earlier night knows, and remembers what the engine was asked."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.asked: list[str] = []

    def run(self, data: str, answer: Any = "yes", **submission: Any) -> Job:
        options = {"model": str(self.machine.model), "constraint": YES_NO, "prompt_column": "text", "chunk_rows": 4}
        prepared = api.prepare(api.Submission(inputs=(data,), **{**options, **submission}), self.machine.settings)
        job = api.submit(prepared, self.machine.settings)
        engine = ScriptedEngine(answer)
        for index in job.pending():
            known = read_known(job, index)
            assert not known.waiting  # chunks run in order here
            rows = run_rows(job, job.chunks[index], engine, is_cancelled=lambda: False, skip=known.statuses)
            job.commit_part(index, rows, known=known.table)
        assert try_finish(job)
        self.asked = engine.prompts()
        assert verify(job).faults == []
        return job

    def rows(self, job: Job) -> list[dict[str, Any]]:
        success = job.success()
        assert success is not None
        return [row for file in success.outputs for row in pq.read_table(file.uri).to_pylist()]


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    machine = Machine(tmp_path)
    yield Night(machine)
    machine.close()


def test_a_second_run_over_unchanged_rows_asks_nothing_and_needs_no_broker(night: Night) -> None:
    data = night.machine.write_rows(10)
    first = night.run(data)
    night.machine.close()
    second = night.run(data, name="again")
    assert (len(night.asked), second.state()) == (0, JobState.DONE)
    assert broker_status(night.machine.settings).pid is None
    success = second.success()
    assert success is not None
    assert (success.num_rows, success.num_copied) == (10, 10)
    for before, after in zip(night.rows(first), night.rows(second), strict=True):
        assert after["label_meta"] == before["label_meta"] | {"copied_from": first.job_id}
        assert {**after, "label_meta": None} == {**before, "label_meta": None}


def test_what_was_thought_is_copied_with_the_label(night: Night) -> None:
    def answer(request: Request) -> Completion:
        return msgspec.structs.replace(completion(request, "yes"), reasoning="since", num_reasoning_tokens=3)

    data = night.machine.write_rows(10)
    sampling = Sampling(thinking=Thinking(max_tokens=9))
    night.run(data, answer, sampling=sampling)
    copied = night.run(data, answer, sampling=sampling, name="again")
    assert night.asked == []
    assert {row["label_reasoning"] for row in night.rows(copied)} == {"since"}
    night.run(data, "yes", name="without")
    assert len(night.asked) == 10


def test_only_new_rows_are_asked_whole_chunks_or_not(night: Night) -> None:
    night.run(night.machine.write_rows(10, "monday.parquet"))
    job = night.run(night.machine.write_rows(13, "tuesday.parquet"))
    assert night.asked == ["message 10", "message 11", "message 12"]
    assert [row["label_meta"]["copied_from"] is None for row in night.rows(job)] == [False] * 10 + [True] * 3


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_column": None, "prompt_template": "Say {{ text }}"},
        {"system": "Be brief."},
        {"sampling": Sampling(max_tokens=9)},
        {"refresh": True},
    ],
)
def test_a_changed_question_is_asked_anew(night: Night, change: dict[str, Any]) -> None:
    data = night.machine.write_rows(10)
    night.run(data)
    night.run(data, name="changed", **change)
    assert len(night.asked) == 10
    night.run(data, name="back")
    assert night.asked == []


def test_a_template_that_changes_some_prompts_recomputes_exactly_those(night: Night) -> None:
    data = night.machine.write_rows(10)
    night.run(data, prompt_column=None, prompt_template="{{ text }}")
    night.run(data, prompt_column=None, prompt_template="{{ text }}{% if kind == 'a' %}, please{% endif %}")
    assert night.asked == [f"message {i}, please" for i in range(1, 10, 2)]


def test_what_a_refresh_finds_replaces_what_was_known(night: Night) -> None:
    data = night.machine.write_rows(4)
    night.run(data)
    night.run(data, answer="no", refresh=True)
    assert {row["label"] for row in night.rows(night.run(data, name="after"))} == {"no"}


def test_failures_are_tried_again_and_unusable_rows_cost_nothing(night: Night) -> None:
    data = night.machine.write("data.parquet", text=["a", None, "b", "c"])

    def answer(request: Request) -> Answer:
        return ("", FinishReason.ERROR) if prompt_of(request) == "b" else "yes"

    first = night.run(data, answer)
    assert first.counts() == {RowStatus.OK: 2, RowStatus.FAILED: 1, RowStatus.INPUT_ERROR: 1}
    second = night.run(data, name="again")
    assert night.asked == ["b"]
    assert second.counts() == {RowStatus.OK: 3, RowStatus.INPUT_ERROR: 1}


def test_rows_that_are_skipped_leave_a_tombstone_and_are_never_asked(night: Night) -> None:
    data = night.machine.write_rows(8)
    night.run(data, where="kind == 'a'")
    job = night.run(data, name="again", where="kind == 'a'")
    assert night.asked == []
    assert [row["label_status"] for row in night.rows(job)] == ["skipped", "ok"] * 4
    night.run(data, name="all")
    assert len(night.asked) == 4


def test_a_submit_that_was_killed_while_it_copied_goes_on(night: Night) -> None:
    data = night.machine.write_rows(10)
    night.run(data)
    job = night.run(data, name="again")
    job.store.delete("job.json")
    job.store.delete("_SUCCESS.json")
    job.store.delete("parts/part-00001.parquet")
    assert night.run(data, name="again").job_id == job.job_id
    assert night.asked == []


def test_labels_of_a_cancelled_job_are_not_lost(night: Night) -> None:
    data = night.machine.write_rows(10)
    arguments = ("--model", str(night.machine.model), "--choice", "yes,no", "--column", "text", "--chunk-rows", "4")
    night.machine.run("submit", data, *arguments, "--no-wait")
    job = night.machine.job()
    job.commit_part(0, run_rows(job, job.chunks[0], ScriptedEngine(), is_cancelled=lambda: False))
    assert night.machine.run("cancel", job.job_id).exit_code == 0
    night.run(data, name="next")
    assert night.asked == [f"message {i}" for i in range(4, 10)]


def test_equal_rows_of_several_chunks_are_asked_once(night: Night) -> None:
    data = night.machine.write("data.parquet", text=[f"message {i % 6}" for i in range(24)])
    job = night.run(data)
    assert night.asked == [f"message {i}" for i in range(6)]
    success = job.success()
    assert success is not None
    assert success.num_copied == 18
    assert {row["label_meta"]["copied_from"] for row in night.rows(job)} == {None, job.job_id}


def test_a_twin_of_a_row_that_failed_is_asked_itself(night: Night) -> None:
    data = night.machine.write("data.parquet", text=["a", "b", "c", "d", "a", "b", "e", "f"])
    fails = iter([("", FinishReason.ERROR)])
    night.run(data, lambda request: next(fails, "yes"))
    assert night.asked == ["a", "b", "c", "d", "a", "e", "f"]


def test_rows_whose_twin_is_still_computed_wait(night: Night) -> None:
    data = night.machine.write("data.parquet", text=["a", "b", "c", "d", "a", "b", "e", "a"])
    options = ("--model", str(night.machine.model), "--choice", "yes,no", "--column", "text", "--chunk-rows", "4")
    night.machine.run("submit", data, *options, "--no-wait")
    job = night.machine.job()
    assert read_known(job, 1).waiting == {4, 5, 7}
    job.commit_part(0, run_rows(job, job.chunks[0], ScriptedEngine(), is_cancelled=lambda: False))
    known = read_known(job, 1)
    assert (known.waiting, known.statuses) == (frozenset(), dict.fromkeys((4, 5, 7), RowStatus.OK))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 40), max_size=30), max_size=20))
def test_first_places_are_those_of_a_dictionary(chunks: list[list[int]]) -> None:
    asked, expected = FirstAsked(), dict[int, tuple[int, int]]()
    for index, keys in enumerate(chunks):
        columns = {"row": range(len(keys)), "key": [bytes.fromhex(short_hash(str(key), digits=32)) for key in keys]}
        (batch,) = pa.table(columns, ASKED_SCHEMA).to_batches() or [pa.RecordBatch.from_pylist([], ASKED_SCHEMA)]
        twins = asked.add(index, batch)
        found = [(row["row"], row["chunk"], row["first_row"]) for row in twins.to_pylist()]
        assert found == [(row, *expected[key]) for row, key in enumerate(keys) if key in expected]
        expected = {key: (index, row) for row, key in reversed(list(enumerate(keys)))} | expected
