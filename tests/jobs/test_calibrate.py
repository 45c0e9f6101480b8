"""Temperatures fitted to known labels, and the verb that writes them."""

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.calibrate import Sample, fit_temperature, measure
from jobs.confidence import scale
from schemas.records import Label, RowResult, RowStatus
from tests.jobs.verbs import Machine, json_lines

PATHS = ("/kind", "/is_urgent")
NAMES = {"/kind": ["a", "b", "c"], "/is_urgent": ["true", "false"]}


def draw_samples(temperature: float, number: int, seed: int = 0) -> list[Sample]:
    """Gold labels drawn from distributions whose sharpened or flattened twins the model reports."""
    generator = random.Random(seed)
    samples = []
    for _ in range(number):
        true = scale([generator.random() + 0.01 for _ in range(4)], 0.5)
        reported = scale(true, 1 / temperature)
        order = sorted(range(4), key=lambda index: -reported[index])
        gold = generator.choices(range(4), true)[0]
        samples.append(Sample([reported[index] for index in order], order.index(gold)))
    return samples


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
def test_the_temperature_that_spoiled_a_model_is_found(temperature: float) -> None:
    samples = draw_samples(temperature, 4000)
    found = fit_temperature(samples)
    assert found == pytest.approx(temperature, rel=0.1)
    before, after = measure(samples, 1.0), measure(samples, found)
    assert after.nll <= before.nll + 1e-9
    assert after.ece < 0.03
    if temperature == 3.0:
        assert before.ece > 0.1


@given(st.integers(0, 1000), st.floats(0.3, 3), st.floats(0.1, 10))
def test_no_other_temperature_tells_the_gold_labels_better(seed: int, spoiled: float, other: float) -> None:
    samples = draw_samples(spoiled, 12, seed)
    found = fit_temperature(samples)
    assert measure(samples, found).nll <= measure(samples, other).nll + 1e-6


def test_the_calibration_error_is_the_gap_between_confidence_and_accuracy() -> None:
    samples = [Sample([0.9, 0.1], 0), Sample([0.9, 0.1], 1), Sample([0.6, 0.4], 0)]
    quality = measure(samples, 1.0)
    assert quality.ece == pytest.approx((abs(1.8 - 1) + abs(0.6 - 1)) / 3)
    assert quality.nll == pytest.approx(-(math.log(0.9) + math.log(0.1) + math.log(0.6)) / 3)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    machine = Machine(tmp_path)
    yield machine
    machine.close()


def commit_labels(machine: Machine, ranked: bool = True) -> None:
    """Results as a worker would have them: sure of themselves and half of the time wrong."""
    job = machine.job()
    for chunk in job.chunks:
        rows = []
        for index in range(chunk.start_row, chunk.start_row + chunk.num_rows):
            labels = tuple(make_label(path, ranked) for path in PATHS)
            rows.append(RowResult(row_index=index, status=RowStatus.OK, value="a", raw="a", labels=labels))
        assert job.commit_part(chunk.index, rows)


def make_label(path: str, ranked: bool) -> Label:
    names = NAMES[path]
    rest = [(name, 0.1 / (len(names) - 1)) for name in names[1:]]
    return Label(path=path, text=names[0], probability=0.9, ranked=((names[0], 0.9), *rest) if ranked else ())


def write_gold(machine: Machine, gold: list[Any]) -> str:
    return machine.write("data.parquet", text=[f"t{i}" for i in range(len(gold))], gold=gold)


def test_a_calibration_is_written_and_the_next_job_takes_it(machine: Machine) -> None:
    gold = [json.dumps({"kind": "ab"[i % 2], "is_urgent": True}) for i in range(8)]
    gold += [None, '{"kind": "unheard-of"}']
    data = write_gold(machine, gold)
    assert machine.submit(data, "--no-wait", "--gold", "gold", "--top-labels", "3").exit_code == 0
    commit_labels(machine)
    job = machine.job()
    (report,) = json_lines(machine.run("calibrate", job.job_id, "--json"))
    kind, urgent = report["labels"]
    assert (kind["path"], kind["rows"], kind["gold unknown"]) == ("/kind", 8, 1)
    assert (urgent["path"], urgent["rows"], urgent["gold unknown"]) == ("/is_urgent", 8, 0)
    assert kind["temperature"] > 1 > urgent["temperature"]
    assert kind["ece before"] == pytest.approx(0.4)
    assert kind["nll after"] < kind["nll before"]

    result = machine.submit(data, "--no-wait", "--calibration", report["calibration"], "--name", "next")
    assert result.exit_code == 0, result.output
    temperatures = machine.open_job("next").spec.calibration
    assert temperatures == pytest.approx({each["path"]: each["temperature"] for each in report["labels"]}, abs=1e-3)


def test_a_plain_gold_value_is_that_of_the_field_it_is_named_after(machine: Machine) -> None:
    data = machine.write("data.parquet", text=["t"] * 4, is_urgent=[True, False, True, True])
    machine.submit(data, "--no-wait", "--top-labels", "3")
    commit_labels(machine)
    result = machine.run("calibrate", machine.job().job_id, "--gold", "is_urgent")
    assert result.exit_code == 0
    assert "/is_urgent" in result.stdout
    assert "/kind" not in result.stdout


@pytest.mark.parametrize(
    ("ranked", "gold", "arguments", "reason"),
    [
        (False, ["a"] * 4, ("--gold", "gold"), "ranked"),
        (True, [None] * 4, ("--gold", "gold"), "no row"),
        (True, ["a"] * 4, ("--gold", "missing"), "missing"),
        (True, ["a"] * 4, (), "--gold"),
    ],
)
def test_a_job_that_cannot_be_calibrated_says_why(
    machine: Machine, ranked: bool, gold: list[Any], arguments: tuple[str, ...], reason: str
) -> None:
    data = write_gold(machine, [None if value is None else json.dumps({"kind": value}) for value in gold])
    machine.submit(data, "--no-wait")
    commit_labels(machine, ranked)
    result = machine.run("calibrate", machine.job().job_id, *arguments)
    assert result.exit_code != 0
    assert reason in result.stderr


@pytest.mark.parametrize("content", ["{}", "not json", '{"job_id": "j", "gold_column": "g", "temperatures": {"": 0}}'])
def test_a_file_that_is_no_calibration_is_refused(machine: Machine, tmp_path: Path, content: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(content)
    result = machine.submit(machine.write_rows(2), "--no-wait", "--calibration", str(path))
    assert (result.exit_code, "is no calibration" in result.stderr) == (2, True)
