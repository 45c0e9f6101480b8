"""The benchmark's workload is read whole or refused with what to do."""

import json
from pathlib import Path

import pytest

from ops.bench.tickets import load_tickets
from schemas.errors import InputDataError

SCHEMA = {
    "type": "object",
    "properties": {"route": {"enum": ["bug", "other"]}},
    "required": ["route"],
    "additionalProperties": False,
}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"id": index, "prompt_ids": [1, 2, index]} for index in range(3)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "schema_b.json").write_text(json.dumps(SCHEMA))
    return tmp_path


def test_the_first_rows_are_read_in_order(data: Path) -> None:
    assert load_tickets(data, "b", 2).prompts == ((1, 2, 0), (1, 2, 1))


def test_the_validator_counts_what_it_accepts(data: Path) -> None:
    assert load_tickets(data, "b", 1).num_valid(['{"route": "bug"}', '{"route": "x"}', '{"route": "bug"']) == 1


def test_an_absent_workload_names_the_option(data: Path) -> None:
    with pytest.raises(InputDataError, match=r"schema_a\.json.*--data"):
        load_tickets(data, "a", 2)


def test_too_few_rows_are_refused(data: Path) -> None:
    with pytest.raises(InputDataError, match="holds 3 rows, 4 were asked for"):
        load_tickets(data, "b", 4)
