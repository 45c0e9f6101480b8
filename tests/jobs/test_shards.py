"""Names of output files, and clashes with the input."""

from pathlib import Path

import pytest

from jobs.shards import shard_names
from schemas.errors import JobError
from schemas.records import InputFile
from tests.tiny_jobs import make_job


def test_an_output_over_the_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="would overwrite the input"):
        make_job(tmp_path, output=str(tmp_path))


@pytest.mark.parametrize(
    ("uris", "names"),
    [
        (["/d/a.parquet", "/d/b.pq", "s3://x/c"], ["a.parquet", "b.parquet", "c.parquet"]),
        (["/d/k=1/a.parquet", "/d/k=2/A.parquet"], ["00000-a.parquet", "00001-A.parquet"]),
        (["/d/_hidden.parquet", "/d/.parquet"], ["part_hidden.parquet", "part.parquet"]),
    ],
)
def test_output_files_are_named_after_their_inputs(uris: list[str], names: list[str]) -> None:
    files = [InputFile(uri=uri, size_bytes=1, modified="", num_rows=1) for uri in uris]
    assert list(shard_names(files)) == names
