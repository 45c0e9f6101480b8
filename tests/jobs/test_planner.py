import re
from pathlib import Path
from typing import Any

import pytest

from jobs.finish import try_finish
from jobs.job import Job
from jobs.planner import copy_known_rows
from jobs.reuse import read_known
from schemas.errors import JobError
from tests.tiny_jobs import YES_NO, ScriptedEngine, make_job, run_job, write_input

TEXTS = ["a", "b", None, "c", "a", "d", "e", "b", "f", "a", "g", "h", "c", "i"]


def plan(root: Path, name: str, process_rows: int, **fields: Any) -> Job:
    path = root / "in.parquet"
    if not path.exists():
        write_input(path, {"text": TEXTS})
    job = make_job(root, [path], name=name, chunk_rows=2, prompt_column="text", constraint=YES_NO, **fields)
    copy_known_rows(job, process_rows)
    return job


def notes(job: Job) -> list[tuple[bool, dict[int, str], frozenset[int]]]:
    """What is known of each chunk: whether it is committed, known rows, rows that wait."""
    found = [read_known(job, chunk.index) for chunk in job.chunks]
    return [
        (job.is_committed(chunk.index), dict(known.statuses), known.waiting)
        for chunk, known in zip(job.chunks, found, strict=True)
    ]


def test_several_processes_find_what_one_finds(tmp_path: Path) -> None:
    early = [plan(tmp_path, f"early-{rows}", rows) for rows in (10**6, 7)]
    assert notes(early[0]) == notes(early[1])
    assert [sorted(waiting) for _, _, waiting in notes(early[0])] == [[], [], [4], [7], [9], [], [12]]
    assert try_finish(run_job(early[0], ScriptedEngine("yes")))
    late = [plan(tmp_path, f"late-{rows}", rows) for rows in (10**6, 7)]
    assert notes(late[0]) == notes(late[1])
    assert not late[0].pending()


def test_a_process_that_fails_is_an_error_with_its_reason(tmp_path: Path) -> None:
    job = make_job(tmp_path, [write_input(tmp_path / "in.parquet", {"text": TEXTS})], chunk_rows=2)
    (tmp_path / "in.parquet").unlink()
    with pytest.raises(JobError, match=re.escape("in.parquet is gone since the job was submitted")):
        copy_known_rows(job, 7)
