"""A failed row leaves what is needed to ask again; a job full of them leaves a bounded number of files."""

import json
from decimal import Decimal
from pathlib import Path

from jobs import reproducer
from jobs.job import Job
from schemas.records import FinishReason, Request, RowStatus, Sampling
from tests.tiny_jobs import YES_NO, Answer, ScriptedEngine, make_job, prompt_of, run_chunk, write_input


def kept(job: Job) -> list[Path]:
    return sorted(Path(job.store.locate(reproducer.REPRODUCERS)).glob("*"))


def answer(request: Request) -> Answer:
    return ("", FinishReason.ERROR) if "poison" in prompt_of(request) else "yes"


def test_a_failed_row_leaves_the_question_as_the_engine_got_it(tmp_path: Path) -> None:
    rows = {"text": ["a", "b", "poison", "d"], "n": [Decimal("1.5")] * 4, "raw": [b"\xff"] * 4}
    job = make_job(
        tmp_path,
        [write_input(tmp_path / "in.parquet", rows)],
        chunk_rows=2,
        prompt_template="Is {{ text }} good?",
        constraint=YES_NO,
        sampling=Sampling(max_tokens=9, temperature=0.5),
    )
    engine = ScriptedEngine(answer)
    statuses = [row.status for row in run_chunk(job, 1, engine)]
    assert statuses == [RowStatus.FAILED, RowStatus.OK]
    (path,) = kept(job)
    assert path.name == "input-00000-row-2.json"
    found = json.loads(path.read_text())
    assert (found["row_index"], found["input"]) == (2, str(tmp_path / "in.parquet"))
    assert found["row"] == {"text": "poison", "n": "1.5", "raw": "/w=="}
    assert prompt_of(engine.requests[0]) == found["request"]["messages"][-1]["content"] == "Is poison good?"
    assert (found["request"]["seed"], found["request"]["sampling"]["max_tokens"]) == (engine.requests[0].seed, 9)
    assert found["constraint"]["source"] == YES_NO.source
    assert found["model"]["name"] == job.spec.model.name
    assert "error" in found["error"]


def test_a_second_try_keeps_the_first_file_and_a_broken_device_fills_no_disk(tmp_path: Path) -> None:
    texts = [f"poison {index}" for index in range(50)]
    job = make_job(tmp_path, [write_input(tmp_path / "in.parquet", {"text": texts})], chunk_rows=50)
    for _ in range(2):
        run_chunk(job, 0, ScriptedEngine(answer))
    assert len(kept(job)) == reproducer.MAX_REPRODUCERS


def test_a_file_that_cannot_be_written_costs_no_row(tmp_path: Path) -> None:
    job = make_job(tmp_path, [write_input(tmp_path / "in.parquet", {"text": ["poison", "b"]})])
    Path(job.store.locate(reproducer.REPRODUCERS)).write_text("in the way")
    assert [row.status for row in run_chunk(job, 0, ScriptedEngine(answer))] == [RowStatus.FAILED, RowStatus.OK]
