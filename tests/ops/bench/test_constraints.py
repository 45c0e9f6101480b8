"""The constraints benchmark counts what it is made for: what is refused, what is let through, what is claimed."""

import json
from pathlib import Path
from typing import Any

from ops.bench.constraints import ConstraintsBench, read_schema, run_constraints_bench
from tests.demo_model import demo_model

OPEN = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
UNIQUE = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}


def line(schema: Any, *tests: tuple[bool, Any]) -> str:
    return json.dumps({"id": "x", "schema": schema, "tests": [{"valid": valid, "data": data} for valid, data in tests]})


def test_figures_are_counts_of_documents_and_schemas(tmp_path: Path) -> None:
    demo_model()
    path = tmp_path / "schemas.jsonl"
    lines = [
        line(OPEN, (True, {"b": 1, "a": 2}), (True, {"c": 1}), (False, {"a": "x"})),
        line(UNIQUE, (True, [1, 2]), (False, [1, 1])),
        line({"type": "string", "minLength": 3, "maxLength": 2}, (False, "abc")),
        line({"type": "integer", "not": {"multipleOf": 2}}, (True, 3), (False, 4)),
    ]
    path.write_text("\n".join(lines) + "\n")
    figures, printed = run_constraints_bench(ConstraintsBench(path, "smollm2"))
    assert figures["wrong_ok"] == figures["wrong_enforced"] == figures["disputed_documents"] == 0
    assert (figures["valid_documents"], figures["invalid_documents"]) == (4, 4)
    assert (figures["valid_refused_rate"], figures["valid_refused_as_written_rate"]) == (0.0, 0.25)
    assert (figures["schemas"], figures["schemas_refused_rate"], figures["fully_enforced_rate"]) == (4, 0.25, 0.25)
    assert figures["systems"]["nightmill"]["invalid_accepted"] == 2  # [1, 1] and 4: the final check is for them
    assert set(figures["systems"]) == {"nightmill", "xgrammar", "llguidance"}
    assert printed[0].split() == ["wrong_ok", "0"]


def test_a_document_that_the_oracle_calls_invalid_is_invalid_whatever_the_file_says() -> None:
    schema = read_schema(line({"type": "integer"}, (True, "a"), (False, 1), (True, 2)))
    assert [case.is_valid for case in schema.cases] == [False, False, True]
    assert schema.num_disputed == 2
