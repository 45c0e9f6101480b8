"""The job directory: identity, attachment, commits, counts and states; a part's existence means done."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from obstore.store import MemoryStore

from jobs.finish import try_finish
from jobs.job import PARKED, Job, part_key
from jobs.parts import INFO_KEY
from jobs.plan import START_AGAIN
from jobs.store import Bucket, LocalDirectory, Store, open_store, replace
from schemas.errors import InputDataError, JobError, JobNotFound, StoreError
from schemas.records import FORMAT_VERSION, JobState, Label, RowResult, RowStatus, encode_json
from tests.tiny_jobs import ScriptedEngine, make_job, results_of, run_chunk, run_job, write_input


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return LocalDirectory(tmp_path / "jobs") if request.param == "directory" else Bucket(MemoryStore(), "memory://j")


def test_the_same_spec_is_the_same_job_and_keeps_its_chunks(tmp_path: Path, store: Store) -> None:
    first = make_job(tmp_path, store=store, chunk_rows=4)
    run_job(first)
    second = make_job(tmp_path, store=store, chunk_rows=7)
    assert (second.job_id, second.chunks, second.pending()) == (first.job_id, first.chunks, ())
    assert second.created == first.created
    assert make_job(tmp_path, store=store, seed=1).job_id != first.job_id
    assert Job.list_ids(store) == sorted({first.job_id, make_job(tmp_path, store=store, seed=1).job_id})


def test_a_directory_with_another_spec_is_refused(tmp_path: Path, store: Store) -> None:
    job, other = make_job(tmp_path, store=store), make_job(tmp_path, store=store, seed=1)
    replace(store, f"{job.job_id}/job.json", other.store.read("job.json"))
    with pytest.raises(JobError, match="is that of tiny-"):
        Job.open(store, job.job_id)


def test_a_create_that_died_between_plan_and_spec_is_taken_up(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store, chunk_rows=4)
    job.store.delete("job.json")
    assert Job.list_ids(store) == []
    assert make_job(tmp_path, store=store, chunk_rows=7).chunks == job.chunks


@pytest.mark.parametrize("job_id", ["gone-0123456789ab", "../jobs", "", "."])
def test_an_unknown_job_is_named_with_the_place(tmp_path: Path, store: Store, job_id: str) -> None:
    with pytest.raises(JobNotFound, match=r"no job .* under "):
        Job.open(store, job_id)


def test_a_job_directory_of_another_version_or_damaged_names_the_file_and_the_way_out(
    tmp_path: Path, store: Store
) -> None:
    job = make_job(tmp_path, store=store)
    files = {name: job.store.read(name) for name in ("job.json", "plan.parquet")}
    content = json.loads(files["job.json"])
    newer = {**content, "format_version": FORMAT_VERSION + 1, "new_field": 1}
    later = {**content, "spec": {**content["spec"], "seed": 7}}
    for name, data, why, cure in (
        ("job.json", json.dumps(newer).encode(), f"has format version {FORMAT_VERSION + 1}", "update it"),
        ("job.json", json.dumps(later).encode(), "another version of Nightmill wrote it", START_AGAIN),
        ("job.json", files["job.json"][:40], "cannot be read", START_AGAIN),
        ("plan.parquet", files["plan.parquet"][:40], "is damaged", START_AGAIN),
        ("plan.parquet", None, "is gone", START_AGAIN),
    ):
        job.store.delete(name) if data is None else replace(job.store, name, data)
        with pytest.raises(JobError) as refused:
            Job.open(store, job.job_id)
        message = str(refused.value)
        assert (job.store.locate(name) in message, why in message, message.endswith(cure)) == (True,) * 3, message
        replace(job.store, name, files[name])
    for name, read in (("_SUCCESS.json", job.success), ("_failed.json", job.failure)):
        replace(job.store, name, b"{")
        with pytest.raises(JobError, match=rf"{name} cannot be read: .*Delete it and resume the job"):
            read()
        job.store.delete(name)


@pytest.mark.parametrize("name", ["", "../x", "_x", ".x", "a b", "a/b"])
def test_a_job_name_must_be_a_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(JobError, match="job name"):
        make_job(tmp_path, name=name)


@pytest.mark.parametrize(
    "column", ["label", "label_raw", "label_status", "label_error", "label_confidence", "label_meta"]
)
def test_an_input_column_with_an_outputs_name_says_which_option_to_change(tmp_path: Path, column: str) -> None:
    path = write_input(tmp_path / "a.parquet", {"text": ["x"], column: ["y"]})
    with pytest.raises(InputDataError, match=f"'{column}' already.*--out"):
        make_job(tmp_path, [path])
    make_job(tmp_path, [path], output_column="answer")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"columns": ("text", "text")}, "--columns names a column twice"),
        ({"columns": ("txt",)}, "--columns: no column 'txt'.*Did you mean 'text'"),
        ({"gold_column": "truth"}, "--gold: no column 'truth'"),
    ],
)
def test_columns_that_cannot_be_kept_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputDataError, match=message):
        make_job(tmp_path, **fields)


def test_the_first_of_two_commits_stands(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    assert job.commit_part(0, results_of(job, 0))
    assert not Job.open(store, job.job_id).commit_part(0, results_of(job, 0, RowStatus.FAILED))
    assert (job.counts(), job.pending(), job.is_committed(0), job.is_committed(1)) == ({"ok": 4}, (1, 2), True, False)


@pytest.mark.parametrize("change", ["missing", "twice", "order", "other chunk"])
def test_a_part_holds_exactly_its_chunks_rows_in_order(tmp_path: Path, change: str) -> None:
    job = make_job(tmp_path)
    rows = results_of(job, 0)
    wrong = {"missing": rows[:-1], "twice": [*rows, rows[0]], "order": rows[::-1], "other chunk": results_of(job, 1)}
    with pytest.raises(JobError, match="needs rows 0 to 4"):
        job.commit_part(0, wrong[change])
    assert job.pending() == (0, 1, 2)


def test_a_result_that_does_not_fit_its_column_is_not_committed(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    rows = [msgspec.structs.replace(row, value={"not": "text"}) for row in results_of(job, 0)]
    with pytest.raises(JobError, match="does not fit its column"):
        job.commit_part(0, rows)


def test_a_part_says_whose_it_is_and_what_it_holds(tmp_path: Path, store: Store) -> None:
    job = run_job(make_job(tmp_path, store=store))
    info = job.part_info(1)
    assert (info.job_id, info.chunk, info.counts) == (job.job_id, job.chunks[1], {"ok": 4})
    assert job.read_part(1)["label_row"].to_pylist() == [4, 5, 6, 7]
    again = make_job(tmp_path, store=store, seed=9)
    run_job(again)
    assert again.part_info(1).checksum == info.checksum


def test_a_part_that_was_swapped_or_changed_is_refused(tmp_path: Path, store: Store) -> None:
    job = run_job(make_job(tmp_path, store=store))
    parts = [job.store.read(part_key(index)) for index in range(3)]
    replace(job.store, part_key(0), parts[1])
    with pytest.raises(JobError, match=r"part-00000\.parquet cannot be used: it holds Chunk"):
        Job.open(store, job.job_id).read_part(0)
    table = pq.read_table(pa.py_buffer(parts[0]))
    changed = table.set_column(table.schema.get_field_index("label"), "label", pa.array(["no"] * 4))
    sink = pa.BufferOutputStream()
    pq.write_table(changed.replace_schema_metadata({INFO_KEY: table.schema.metadata[INFO_KEY]}), sink)
    replace(job.store, part_key(0), sink.getvalue().to_pybytes())
    with pytest.raises(JobError, match="does not match its checksum"):
        Job.open(store, job.job_id).read_part(0)
    replace(job.store, part_key(0), parts[0][:100])
    for read in (job.read_part, Job.open(store, job.job_id).part_info):
        with pytest.raises(JobError, match="damaged"):
            read(0)


def test_states_follow_from_files_alone(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    assert job.state() is JobState.QUEUED
    job.commit_part(0, results_of(job, 0))
    assert job.state() is JobState.RUNNING
    job.pause()
    job.pause()
    assert Job.open(store, job.job_id).state() is JobState.PAUSED
    job.cancel()
    assert (job.state(), job.is_cancelled()) == (JobState.CANCELLED, True)
    job.uncancel()
    job.unpause()
    job.unpause()
    assert job.state() is JobState.RUNNING
    run_job(job)
    assert try_finish(job)
    assert job.state() is JobState.DONE


def test_a_parked_chunk_is_done_until_it_is_unparked(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    assert job.commit_part(1, results_of(job, 1, RowStatus.FAILED), parked=True)
    assert not job.commit_part(1, results_of(job, 1, RowStatus.FAILED), parked=True)
    run_job(job)
    assert try_finish(job)
    assert (job.state(), job.counts()) == (JobState.DONE_WITH_ERRORS, {"ok": 6, "failed": 4})
    assert job.part_info(1).is_parked
    assert (job.unpark(), job.pending(), job.state()) == ((1,), (1,), JobState.RUNNING)
    run_job(job)
    assert try_finish(job)
    assert (job.state(), job.counts(), job.unpark()) == (JobState.DONE, {"ok": 10}, ())


def test_a_part_wins_over_a_parked_one(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    job.commit_part(0, results_of(job, 0, RowStatus.FAILED), parked=True)
    assert job.commit_part(0, results_of(job, 0))
    assert not job.commit_part(0, results_of(job, 0, RowStatus.FAILED), parked=True)
    assert (job.counts(), job.unpark(), job.store.list(PARKED)) == ({"ok": 4}, (), ["part-00000.parquet"])


def test_strange_files_among_the_parts_are_no_parts(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    for name in ("part-00099.parquet", "part-0.tmp", ".part-00000.parquet.tmp", "notes.md"):
        replace(job.store, f"parts/{name}", b"x")
    assert (job.committed(), job.pending()) == (frozenset(), (0, 1, 2))


def test_another_output_for_the_same_job_is_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path, output=str(tmp_path / "a"))
    assert make_job(tmp_path).output == make_job(tmp_path, output=str(tmp_path / "x" / ".." / "a")).output == job.output
    with pytest.raises(JobError, match=rf"writes to {tmp_path}/a, not to {tmp_path}/b"):
        make_job(tmp_path, output=str(tmp_path / "b"))


class CrashingStore(LocalDirectory):
    """A store whose next writes fail, before or after they took effect."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.fault: str | None = None

    def within(self, name: str) -> Store:
        inner = CrashingStore(self._root / name)
        inner.fault = self.fault
        return inner

    def create(self, key: str, data: bytes) -> None:
        if self.fault == "before":
            raise StoreError("no space left on device")
        if self.fault == "torn":
            (self._root / "_staging").mkdir(exist_ok=True)
            (self._root / "_staging" / "torn").write_bytes(data[: len(data) // 2])
            raise StoreError("killed while writing")
        super().create(key, data)
        if self.fault == "after":
            raise StoreError("killed after the commit")


class CommitMachine(RuleBasedStateMachine):
    """Committers, parkers and finishers that crash anywhere, against a model: the first commit of a chunk stands."""

    @initialize(chunk_rows=st.integers(1, 5))
    def start(self, chunk_rows: int) -> None:
        self.root = Path(os.environ["HYPOTHESIS_ROOT"])
        shutil.rmtree(self.root, ignore_errors=True)
        self.job = make_job(self.root, chunk_rows=chunk_rows)
        self.parts: dict[int, RowStatus] = {}
        self.parked: set[int] = set()
        self.is_finished = False

    def open_crashing(self, fault: str | None) -> Job:
        store = CrashingStore(self.root / "jobs")
        store.fault = fault
        return Job.open(store, self.job.job_id)

    @rule(
        index=st.integers(0, 9),
        status=st.sampled_from([RowStatus.OK, RowStatus.INVALID]),
        fault=st.sampled_from([None, None, "before", "after", "torn"]),
    )
    def commit(self, index: int, status: RowStatus, fault: str | None) -> None:
        job = self.open_crashing(fault)
        index %= len(job.chunks)
        is_first = index not in self.parts
        try:
            assert job.commit_part(index, results_of(job, index, status)) == is_first
        except StoreError:
            assert fault is not None
        if fault in (None, "after"):
            self.parts.setdefault(index, status)

    @precondition(lambda self: not self.is_finished)
    @rule(index=st.integers(0, 9))
    def park(self, index: int) -> None:
        index %= len(self.job.chunks)
        is_first = index not in self.parts and index not in self.parked
        assert self.job.commit_part(index, results_of(self.job, index, RowStatus.FAILED), parked=True) == is_first
        self.parked |= {index} if is_first else set()

    @rule(fault=st.sampled_from([None, None, "before", "after"]))
    def finish(self, fault: str | None) -> None:
        is_ready = self.parts.keys() | self.parked == set(range(len(self.job.chunks)))
        try:
            assert try_finish(self.open_crashing(fault)) == is_ready
        except StoreError:
            assert is_ready
        if is_ready and fault in (None, "after"):
            self.is_finished = True

    @invariant()
    def committed_is_what_was_committed(self) -> None:
        if not hasattr(self, "job"):
            return
        job = Job.open(open_store(str(self.root / "jobs")), self.job.job_id)
        assert job.committed() == self.parts.keys() | self.parked
        expected: Counter[RowStatus] = Counter()
        for index in job.committed():
            expected[self.parts.get(index, RowStatus.FAILED)] += job.chunks[index].num_rows
        assert job.counts() == expected
        assert (job.success() is not None) == self.is_finished
        if self.is_finished:
            output = pq.read_table(Path(job.store.locate("output")))
            assert output["text"].to_pylist() == [f"row {i}" for i in range(10)]
            assert output["label_status"].null_count == 0


@pytest.fixture(autouse=True)
def _root_for_hypothesis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPOTHESIS_ROOT", str(tmp_path / "machine"))


TestCommits = CommitMachine.TestCase
TestCommits.settings = settings(max_examples=20, stateful_step_count=15, deadline=None)


def test_two_workers_that_run_the_same_chunk_give_one_result(tmp_path: Path, store: Store) -> None:
    job = make_job(tmp_path, store=store)
    outcomes = [job.commit_part(1, run_chunk(job, 1, ScriptedEngine(answer))) for answer in ("yes", "no")]
    assert outcomes == [True, False]
    assert job.read_part(1)["label"].to_pylist() == ["yes"] * 4


def test_results_survive_the_part_file(tmp_path: Path) -> None:
    job = make_job(tmp_path, chunk_rows=2)
    labels = (
        Label(path="/a", text="x", probability=0.5, margin=0.25, entropy=1.0, ranked=(("x", 0.5), ("y", 0.25))),
        Label(path="/b", text="true", probability=0.5),
    )
    rows = [
        RowResult(row_index=0, status=RowStatus.OK, value="nul\0", raw="nul\0", labels=labels, seconds=1.5),
        RowResult(row_index=1, status=RowStatus.INPUT_ERROR, error="text is null"),
    ]
    job.commit_part(0, rows)
    first, second = job.read_part(0).to_pylist()
    assert (first["label"], first["label_confidence"], first["label_meta"]["seconds"]) == ("nul\0", 0.25, 1.5)
    ranked, unranked = first["label_meta"]["labels"]
    assert ranked == {
        "path": "/a",
        "label": "x",
        "probability": 0.5,
        "margin": 0.25,
        "entropy": 1.0,
        "ranked": [{"label": "x", "probability": 0.5}, {"label": "y", "probability": 0.25}],
    }
    assert (unranked["label"], unranked["margin"], unranked["ranked"]) == ("true", None, [])
    assert (second["label_confidence"], second["label_meta"]["labels"]) == (None, [])
    assert (second["label"], second["label_raw"], second["label_error"]) == (None, None, "text is null")
    assert encode_json(job.spec) == encode_json(Job.open(open_store(str(tmp_path / "jobs")), job.job_id).spec)


def test_a_failure_says_why_until_it_is_taken_back_and_an_end_outranks_it(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.fail("first cause")
    job.fail("out of memory")
    failure = Job.open(open_store(str(tmp_path / "jobs")), job.job_id).failure()
    assert (job.state(), failure and failure.cause) == (JobState.FAILED, "out of memory")
    assert len(job.pending()) == len(job.chunks)
    job.unfail()
    assert (job.state(), job.failure()) == (JobState.QUEUED, None)
    job.fail("again")
    assert try_finish(run_job(job))
    assert job.state() is JobState.DONE
