"""Forecasts: what a job would ask is counted, not guessed; time follows from a rate, and without one is not known."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.api import Prepared, Submission, prepare
from jobs.dry_run import draw_histogram, forecast_facts
from jobs.finish import try_finish
from jobs.forecast import Rate, bound_output, choose_pieces, forecast, rate_of_history, sample_rows
from jobs.job import Job
from jobs.plan import make_chunks
from jobs.provenance import Provenance, count_work
from jobs.store import open_store
from schemas.constraints import load_constraint
from schemas.records import ConstraintKind, InputFile, Sampling, Thinking
from schemas.settings import JobsSettings
from tests.jobs.verbs import Machine
from tests.tiny_jobs import ScriptedEngine, run_chunk
from tests.tiny_models import write_tiny_tokenizer

RATE = Rate(
    "a test", "cpu", tokens_per_s=100.0, output_tokens=4.0, cached_share=0.5, spread=0.25, start_s=3.0, fixed_s=2.0
)
CHOICE = load_constraint(ConstraintKind.CHOICE, '["yes", "no", "perhaps"]')


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.integers(1, 20), st.integers(1, 80))
def test_pieces_are_as_many_rows_as_wanted_in_order_and_each_once(
    files: list[int], chunk_rows: int, num_rows: int
) -> None:
    inputs = [InputFile(uri=str(i), size_bytes=1, modified="", num_rows=n) for i, n in enumerate(files)]
    chunks = make_chunks(inputs, chunk_rows)
    pieces = choose_pieces(chunks, num_rows)
    rows = [(p.input_index, p.start_row + i) for p in pieces for i in range(p.num_rows)]
    assert len(rows) == min(num_rows, sum(files))
    assert rows == sorted(set(rows))
    assert all(row < files[index] for index, row in rows)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    write_tiny_tokenizer(machine.model)
    return machine


def prepared(machine: Machine, data: str, **fields: object) -> Prepared:
    options = {"prompt_column": "text", "model": str(machine.model), "constraint": CHOICE, "chunk_rows": 4, **fields}
    return prepare(Submission(inputs=(data,), **options), machine.settings)


def run(machine: Machine, job: Job, seconds: float = 10.0) -> None:
    """Run every chunk in so many seconds in all; a row has 7 prompt and 3 output tokens."""
    each = seconds / len(job.chunks)
    for chunk in job.chunks:
        if not job.is_committed(chunk.index):
            rows = run_chunk(job, chunk.index, ScriptedEngine("yes"))
            span = {"started_s": 1e9 + each * chunk.index, "finished_s": 1e9 + each * (chunk.index + 1)}
            how = Provenance(worker="w", device="cpu", start_s=2.0, **span, **count_work(rows))
            assert job.commit_part(chunk.index, rows, provenance=how)
    assert try_finish(job)


def create(machine: Machine, plan: Prepared) -> Job:
    store = open_store(machine.settings.jobs_root)
    return Job.create(store, plan.spec, plan.plan.chunks, input_schema=plan.plan.input_schema)


def test_rows_that_cost_nothing_are_counted_apart(machine: Machine) -> None:
    texts = ["a", "b", "a", None, "", "c", "b", "skip"]
    data = machine.write("data.parquet", text=texts)
    plan = prepared(machine, data, where="text != 'skip'")
    found = sample_rows(plan, machine.settings)
    assert (found.num_rows, found.num_repeated, found.num_known, found.num_asked) == (8, 2, 0, 3)
    assert found.statuses == Counter({"input_error": 2, "skipped": 1})
    run(machine, create(machine, plan))
    again = sample_rows(prepared(machine, data, name="again"), machine.settings)
    assert (again.num_repeated, again.num_known, again.num_asked) == (2, 3, 1), "only the row that was skipped is new"
    assert sample_rows(prepared(machine, data, refresh=True), machine.settings).num_known == 0


def test_the_shared_start_is_that_of_all_prompts(machine: Machine) -> None:
    data = machine.write("data.parquet", text=[f"{i} is a number" for i in range(9)])
    found = sample_rows(
        prepared(machine, data, prompt_column=None, prompt_template="What is {{ text }}"), machine.settings
    )
    alone = sample_rows(prepared(machine, data, system=""), machine.settings)
    assert found.prompt_tokens is not None
    assert 0 <= alone.prefix_tokens < found.prefix_tokens < min(found.prompt_tokens)


def test_time_follows_from_rows_tokens_rate_and_workers(machine: Machine) -> None:
    plan = prepared(machine, machine.write_rows(40))
    sample = sample_rows(plan, machine.settings)
    assert sample.prompt_tokens is not None
    tokens = 40 * (sum(sample.prompt_tokens) / len(sample.prompt_tokens) * 0.5 + 4.0)
    alone = forecast(plan, machine.settings, sample, num_workers=0, rate=RATE)
    assert alone.eta_s == pytest.approx(3.0 + 2.0 + tokens / 100)
    assert (alone.low_s, alone.high_s) == pytest.approx((alone.eta_s / 1.25, alone.eta_s * 1.25))
    two = forecast(plan, machine.settings, sample, num_workers=2, rate=RATE)
    assert two.eta_s == pytest.approx(2.0 + tokens / 200)
    assert two.device_hours == pytest.approx(tokens / 100 / 3600)
    facts = forecast_facts(two, JobsSettings(gpu_hour_price=1000.0))
    assert "2 workers on cpu (rate from a test)" in facts["time"]
    hours = tokens / 100 / 3600
    interval = f"likely {hours / 1.25:.3f} to {hours * 1.25:.3f}"
    assert facts["device-hours"] == f"{hours:.3f}, {interval}: {1000 * hours:.2f} USD"


def test_without_a_measurement_time_is_not_known_and_the_way_to_know_it_is_told(machine: Machine) -> None:
    result = machine.submit(machine.write_rows(6), "--dry-run")
    assert result.exit_code == 0, result.output
    assert "measure with --sample" in result.stdout
    assert "nothing was written" in result.stdout
    assert not machine.settings.state_dir.exists()
    wrong = machine.submit(machine.write_rows(6), "--sample", "4")
    assert (wrong.exit_code, "--sample goes with --dry-run" in wrong.stderr) == (2, True)


def test_earlier_jobs_of_the_same_question_are_believed_more_than_others(machine: Machine) -> None:
    plan = prepared(machine, machine.write_rows(100), name="first")
    sample, root = sample_rows(plan, machine.settings), open_store(machine.settings.jobs_root)
    assert rate_of_history(plan.spec, root, sample) is None
    run(machine, create(machine, plan))
    same = rate_of_history(plan.spec, root, sample)
    assert same is not None
    assert same.tokens_per_s == pytest.approx(100 * (7 + 3) / 10.0)
    assert (same.output_tokens, same.start_s, "asked the same" in same.source) == (3.0, 2.0, True)
    other = rate_of_history(prepared(machine, machine.write_rows(100), system="Be kind.").spec, root, sample)
    assert other is not None
    assert (other.tokens_per_s, "something else" in other.source) == (same.tokens_per_s, True)
    assert other.spread > same.spread
    stranger = prepared(machine, machine.write_rows(100), max_model_len=64)
    assert rate_of_history(stranger.spec, root, sample) is None


def test_a_model_without_tokenizer_has_no_forecast_of_time(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    plan = prepared(machine, machine.write_rows(5))
    sample = sample_rows(plan, machine.settings)
    found = forecast(plan, machine.settings, sample, num_workers=0, rate=RATE)
    assert (found.eta_s, found.num_asked) == (None, 5)
    assert "cannot read the tokenizer" in forecast_facts(found, JobsSettings())["prompt tokens"]


def test_the_longest_answer_bounds_the_output(machine: Machine) -> None:
    data = machine.write_rows(3)
    assert bound_output(prepared(machine, data).spec) == len("perhaps")
    assert bound_output(prepared(machine, data, sampling=Sampling(max_tokens=2)).spec) == 2
    assert bound_output(prepared(machine, data, constraint=None).spec) == 256
    thinking = Sampling(thinking=Thinking(max_tokens=20, end="</t>"))
    assert bound_output(prepared(machine, data, sampling=thinking).spec) == 24 + len("perhaps")
    assert bound_output(prepared(machine, data, sampling=thinking, constraint=None).spec) == 24 + 256


@given(st.lists(st.integers(0, 9000), min_size=1, max_size=50))
def test_a_histogram_counts_every_value(values: list[int]) -> None:
    lines = draw_histogram(sorted(values))
    assert sum(int(line.split()[-1]) for line in lines) == len(values)
    assert len(lines) <= 8
