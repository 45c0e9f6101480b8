"""Arrow files as input, as the datasets library saves them; Parquet and lines have tests of their own."""

from pathlib import Path

import pyarrow as pa
import pytest

from jobs.source import ChunkReader, python_rows, scan_inputs
from schemas.errors import InputDataError

TABLE = pa.table({"text": [f"row {i}" for i in range(10)], "label": list(range(10))})


def save(path: Path, table: pa.Table, *, as_file: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    make = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("starts", [(0, 4, 8), (8, 4, 0)])
def test_any_run_of_an_arrow_file_is_that_slice(tmp_path: Path, as_file: bool, starts: tuple[int, ...]) -> None:
    save(tmp_path / "a.arrow", TABLE, as_file=as_file)
    inputs = scan_inputs([str(tmp_path)])
    reader = ChunkReader()
    for start in starts:
        batches = reader.read(inputs.files[0], inputs.schema, start, 2, ["label"])
        assert [row["label"] for batch in batches for row in python_rows(batch)] == [start, start + 1]
    reader.close()


def test_a_data_set_saved_to_disk_is_its_splits_without_caches_and_descriptions(tmp_path: Path) -> None:
    for split in ("test", "train"):
        for number in range(2):
            save(tmp_path / split / f"data-0000{number}-of-00002.arrow", TABLE)
        save(tmp_path / split / "cache-1f2e.arrow", TABLE)
        (tmp_path / split / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    files = scan_inputs([str(tmp_path)]).files
    assert [Path(file.uri).relative_to(tmp_path).parts[0] for file in files] == ["test", "test", "train", "train"]
    assert [file.num_rows for file in files] == [10] * 4


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0garbage", b"no arrow at all"])
def test_what_is_no_arrow_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(InputDataError, match=r"a\.arrow"):
        scan_inputs([str(tmp_path)])
