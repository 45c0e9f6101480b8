"""A canary set: the same rows asked anew, and what became of their labels."""

from pathlib import Path

import msgspec
import pytest

from jobs import drift
from jobs.drift import describe_drift
from jobs.job import Job
from jobs.report import render_report
from schemas.records import Request
from schemas.settings import JobsSettings
from tests.tiny_jobs import MODEL, ScriptedEngine, make_job, prompt_of, run_job, write_input


def night(path: Path, slot: str, *flipped: str, **fields: object) -> Job:
    """The canary set of a night; the rows ``flipped`` get another label than the rest."""

    def answer(request: Request) -> str:
        return "no" if prompt_of(request) in flipped else "yes"

    job = make_job(path.parent, [path], slot=slot, **{"refresh": True, "prompt_column": "text", **fields})
    return run_job(job, ScriptedEngine(answer))


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return write_input(tmp_path / "canary.parquet", {"text": ["a", "b", "c", "d"]})


def test_labels_that_changed_overnight_are_in_the_report(canary: Path) -> None:
    monday, tuesday = night(canary, "mon", "a"), night(canary, "tue", "b")
    found = describe_drift(tuesday, monday)
    assert found is not None
    assert found["sentence"].startswith(f"2 of 4 rows (50.0%) have another label than in {monday.job_id}")
    assert "near-ties" in found["sentence"]
    assert sorted(found["flips"]) == [("1", "no", "yes"), ("1", "yes", "no")]
    page = render_report(tuesday, JobsSettings(), monday)
    assert "Drift" in page
    assert "near-ties" in page


def test_no_drift_is_said_too(canary: Path) -> None:
    found = describe_drift(night(canary, "tue", "a"), night(canary, "mon", "a"))
    assert found is not None
    assert found["sentence"].startswith("0 of 4 rows (0.0%)")
    assert found["is_good"]


def test_a_batch_invariant_set_that_drifts_names_what_can_have_changed(canary: Path) -> None:
    model = msgspec.structs.replace(MODEL, deterministic=True)
    nights = [night(canary, slot, *flipped, model=model) for slot, flipped in (("mon", ()), ("tue", ("a",)))]
    found = describe_drift(nights[1], nights[0])
    assert found is not None
    assert "a driver, a library or Nightmill" in found["sentence"]
    found = describe_drift(night(canary, "wed", model=model, seed=1), nights[0])
    assert found is not None
    assert "Changed since: seed." in found["sentence"]


def test_other_rows_copied_ones_and_many_are_no_canary_set(canary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monday = night(canary, "mon")
    other = write_input(canary.with_name("other.parquet"), {"text": ["a"]})
    for job in (night(other, "tue"), night(canary, "tue", refresh=False)):
        assert describe_drift(job, monday) is None
    assert describe_drift(monday, None) is None
    monkeypatch.setattr(drift, "MAX_ROWS", 3)
    assert describe_drift(night(canary, "tue"), monday) is None
