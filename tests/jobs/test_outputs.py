"""No two jobs write one output file: the second is refused when it is submitted."""

from pathlib import Path

import pytest

from jobs.finish import try_finish
from jobs.job import Job
from jobs.outputs import check_output_is_free
from jobs.store import open_store
from schemas.errors import InputDataError
from tests.tiny_jobs import make_job, run_job, write_input


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "out")


def check(job: Job, out: str, root: Path) -> None:
    check_output_is_free(job.spec, out, open_store(str(root / "jobs")))


def test_a_second_job_for_the_output_of_an_unfinished_one_is_refused(tmp_path: Path, out: str) -> None:
    first, second = make_job(tmp_path, output=out), make_job(tmp_path, seed=1)
    check(first, out, tmp_path)
    with pytest.raises(InputDataError, match=rf"out/in\.parquet will be written by {first.job_id}.*cancel that job"):
        check(second, f"{out}/", tmp_path)
    check(second, f"{out}2", tmp_path)
    first.cancel()
    check(second, out, tmp_path)


def test_an_output_that_holds_the_files_of_another_job_is_refused(tmp_path: Path, out: str) -> None:
    first, second = make_job(tmp_path, output=out), make_job(tmp_path, seed=1)
    assert try_finish(run_job(first))
    check(first, out, tmp_path)
    with pytest.raises(InputDataError, match=r"out/in\.parquet is not this job's: move it away"):
        check(second, out, tmp_path)
    (tmp_path / "out" / "in.parquet").write_bytes(b"not even Parquet")
    with pytest.raises(InputDataError, match="not this job's"):
        check(first, out, tmp_path)


def test_jobs_over_other_files_share_an_output(tmp_path: Path, out: str) -> None:
    make_job(tmp_path, output=out)
    check(make_job(tmp_path, [write_input(tmp_path / "b.parquet", {"text": ["x"]})]), out, tmp_path)


def test_a_job_that_cannot_be_read_stands_in_nobodys_way(tmp_path: Path, out: str) -> None:
    first, second = make_job(tmp_path, output=out), make_job(tmp_path, seed=1)
    Path(first.store.locate("job.json")).write_bytes(b"{")
    check(second, out, tmp_path)
