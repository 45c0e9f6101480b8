"""A real worker whose engine has two ranks that share experts: one of them is killed, and every row comes back."""

import os
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from jobs.job import Job
from schemas.records import Constraint, ConstraintKind, Sampling
from tests.tiny_models import write_tiny_model
from tests.worker.lab import Lab, until

NUM_CHUNKS, CHUNK_ROWS = 6, 16
RANKS = {"DATA_PARALLEL": "2", "EXPERT_PARALLEL": "2", "NUM_THREADS": "1", "KV_CACHE_GIB": "0.05"}
WORDS = Constraint(kind=ConstraintKind.REGEX, source="[a-z]{32}")


def labels(job: Job, output: Path) -> list[tuple[str, str, str]]:
    """Text, label and status of each row in order, once the job is done."""
    until(job.success, "the job to be done", 120)
    table = pq.read_table(output)
    columns = (table[name].to_pylist() for name in ("text", "label", "label_status"))
    return list(zip(*columns, strict=True))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_of_two_is_killed_and_no_row_is_lost(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", "qwen3_moe")
    lab = Lab(tmp_path)
    lab.app = "worker"
    rows = {}
    try:
        worker = lab.worker(is_ready=False, **{f"NIGHTMILL_ENGINE__{name}": value for name, value in RANKS.items()})
        for name in ("undisturbed", "disturbed"):
            spec = {"sampling": Sampling(max_tokens=48), "constraint": WORDS}
            job = lab.start_job(NUM_CHUNKS, name=name, chunk_rows=CHUNK_ROWS, output=tmp_path / name, **spec)
            if name == "disturbed":
                until(job.committed, "the first chunk")
                ranks = worker.engine_pids()
                assert len(ranks) == 2
                os.kill(max(ranks), signal.SIGKILL)
            rows[name] = labels(job, tmp_path / name)
        assert not ranks & worker.engine_pids(), "the other rank went along"
    finally:
        lab.close()
    assert [text for text, _, _ in rows["disturbed"]] == [f"row {index}" for index in range(NUM_CHUNKS * CHUNK_ROWS)]
    assert {status for _, _, status in rows["disturbed"]} == {"ok"}
    assert rows["disturbed"] == rows["undisturbed"]
