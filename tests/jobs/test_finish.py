"""Finishing: every input row comes back, in order, with its columns as they were; the success file is last and once."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.finish import final_state, finish_or_fail, try_finish
from jobs.job import Job, part_key
from jobs.results import run_rows
from jobs.source import ChunkReader
from jobs.store import LocalDirectory, open_store, replace
from schemas.errors import JobError, StoreError
from schemas.records import FinishReason, JobState, Request, RowStatus
from tests.tiny_jobs import YES_NO, Answer, ScriptedEngine, make_job, prompt_of, results_of, run_job, write_input

ADDED = ["label", "label_raw", "label_status", "label_error", "label_confidence", "label_meta"]

HEX = "0123456789abcdef" * 2


def echo(request: Request) -> str:
    return prompt_of(request)


def output_of(job: Job, name: str = "in.parquet") -> pa.Table:
    return pq.read_table(job.store.locate(f"output/{name}"), partitioning=None)


def test_a_job_with_pending_chunks_is_not_finished(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    job.commit_part(0, results_of(job, 0))
    assert (try_finish(job), job.success(), job.store.list("output")) == (False, None, [])


def test_every_row_comes_back_in_order_beside_its_label(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path), ScriptedEngine(echo))
    assert try_finish(job)
    table = output_of(job)
    assert table.column_names == ["text", *ADDED]
    assert table["label"].to_pylist() == table["text"].to_pylist() == [f"row {i}" for i in range(10)]
    success = job.success()
    assert (success.state, success.num_rows, success.counts) == (JobState.DONE, 10, {"ok": 10})
    (output,) = success.outputs
    assert (output.num_rows, output.size_bytes) == (10, os.path.getsize(output.uri))
    assert job.store.list() == ["_SUCCESS.json", "job.json", "output", "parts", "plan.parquet"]
    assert job.store.list("_staging") == []


def test_a_job_without_rows_ends_at_once_as_done(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"text": pa.array([], pa.string())})
    job = make_job(tmp_path, [path])
    assert (job.chunks, try_finish(job), job.state(), job.counts()) == ((), True, JobState.DONE, {})
    assert (output_of(job).num_rows, output_of(job).column_names) == (0, ["text", *ADDED])


def test_columns_types_and_metadata_of_the_input_are_kept(tmp_path: Path) -> None:
    fields = [
        pa.field("id", pa.int32(), nullable=False, metadata={"unit": "one"}),
        pa.field("text", pa.large_string()),
        pa.field("kind", pa.dictionary(pa.int32(), pa.string())),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("at", pa.timestamp("us", "Europe/Berlin")),
        pa.field("nested", pa.list_(pa.struct({"a": pa.map_(pa.string(), pa.int64())}))),
        pa.field("data", pa.binary()),
    ]
    rows: list[dict[str, Any]] = [
        {"id": i, "text": f"t{i}", "kind": "ab"[i % 2], "nested": [{"a": [("k", i)]}], "data": b"\0"} for i in range(9)
    ]
    table = pa.Table.from_pylist(rows, pa.schema(fields, {"pandas": "{}", "mine": "kept"}))
    job = make_job(tmp_path, [write_input(tmp_path / "in.parquet", table)], prompt_column="text", chunk_rows=4)
    run_job(job, ScriptedEngine(echo))
    assert try_finish(job)
    output = output_of(job)
    kept = output.select(table.column_names)
    assert kept.to_pylist() == table.to_pylist()
    assert kept.schema.equals(table.schema)
    assert output.schema.field("id").metadata[b"unit"] == b"one"
    assert output.schema.metadata[b"nightmill.deterministic"] == b"false"
    assert (output.schema.metadata[b"mine"], output.schema.metadata[b"pandas"]) == (b"kept", b"{}")


def test_only_the_columns_asked_for_are_kept(tmp_path: Path) -> None:
    path = write_input(tmp_path / "in.parquet", {"text": ["x", "y"], "id": [1, 2], "big": ["z", "z"]})
    job = run_job(make_job(tmp_path, [path], prompt_column="text", columns=("id",)))
    assert try_finish(job)
    assert output_of(job).column_names == ["id", *ADDED]
    none = run_job(make_job(tmp_path, [path], prompt_column="text", columns=()))
    assert try_finish(none)
    assert (output_of(none).column_names, output_of(none).num_rows) == (ADDED, 2)


def test_each_shard_has_its_output_and_all_read_as_one_dataset(tmp_path: Path) -> None:
    write_input(tmp_path / "in" / "k=1" / "a.parquet", {"text": ["a", "b"]})
    write_input(tmp_path / "in" / "k=2" / "a.parquet", {"text": ["c"], "extra": [1]})
    write_input(tmp_path / "in" / "k=3" / "a.parquet", {"text": pa.array([], pa.string())})
    job = run_job(make_job(tmp_path, [tmp_path / "in"], prompt_column="text", chunk_rows=1))
    assert try_finish(job)
    assert job.store.list("output") == ["00000-a.parquet", "00001-a.parquet", "00002-a.parquet"]
    rows = ds.dataset(job.store.locate("output")).to_table(["text", "k", "extra", "label"]).to_pylist()
    assert [(r["text"], r["k"], r["extra"], r["label"]) for r in rows] == [
        ("a", "1", None, "yes"),
        ("b", "1", None, "yes"),
        ("c", "2", 1, "yes"),
    ]


def test_a_limit_cuts_the_rows_and_the_files(tmp_path: Path) -> None:
    for name in "abc":
        write_input(tmp_path / "in" / f"{name}.parquet", {"text": [f"{name}{i}" for i in range(5)]})
    job = run_job(make_job(tmp_path, [tmp_path / "in"], limit=7))
    assert try_finish(job)
    assert job.store.list("output") == ["a.parquet", "b.parquet"]
    assert output_of(job, "b.parquet")["text"].to_pylist() == ["b0", "b1"]


def test_output_goes_where_it_was_asked_for(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path, output=str(tmp_path / "out")))
    assert try_finish(job)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["in.parquet"]
    assert job.store.list("output") == []


def test_a_bucket_holds_job_and_output(tmp_path: Path) -> None:
    root = f"memory://{tmp_path.name}-finish"
    job = run_job(make_job(tmp_path, store=open_store(f"{root}/jobs"), output=f"{root}/out"), ScriptedEngine(echo))
    assert try_finish(job)
    with open_store(f"{root}/out").open_reader("in.parquet") as file:
        assert pq.read_table(file)["label"].to_pylist() == [f"row {i}" for i in range(10)]


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path) -> None:
    theirs = write_input(tmp_path / "out" / "in.parquet", {"precious": [1]})
    job = run_job(make_job(tmp_path, output=str(tmp_path / "out")))
    with pytest.raises(StoreError, match=r"in\.parquet is not tiny-.*move it away, then resume"):
        try_finish(job)
    assert (pq.read_table(theirs).column_names, job.success()) == (["precious"], None)


@pytest.mark.parametrize(
    ("answer", "state", "cause"),
    [
        ("yes", JobState.DONE, None),
        (("yes", FinishReason.CLOSED), JobState.DONE, None),
        ("maybe", JobState.FAILED, "invalid: "),
        (("", FinishReason.PROMPT_TOO_LONG), JobState.FAILED, "prompt_too_long: "),
        (lambda request: "yes" if "3" in prompt_of(request) else "x", JobState.DONE_WITH_ERRORS, "invalid: "),
    ],
)
def test_a_job_ends_as_its_rows_did(tmp_path: Path, answer: Answer, state: JobState, cause: str | None) -> None:
    job = run_job(make_job(tmp_path, constraint=YES_NO), ScriptedEngine(answer))
    assert try_finish(job)
    success = job.success()
    assert success.state is job.state() is state
    if cause is None:
        assert success.commonest_error is None
    else:
        assert success.commonest_error.startswith(cause)
        assert success.commonest_error.endswith(" rows)")


@pytest.mark.parametrize(
    ("counts", "state"),
    [
        ({}, JobState.DONE),
        ({RowStatus.SKIPPED: 3}, JobState.DONE),
        ({RowStatus.SKIPPED: 3, RowStatus.INPUT_ERROR: 1}, JobState.FAILED),
        ({RowStatus.CLOSED: 1, RowStatus.FAILED: 9}, JobState.DONE_WITH_ERRORS),
    ],
)
def test_final_states(counts: dict[RowStatus, int], state: JobState) -> None:
    assert final_state(counts) is state


def test_racing_finishers_agree(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    outcomes: list[bool] = []
    barrier = threading.Barrier(4)

    def finish() -> None:
        own = Job.open(open_store(str(tmp_path / "jobs")), job.job_id)
        barrier.wait()
        outcomes.append(try_finish(own))

    threads = [threading.Thread(target=finish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * 4
    assert (output_of(job).num_rows, job.success().num_rows) == (10, 10)


def test_what_a_killed_finisher_left_breaks_no_reader(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path, output=str(tmp_path / "out")))
    (tmp_path / "out" / "_staging").mkdir(parents=True)
    (tmp_path / "out" / "_staging" / f"in-{HEX}.parquet").write_bytes(b"half")
    os.utime(tmp_path / "out" / "_staging" / f"in-{HEX}.parquet", ns=(1, 1))
    replace(open_store(str(tmp_path / "out")), "in.parquet", _empty_output_of(job))
    assert ds.dataset(tmp_path / "out").to_table().num_rows == 0
    assert try_finish(job)
    assert ds.dataset(tmp_path / "out").to_table().num_rows == 10
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["in.parquet"]


def test_a_finished_job_keeps_nothing_of_writers_that_were_killed(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    for name in (f"part-00001-{HEX}.parquet", f"in-{HEX}.parquet", f"spill-{job.job_id}-00002-{HEX}"):
        job.store.create(f"_staging/{name}", b"half")
    assert try_finish(job)
    assert job.store.list("_staging") == []


def _empty_output_of(job: Job) -> bytes:
    sink = pa.BufferOutputStream()
    schema = pa.schema({"text": pa.string()}, {"nightmill.job_id": job.job_id})
    pq.write_table(schema.empty_table(), sink)
    return sink.getvalue().to_pybytes()


def test_an_input_that_changed_or_a_part_that_was_swapped_stops_the_finish(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    part = job.store.read(part_key(0))
    replace(job.store, part_key(0), job.store.read(part_key(1)))
    with pytest.raises(JobError, match="cannot be used"):
        try_finish(job)
    replace(job.store, part_key(0), part)
    os.utime(tmp_path / "in.parquet", ns=(1, 1))
    with pytest.raises(JobError, match="changed since"):
        try_finish(job)
    assert (job.success(), job.store.list("output")) == (None, [])


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shards=st.lists(st.lists(st.none() | st.text(max_size=3), max_size=9), min_size=1, max_size=3),
    chunk_rows=st.integers(1, 6),
    limit=st.none() | st.integers(1, 20),
    group_rows=st.integers(1, 5),
)
def test_ok_and_every_other_status_add_up_to_the_rows(
    tmp_path: Path, shards: list[list[str | None]], chunk_rows: int, limit: int | None, group_rows: int
) -> None:
    place = tmp_path / str(abs(hash((str(shards), chunk_rows, limit, group_rows))))
    for index, texts in enumerate(shards):
        table = pa.table({"text": pa.array(texts, pa.string())})
        write_input(place / "in" / f"{index}.parquet", table, row_group_size=group_rows)
    job = make_job(place, [place / "in"], chunk_rows=chunk_rows, limit=limit, prompt_column="text", where="text != 'a'")
    assert try_finish(run_job(job, ScriptedEngine(echo)))
    rows = [row for name in job.store.list("output") for row in output_of(job, name).to_pylist()]
    assert [row["text"] for row in rows] == [text for texts in shards for text in texts][:limit]
    for row in rows:
        text = row["text"]
        expected = "skipped" if text == "a" else "ok" if text is not None and text.strip() else "input_error"
        assert (row["label_status"], row["label"]) == (expected, text if expected == "ok" else None)
    assert sum(job.success().counts.values()) == len(rows) == job.num_rows


def test_real_tickets_come_back_as_they_were(tmp_path: Path, shared_data: Path) -> None:
    path = shared_data / "banking77.parquet"
    table = pq.read_table(path)
    job = make_job(tmp_path, [path], prompt_column="text", output_column="answer", chunk_rows=1000)
    assert try_finish(run_job(job, ScriptedEngine(echo)))
    output = output_of(job, "banking77.parquet")
    assert output.select(table.column_names).to_pylist() == table.to_pylist()
    assert output["answer"].to_pylist() == table["text"].to_pylist()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path) -> None:
    num_rows = 150_000
    path = write_input(tmp_path / "in.parquet", {"text": [f"row {i}" for i in range(num_rows)]})
    job, reader, process = make_job(tmp_path, [path], chunk_rows=2048), ChunkReader(), psutil.Process()
    sizes = []
    for chunk in job.chunks:
        job.commit_part(chunk.index, run_rows(job, chunk, ScriptedEngine(), is_cancelled=lambda: False, reader=reader))
        sizes.append(process.memory_info().rss)
    assert try_finish(job)
    sizes.append(process.memory_info().rss)
    assert max(sizes) - max(sizes[:15]) < 128 * 2**20  # the report's charts and Arrow's pool take 20 to 80 MB


class Slow(LocalDirectory):
    """Begins to write only after somebody else has finished the job."""

    overtake: Callable[[], object] = bool

    def open_writer(self, key: str) -> AbstractContextManager[IO[bytes]]:
        self.overtake()
        return super().open_writer(key)


def test_a_finisher_that_comes_second_leaves_the_published_files_alone(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    quick, published = Job.open(open_store(str(tmp_path / "jobs")), job.job_id), list[os.stat_result]()
    output = Path(job.store.locate("output/in.parquet"))
    job.store = slow = Slow(Path(job.store.locate("")))

    def overtake() -> None:
        assert try_finish(quick)
        published.append(output.stat())

    slow.overtake = overtake
    assert try_finish(job)
    assert output.stat().st_ino == published[0].st_ino
    assert job.store.list("_staging") == []


class Swept(LocalDirectory):
    """Is overtaken between its last look and the publication of a file."""

    overtake: Callable[[], object] = bool

    @contextmanager
    def open_writer(self, key: str) -> Iterator[IO[bytes]]:
        with super().open_writer(key) as file:
            yield file
            self.overtake()


def test_a_finisher_whose_file_the_first_one_swept_is_content(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    quick = Job.open(open_store(str(tmp_path / "jobs")), job.job_id)
    job.store = late = Swept(Path(job.store.locate("")))
    late.overtake = lambda: try_finish(quick)
    assert try_finish(job)
    assert output_of(job).num_rows == 10
    assert job.store.list("_staging") == []


def test_a_part_that_goes_while_the_job_is_finished_is_pending_again(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    whole = job.store
    job.store = slow = Slow(Path(job.store.locate("")))
    slow.overtake = lambda: whole.delete(part_key(1))
    assert not try_finish(job)
    assert (job.pending(), job.success()) == ((1,), None)


def test_what_only_a_person_can_mend_fails_the_job_until_it_is_mended(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    times = (tmp_path / "in.parquet").stat()
    os.utime(tmp_path / "in.parquet", ns=(1, 1))
    with pytest.raises(JobError, match="changed since"):
        finish_or_fail(job)
    failure = job.failure()
    assert failure is not None
    assert (job.state(), "changed since" in failure.cause) == (JobState.FAILED, True)
    os.utime(tmp_path / "in.parquet", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert finish_or_fail(job)
    assert job.state() is JobState.DONE


def test_a_file_that_somebody_else_puts_there_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    job = run_job(make_job(tmp_path))
    output = Path(job.store.locate("output/in.parquet"))
    job.store = slow = Slow(Path(job.store.locate("")))

    def put() -> None:
        output.parent.mkdir()
        output.write_bytes(b"theirs")

    slow.overtake = put
    with pytest.raises(StoreError, match=r"in\.parquet is not tiny-.*'s: move it away, then resume the job"):
        try_finish(job)
    assert (output.read_bytes(), job.success()) == (b"theirs", None)
