"""Chunks cover the rows exactly once, in order; the plan file gives back what was written."""

import io
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.plan import START_AGAIN, VERSION_KEY, Plan, decode_plan, encode_plan, make_chunks
from jobs.source import scan_inputs
from schemas.errors import InputDataError, JobError
from schemas.records import FORMAT_VERSION, InputFile
from tests.tiny_jobs import write_input


def files_of(row_counts: list[int]) -> tuple[InputFile, ...]:
    return tuple(
        InputFile(uri=f"/d/{i}.parquet", size_bytes=1, modified="1", num_rows=n) for i, n in enumerate(row_counts)
    )


@given(st.lists(st.integers(0, 30), max_size=6), st.integers(1, 12), st.none() | st.integers(1, 100))
def test_chunks_cover_the_first_rows_once_and_in_order(
    row_counts: list[int], chunk_rows: int, limit: int | None
) -> None:
    chunks = make_chunks(files_of(row_counts), chunk_rows, limit)
    covered = [(c.input_index, row) for c in chunks for row in range(c.start_row, c.start_row + c.num_rows)]
    every_row = [(index, row) for index, count in enumerate(row_counts) for row in range(count)]
    assert covered == every_row[:limit]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    assert all(1 <= chunk.num_rows <= chunk_rows for chunk in chunks)


def test_unbounded_buffering_rows_of_a_megabyte_make_chunks_of_few_rows(tmp_path: Path) -> None:
    for name, wide in (("narrow", 1), ("wide", 2**20)):
        texts = [f"{i}" + "x" * wide for i in range(20)]
        write_input(tmp_path / f"{name}.parquet", {"text": texts}, use_dictionary=False)
    inputs = scan_inputs([str(tmp_path / "narrow.parquet"), str(tmp_path / "wide.parquet")])
    chunks = make_chunks(inputs.files, 16, row_bytes=inputs.row_bytes, chunk_bytes=5 * 2**20)
    assert [chunk.num_rows for chunk in chunks] == [16, 4, 4, 4, 4, 4, 4]
    whole = make_chunks(inputs.files, 16, row_bytes=inputs.row_bytes, chunk_bytes=1)
    assert [chunk.num_rows for chunk in whole] == [1] * 40


@pytest.mark.parametrize(("chunk_rows", "limit"), [(0, None), (1, 0), (-1, 3)])
def test_sizes_below_one_are_refused(chunk_rows: int, limit: int | None) -> None:
    with pytest.raises(InputDataError, match="at least 1"):
        make_chunks(files_of([3]), chunk_rows, limit)


@pytest.mark.parametrize("row_counts", [[], [0], [7, 0, 5]])
def test_a_plan_survives_its_file(row_counts: list[int]) -> None:
    schema = pa.schema([pa.field("a", pa.list_(pa.string()), metadata={"k": "v"})], {"pandas": "{}"})
    plan = Plan(make_chunks(files_of(row_counts), 3), schema)
    decoded = decode_plan("job-1", encode_plan("job-1", plan), "plan.parquet")
    assert decoded.chunks == plan.chunks
    assert decoded.input_schema.equals(schema, check_metadata=True)


def test_a_plan_of_another_job_a_newer_version_or_half_a_file_is_refused() -> None:
    data = encode_plan("job-1", Plan(make_chunks(files_of([5]), 2), pa.schema({"a": pa.int64()})))

    def refusal(job_id: str, data: bytes) -> str:
        with pytest.raises(JobError) as refused:
            decode_plan(job_id, data, "/jobs/job-1/plan.parquet")
        return str(refused.value)

    table = pq.read_table(io.BytesIO(data))

    def with_metadata(metadata: dict[bytes, bytes]) -> bytes:
        sink = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(metadata), sink)
        return sink.getvalue()

    newer = {**table.schema.metadata, VERSION_KEY: str(FORMAT_VERSION + 1).encode()}
    for job_id, content, why, cure in (
        ("job-2", data, "belongs to job-1", START_AGAIN),
        ("job-1", data[: len(data) // 2], "is damaged or no plan", START_AGAIN),
        ("job-1", with_metadata({}), "is damaged or no plan", START_AGAIN),
        ("job-1", with_metadata(newer), f"has format version {FORMAT_VERSION + 1}", "update it"),
    ):
        message = refusal(job_id, content)
        assert message.startswith(f"/jobs/job-1/plan.parquet {why}")
        assert message.endswith(cure)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 40))
def test_a_canary_is_the_first_chunk_and_no_row_is_lost_or_doubled_by_it(
    files: list[int], chunk_rows: int, canary_rows: int
) -> None:
    inputs = [InputFile(uri=str(i), size_bytes=1, modified="", num_rows=n) for i, n in enumerate(files)]
    chunks = make_chunks(inputs, chunk_rows, canary_rows=canary_rows)
    rows = [(c.input_index, c.start_row + i) for c in chunks for i in range(c.num_rows)]
    assert rows == [(index, row) for index, n in enumerate(files) for row in range(n)]
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert all(c.num_rows <= chunk_rows for c in chunks[1:])
    first = next((n for n in files if n), 0)
    assert [c.num_rows for c in chunks[:1]] == ([min(canary_rows, first)] if first else [])
