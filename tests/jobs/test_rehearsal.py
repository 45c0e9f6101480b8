"""A rehearsal on a real worker with a fake engine: it measures, and only the ledger remembers it."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.api import Prepared, Submission, prepare
from jobs.forecast import sample_rows
from jobs.job import Job
from jobs.rehearsal import rehearse
from schemas.errors import JobError
from schemas.records import Sampling
from tests.tiny_models import write_tiny_tokenizer
from tests.worker.lab import Lab


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    yield lab
    lab.close()


def prepared(lab: Lab, texts: list[str], **fields: object) -> Prepared:
    path = lab.path / "data.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    options = {"prompt_column": "text", "chat": False, "model": lab.settings.worker.model, **fields}
    return prepare(Submission(inputs=(str(path),), sampling=Sampling(max_tokens=20), **options), lab.settings)


def test_a_rehearsal_measures_distinct_rows_and_leaves_nothing_but_answers(lab: Lab) -> None:
    write_tiny_tokenizer(lab.path / "model")
    lab.worker()
    plan = prepared(lab, [f"row {number // 2}" for number in range(400)])
    rate = rehearse(plan, lab.settings, 32)
    assert (rate.num_answered, rate.hardware, rate.devices_per_worker) == (32, "fake", 1.0)
    assert rate.tokens_per_s > 0
    assert rate.spread < 1
    assert rate.start_s > 0
    assert rate.fixed_s >= 0
    assert len(lab.count("leased")) == 1, "a chunk of the job's own size"
    assert Job.list_ids(lab.store) == []
    assert lab.store.list("_samples") == []
    assert sample_rows(plan, lab.settings).num_known == 32


def test_where_nothing_is_left_to_ask_that_is_said(lab: Lab) -> None:
    with pytest.raises(JobError, match="nothing to measure"):
        rehearse(prepared(lab, ["a", "b"], where="text == 'c'"), lab.settings, 4)
    assert lab.store.list("_samples") == []
