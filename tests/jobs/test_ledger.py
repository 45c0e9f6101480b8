import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobs.arrow_types import results_table
from jobs.job import Job
from jobs.ledger import LEDGER, NUM_SMALL, ROUTING_FIELDS, Ledger, LedgerWriter, compact, keep_answers, scope_of
from jobs.store import Store, open_store
from schemas.records import ChatEncoding, JobSpec, Label, RetryPolicy, RowResult, RowStatus, Sampling, short_hash
from tests.tiny_jobs import MODEL, YES_NO, json_schema, make_job


def key_of(text: str) -> str:
    return short_hash(text, digits=32)


def labelled(job: Job, labels: dict[int, str], **fields: Any) -> list[RowResult]:
    """Results of the job's only chunk: rows of these numbers have labels, and their texts' keys."""
    return [
        RowResult(
            row_index=row,
            status=RowStatus.OK if row in labels else RowStatus.FAILED,
            value=labels.get(row),
            raw=labels.get(row),
            content_key=key_of(f"row {row}"),
            labels=(Label(path="", text="yes", probability=0.5),),
            **fields,
        )
        for row in range(10)
    ]


def keep(job: Job, rows: list[RowResult]) -> Job:
    """Commit the only chunk and put it into the ledger."""
    assert job.commit_part(0, rows)
    keep_answers(job)
    return job


def make(root: Path, **fields: Any) -> Job:
    return make_job(root, chunk_rows=10, **{"constraint": YES_NO, **fields})


def segments(job: Job) -> list[str]:
    return [name for name in scope_store(job).list() if name.endswith(".parquet")]


def scope_store(job: Job) -> Store:
    return job.root.within(LEDGER).within(scope_of(job.spec))


def test_good_labels_are_found_by_their_keys_and_failures_are_not(tmp_path: Path) -> None:
    job = keep(make(tmp_path), labelled(make(tmp_path), {2: "yes", 5: "no"}))
    found = Ledger(job.root, job.spec).find([key_of(f"row {row}") for row in (9, 5, 2, 77)])
    assert found.positions.tolist() == [1, 2]
    assert found.answers["label"].to_pylist() == ["no", "yes"]
    meta = found.answers["meta"].to_pylist()[0]
    assert (meta["copied_from"], found.answers["confidence"].to_pylist()) == (job.job_id, [0.5, 0.5])


def test_what_a_job_copied_is_not_kept_a_second_time(tmp_path: Path) -> None:
    job = make(tmp_path)
    keep(job, labelled(job, {2: "yes"}, copied_from="earlier-0123456789ab"))
    assert segments(job) == []


def test_the_newest_answer_counts(tmp_path: Path) -> None:
    jobs = [make(tmp_path, name=f"night-{number}") for number in range(2)]
    for job, label in reversed(list(zip(jobs, ("no", "yes"), strict=True))):
        keep(job, labelled(job, {0: label}))
    for merge in (lambda: None, lambda: compact(scope_store(jobs[0]))):
        merge()
        assert Ledger(jobs[0].root, jobs[0].spec).find([key_of("row 0")]).answers["label"].to_pylist() == ["yes"]


OTHER_VALUES = {
    "constraint": json_schema({"enum": ["yes", "no"]}),
    "model": msgspec.structs.replace(MODEL, digest="f" * 16),
    "sampling": Sampling(max_tokens=7),
    "retry": RetryPolicy(max_attempts=1),
    "seed": 7,
    "num_completions": 2,
    "chat": False,
    "chat_encoding": ChatEncoding.DEEPSEEK_V4,
    "calibration": {"": 2.0},
}


@pytest.mark.parametrize("field", [name for name in JobSpec.__struct_fields__ if name not in ROUTING_FIELDS])
def test_whatever_changes_an_answer_is_another_scope(tmp_path: Path, field: str) -> None:
    spec = make(tmp_path).spec
    assert scope_of(msgspec.structs.replace(spec, **{field: OTHER_VALUES[field]})) != scope_of(spec)


def test_the_model_s_name_and_what_selects_rows_are_not(tmp_path: Path) -> None:
    spec = make(tmp_path).spec
    others = {"name": "x", "inputs": (), "where": "1", "limit": 3, "refresh": True, "output_column": "kind"}
    renamed = msgspec.structs.replace(spec.model, name="elsewhere/tiny", revision="main")
    assert scope_of(msgspec.structs.replace(spec, model=renamed, **others)) == scope_of(spec)


def test_a_damaged_or_newer_segment_costs_time_and_no_row(tmp_path: Path) -> None:
    job = keep(make(tmp_path), labelled(make(tmp_path), {2: "yes"}))
    (name,) = segments(job)
    path = Path(scope_store(job).locate(name))
    path.write_bytes(path.read_bytes()[:-9])
    assert len(Ledger(job.root, job.spec).find([key_of("row 2")]).positions) == 0


def test_two_finishers_write_one_segment(tmp_path: Path) -> None:
    job = keep(make(tmp_path), labelled(make(tmp_path), {2: "yes"}))
    keep_answers(job)
    assert len(segments(job)) == 1


def test_many_small_segments_become_one_and_a_reader_of_the_old_ones_goes_on(tmp_path: Path) -> None:
    jobs = [make(tmp_path, name=f"night-{number}") for number in range(NUM_SMALL)]
    for job in jobs[:-1]:
        keep(job, labelled(job, {jobs.index(job): "yes"}))
    reader = Ledger(jobs[0].root, jobs[0].spec)
    keep(jobs[-1], labelled(jobs[-1], {9: "no"}))
    assert [("-merged-" in name) for name in segments(jobs[0])] == [True]
    found = reader.find([key_of(f"row {row}") for row in range(10)])
    assert found.positions.tolist() == [*range(NUM_SMALL - 1), 9]


def test_a_merge_that_was_interrupted_before_its_sources_went_is_harmless(tmp_path: Path) -> None:
    jobs = [make(tmp_path, name=f"night-{number}") for number in range(NUM_SMALL)]
    kept = {}
    for job in jobs:
        kept |= {name: scope_store(job).read(name) for name in segments(job)}
        keep(job, labelled(job, {0: "no" if job is not jobs[-1] else "yes"}))
    for name, data in kept.items():
        scope_store(jobs[0]).create(name, data)
    compact(scope_store(jobs[0]))
    assert Ledger(jobs[0].root, jobs[0].spec).find([key_of("row 0")]).answers["label"].to_pylist() == ["yes"]


SEEDS = itertools.count()


def answers(job: Job, pairs: Iterable[tuple[int, str]]) -> pa.Table:
    """A part that answers keys, without a job that ran."""
    rows = [
        RowResult(row_index=index, status=RowStatus.OK, value=label, raw=label, content_key=key_of(str(key)))
        for index, (key, label) in enumerate(pairs)
    ]
    return results_table(job.spec, 0, rows, "0")


def look_up(ledger: Ledger, keys: Sequence[int]) -> dict[int, str]:
    found = ledger.find([key_of(str(key)) for key in keys])
    return dict(zip((keys[index] for index in found.positions), found.answers["label"].to_pylist(), strict=True))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.integers(0, 30), st.sampled_from(["yes", "no"]), max_size=9), max_size=10))
def test_a_ledger_is_a_dictionary_that_knows_the_last_answer(tmp_path: Path, nights: list[dict[int, str]]) -> None:
    job = make(tmp_path, seed=next(SEEDS))  # a scope for each example
    expected: dict[int, str] = {}
    for number, night in enumerate(nights):
        job.created = f"2026-01-{number + 1:02}"
        writer = LedgerWriter(job)
        writer.add(number, answers(job, night.items()))
        writer.close()
        expected |= night
    assert look_up(Ledger(job.root, job.spec), range(40)) == expected


@pytest.mark.parametrize("cache_bytes", [0, 2**30])
def test_many_rows_are_found_whatever_fits_into_memory(tmp_path: Path, cache_bytes: int) -> None:
    job = make(tmp_path)
    writer = LedgerWriter(job)
    for number in range(3):
        writer.add(number, answers(job, ((key, "yes") for key in range(number * 7000, number * 7000 + 10_000))))
        writer.add(number, answers(job, [(10**6 + number, "no")]))
    writer.close()
    ledger = Ledger(job.root, job.spec, cache_bytes)
    keys = [10**6 + 1, *range(0, 40_000, 7), 10**6]
    found = look_up(ledger, keys)
    assert found == {key: "no" if key >= 10**6 else "yes" for key in keys if key >= 10**6 or key < 24_000}


def test_a_ledger_lies_in_a_bucket_as_well(tmp_path: Path) -> None:
    job = make(tmp_path, store=open_store("memory://ledger/jobs"))
    keep(job, labelled(job, {2: "yes"}))
    assert Ledger(job.root, job.spec).find([key_of("row 2")]).answers["label"].to_pylist() == ["yes"]
