"""Inputs: what is found, what is refused, and that any run of rows equals the same slice of the whole table."""

import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.source import ChunkReader, check_columns, python_rows, rescan_inputs, scan_inputs, unify_schemas
from jobs.store import open_store
from schemas.errors import InputDataError, JobError
from tests.tiny_jobs import write_input


def read_all(locations: list[Path | str], step: int = 3) -> pa.Table:
    inputs = scan_inputs([str(location) for location in locations])
    reader = ChunkReader()
    names = inputs.schema.names
    batches = [
        batch
        for file in inputs.files
        for start in range(0, file.num_rows, step)
        for batch in reader.read(file, inputs.schema, start, min(step, file.num_rows - start), names)
    ]
    reader.close()
    return pa.Table.from_batches(batches, inputs.schema)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputDataError, match=f"no such file or directory: {tmp_path}/gone.parquet"):
        scan_inputs([str(tmp_path / "gone.parquet")])


def test_a_directory_without_data_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InputDataError, match=f"no data file .* in {tmp_path}"):
        scan_inputs([str(tmp_path)])


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"PAR1" + b"\0" * 100])
def test_what_is_not_parquet_is_named_with_its_size(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(InputDataError, match=rf"a\.parquet is not a readable Parquet file \({len(content)} bytes\)"):
        scan_inputs([str(path)])


def test_a_file_without_its_footer_is_refused(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a.parquet", {"a": list(range(1000))})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputDataError, match="not a readable Parquet file"):
        scan_inputs([str(path)])


def test_duplicate_column_names_are_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(InputDataError, match="several columns named 'a'"):
        scan_inputs([str(write_input(tmp_path / "a.parquet", table))])


def test_an_unknown_column_gets_the_known_ones_and_the_closest() -> None:
    schema = pa.schema({"review": pa.string(), "stars": pa.int64()})
    with pytest.raises(
        InputDataError, match=r"--gold: no column 'reviw'; there are: review, stars\. Did you mean 'review'\?"
    ):
        check_columns(["reviw"], schema, "--gold")


def test_a_column_added_in_a_later_file_is_null_in_the_earlier(tmp_path: Path) -> None:
    write_input(tmp_path / "1.parquet", {"a": [1]})
    write_input(tmp_path / "2.parquet", {"a": [2], "b": ["new"]})
    assert read_all([tmp_path]).to_pylist() == [{"a": 1, "b": None}, {"a": 2, "b": "new"}]


def test_a_first_file_of_nulls_takes_the_type_of_the_others(tmp_path: Path) -> None:
    write_input(tmp_path / "1.parquet", {"a": pa.array([None, None], pa.null())})
    write_input(tmp_path / "2.parquet", {"a": ["text"]})
    table = read_all([tmp_path])
    assert (table.schema.field("a").type, table["a"].to_pylist()) == (pa.string(), [None, None, "text"])


def test_a_type_change_names_both_files_and_types(tmp_path: Path) -> None:
    write_input(tmp_path / "1.parquet", {"a": [1]})
    write_input(tmp_path / "2.parquet", {"a": ["1"]})
    with pytest.raises(InputDataError, match=r"'a' is int64 in .*1\.parquet but string in .*2\.parquet"):
        scan_inputs([str(tmp_path)])


def test_plain_dictionary_and_large_text_are_one_column(tmp_path: Path) -> None:
    kinds = [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
    for index, kind in enumerate(kinds):
        write_input(tmp_path / f"{index}.parquet", {"a": pa.array(["x", None, "y"]).cast(kind)})
    assert read_all([tmp_path], step=2)["a"].to_pylist() == ["x", None, "y"] * 3


def test_dictionaries_that_differ_between_row_groups_are_decoded(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    kind = pa.dictionary(pa.int32(), pa.string())
    with pq.ParquetWriter(path, pa.schema({"a": kind})) as writer:
        for words in (["x", "y"], ["z", "x"]):
            writer.write_table(pa.table({"a": pa.array(words).cast(kind)}))
    assert read_all([path], step=3)["a"].to_pylist() == ["x", "y", "z", "x"]


def test_empty_row_groups_anywhere_are_stepped_over(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": list(range(9)), "text": [f"x\0{i}" for i in range(9)]})
    with pq.ParquetWriter(path, table.schema) as writer:
        for start, end in ((0, 0), (0, 5), (5, 5), (5, 9), (9, 9)):
            writer.write_table(table.slice(start, end - start))
    assert pq.read_metadata(path).num_row_groups == 5
    for step in (1, 2, 3, 4, 9):
        assert read_all([path], step=step).combine_chunks().equals(table)


COLORS = pa.array(["red", "green", None] * 8)
ODD_COLUMNS = {
    "dictionary of large text": COLORS.cast(pa.large_string()).dictionary_encode(),
    "dictionary of numbers": pa.array([1, 2, None] * 8).dictionary_encode(),
    "dictionary in a struct": pa.StructArray.from_arrays([COLORS.dictionary_encode()], ["color"]),
    "dictionary in a list": pa.ListArray.from_arrays(list(range(25)), COLORS.dictionary_encode()),
    "map of lists": pa.array([[("k", [1, 2])], None, []] * 8, pa.map_(pa.string(), pa.list_(pa.int64()))),
    "list of structs of lists": pa.array([[{"a": [{"b": None}]}]] * 24),
    "fixed size list": pa.array([[1, 2], None] * 12, pa.list_(pa.int32(), 2)),
    "text view": pa.array(["x", None] * 12, pa.string_view()),
    "decimal": pa.array([Decimal("1.23"), None] * 12, pa.decimal128(30, 2)),
    "largest integers": pa.array([2**64 - 1, 0] * 12, pa.uint64()),
    "nanoseconds": pa.array([1, None] * 12, pa.timestamp("ns", "Europe/Berlin")),
    "nanoseconds in a list": pa.array([[1], None] * 12, pa.list_(pa.timestamp("ns"))),
    "years beyond Python's": pa.array([2**61, 0] * 12, pa.timestamp("us")),
    "half of a character": pa.StringArray.from_buffers(
        24, pa.array(range(25), pa.int32()).buffers()[1], pa.py_buffer(b"ab\xff" * 8)
    ),
    "nothing but nulls": pa.nulls(24),
}


@pytest.mark.parametrize("kind", ODD_COLUMNS)
def test_odd_columns_survive_any_row_group_and_can_be_shown(kind: str, tmp_path: Path) -> None:
    table = pa.table({"odd": ODD_COLUMNS[kind], "number": range(24)})
    path = write_input(tmp_path / "a.parquet", table, row_group_size=7)
    found = read_all([path], step=5)
    assert found.equals(pq.read_table(path))
    rows = [row for batch in found.to_batches() for row in python_rows(batch)]
    assert [row["number"] for row in rows] == list(range(24))
    assert [row["odd"] is None for row in rows] == table["odd"].is_null().to_pylist()
    assert str(rows)


def test_one_row_kills_the_job_what_python_cannot_hold_is_shown_as_text_or_bytes() -> None:
    shown = {kind: python_rows(pa.record_batch({"odd": column}))[0]["odd"] for kind, column in ODD_COLUMNS.items()}
    assert shown["nanoseconds"] == "1970-01-01 00:00:00.000000001Z"
    assert shown["nanoseconds in a list"] == "[1970-01-01 00:00:00.000000001]"
    assert "out of range" in shown["years beyond Python's"]
    broken = python_rows(pa.record_batch({"odd": ODD_COLUMNS["half of a character"]}))
    assert [row["odd"] for row in broken[:4]] == ["a", "b", b"\xff", "a"]


def test_nested_columns_in_a_big_row_group_are_read_in_pieces(tmp_path: Path) -> None:
    lists = [[f"{i}-{j}" for j in range(i % 5)] for i in range(20_000)]
    maps = pa.array([[("k", i)] for i in range(20_000)], pa.map_(pa.string(), pa.int64()))
    structs = [{"role": "user", "content": str(i), "tags": [i, i]} for i in range(20_000)]
    path = write_input(tmp_path / "a.parquet", {"l": lists, "m": maps, "s": structs})
    assert read_all([path], step=7_777).equals(pq.read_table(path).combine_chunks())


def test_one_column_of_a_file_is_read_without_the_others(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a.parquet", {"a": [1, 2], "b": ["x", "y"]})
    inputs = scan_inputs([str(path)])
    (batch,) = ChunkReader().read(inputs.files[0], inputs.schema, 1, 1, ["b"])
    assert batch.to_pylist() == [{"b": "y"}]
    (batch,) = ChunkReader().read(inputs.files[0], inputs.schema, 0, 2, [])
    assert batch.num_rows == 2


def test_hive_directories_become_text_columns(tmp_path: Path) -> None:
    write_input(tmp_path / "lang=de" / "year=01" / "x.parquet", {"a": [1]})
    write_input(tmp_path / "lang=a%2Fb" / "year=__HIVE_DEFAULT_PARTITION__" / "x.parquet", {"a": [2]})
    rows = read_all([tmp_path]).to_pylist()
    assert rows == [{"a": 2, "lang": "a/b", "year": None}, {"a": 1, "lang": "de", "year": "01"}]
    only = write_input(tmp_path / "lang=de" / "y.parquet", {"a": [3]})
    assert scan_inputs([str(only)]).schema.names == ["a"]


def test_locations_keep_their_order_and_a_file_named_twice_comes_once(tmp_path: Path) -> None:
    a, b = (write_input(tmp_path / f"{name}.parquet", {"a": [1]}) for name in "ab")
    files = scan_inputs([str(b), str(tmp_path), f"{tmp_path}/*.parquet"]).files
    assert [file.uri for file in files] == [str(b), str(a)]


def test_a_bucket_is_read_like_a_directory(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a.parquet", {"a": list(range(5_000))}, row_group_size=700)
    root = f"memory://{tmp_path.name}"
    open_store(root).create("in/a.parquet", path.read_bytes())
    assert read_all([f"{root}/in"], step=999)["a"].to_pylist() == list(range(5_000))


def test_a_changed_or_deleted_input_stops_the_job(tmp_path: Path) -> None:
    path = write_input(tmp_path / "a.parquet", {"a": [1, 2, 3]})
    inputs = scan_inputs([str(path)])
    reader = ChunkReader()
    reader.read(inputs.files[0], inputs.schema, 0, 1, ["a"])
    os.utime(path, ns=(1, 1))
    with pytest.raises(JobError, match="changed since the job was submitted"):
        reader.read(inputs.files[0], inputs.schema, 1, 1, ["a"])
    path.unlink()
    with pytest.raises(JobError, match="is gone"):
        reader.read(inputs.files[0], inputs.schema, 1, 1, ["a"])
    with pytest.raises(JobError, match="is gone"):
        rescan_inputs(inputs.files)


def test_a_damaged_page_is_an_error_that_names_file_and_rows(tmp_path: Path) -> None:
    texts = {"a": [os.urandom(9).hex() for _ in range(5_000)]}
    path = write_input(tmp_path / "a.parquet", texts, use_dictionary=False, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    data[2000] ^= 1  # in mid text: without the checksum it would read as another letter
    path.write_bytes(data)
    inputs = scan_inputs([str(path)])
    with pytest.raises(InputDataError, match=r"a\.parquet: rows 0 to 10 cannot be read"):
        ChunkReader().read(inputs.files[0], inputs.schema, 0, 10, ["a"])


def test_consecutive_chunks_decode_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_input(tmp_path / "a.parquet", {"a": list(range(100_000))}, row_group_size=100_000)
    inputs = scan_inputs([str(path)])
    starts = []
    iterate = pq.ParquetFile.iter_batches

    def counted(*args: object, **kwargs: object) -> object:
        starts.append(kwargs["row_groups"])
        return iterate(*args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    reader = ChunkReader()
    for start in (0, 2_048, 10_240, 4 * 10_240):  # the gaps are other workers' chunks
        (first, *_) = reader.read(inputs.files[0], inputs.schema, start, 2_048, ["a"])
        assert first["a"][0].as_py() == start
    assert len(starts) == 1
    reader.read(inputs.files[0], inputs.schema, 0, 10, ["a"])  # a chunk delivered again
    assert len(starts) == 2


def test_the_reader_keeps_few_files_open(tmp_path: Path) -> None:
    for index in range(9):
        write_input(tmp_path / f"{index}.parquet", {"a": [index]})
    inputs = scan_inputs([str(tmp_path)])
    reader = ChunkReader(max_open_files=2)
    before = len(os.listdir("/proc/self/fd"))
    for file in inputs.files * 2:
        reader.read(file, inputs.schema, 0, 1, ["a"])
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    reader.close()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(1, 60),
    group_rows=st.integers(1, 20),
    runs=st.lists(st.tuples(st.integers(0, 59), st.integers(1, 20)), min_size=1, max_size=8),
)
def test_any_run_of_rows_equals_the_slice_of_the_table(
    tmp_path: Path, num_rows: int, group_rows: int, runs: list[tuple[int, int]]
) -> None:
    table = pa.table({"a": list(range(num_rows)), "s": [None if i % 3 == 0 else f"t{i}" for i in range(num_rows)]})
    path = write_input(tmp_path / "p.parquet", table, row_group_size=group_rows)
    inputs = scan_inputs([str(path)])
    reader = ChunkReader(read_batch_bytes=64)
    for start, length in runs:
        start, length = min(start, num_rows - 1), min(length, num_rows - min(start, num_rows - 1))
        batches = reader.read(inputs.files[0], inputs.schema, start, length, ["a", "s"])
        assert pa.Table.from_batches(batches).to_pylist() == table.slice(start, length).to_pylist()
    reader.close()


def test_field_and_schema_metadata_are_kept() -> None:
    schema = pa.schema([pa.field("a", pa.int64(), nullable=False, metadata={"unit": "m"})], {"pandas": "{}"})
    assert unify_schemas([("x", schema)]).equals(schema, check_metadata=True)
    merged = unify_schemas([("x", schema), ("y", pa.schema({"b": pa.string()}))])
    assert (merged.field("a").nullable, merged.field("a").metadata) == (True, {b"unit": b"m"})


def test_the_rows_of_one_read_are_bounded_in_bytes(tmp_path: Path) -> None:
    texts = [os.urandom(5_000).hex() for _ in range(300)]
    inputs = scan_inputs([str(write_input(tmp_path / "a.parquet", {"a": texts}))])
    batches = ChunkReader(read_batch_bytes=100_000).read(inputs.files[0], inputs.schema, 0, 300, ["a"])
    assert max(batch.num_rows for batch in batches) <= 10
    assert pa.Table.from_batches(batches)["a"].to_pylist() == texts


def test_the_first_rows_of_a_million_row_group_cost_little_memory(tmp_path: Path) -> None:
    texts = pa.array([f"{i:09}" * 8 for i in range(1_000_000)])
    table = pa.table({"a": texts, "b": texts})
    path = write_input(
        tmp_path / "a.parquet", table, row_group_size=1_000_000, use_dictionary=False, compression="none"
    )
    del table, texts
    inputs = scan_inputs([str(path)])
    reader = ChunkReader()
    before = pa.total_allocated_bytes()
    batches = reader.read(inputs.files[0], inputs.schema, 0, 2_048, ["a"])
    assert sum(batch.num_rows for batch in batches) == 2_048
    assert pa.total_allocated_bytes() - before < 16 * 2**20
    reader.close()
