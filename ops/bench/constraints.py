"""What becomes of real schemas and of documents known to be valid or invalid: ours against the plain grammar engines.

Each line of the input is {"id", "schema", "tests": [{"valid", "data"}]}. jsonschema-rs is the oracle: a validator that
nothing of ours uses. A document counts as invalid if the input or the oracle says so, as valid if both do.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs

from ops.bench.canonical import KeyOrder
from ops.bench.grammars import Nightmill, PlainGuidance, PlainXgrammar, System, walk
from ops.bench.measurement import commit, hardware, percentiles, versions
from schemas.constraints import (
    Decision,
    enforcement_plan,
    grammar_engine,
    grammar_source,
    load_constraint,
    make_validator,
)
from schemas.errors import ConstraintError
from schemas.records import Constraint, ConstraintKind

MAX_TIMED_TOKENS = 200
"""Tokens of a schema's first valid document whose masks are timed, for each system."""


@dataclass(frozen=True)
class Case:
    """A document, as it stands and as our grammar would write it."""

    is_valid: bool
    as_written: str
    canonical: str


@dataclass(frozen=True)
class Schema:
    """One line of the input, judged by everything but a grammar."""

    name: str
    schema: Any
    constraint: Constraint | None  # None: refused
    engine: str
    is_fully_enforced: bool
    cases: tuple[Case, ...]
    num_disputed: int  # documents about which the input and the oracle disagree


@dataclass
class Tally:
    """What one system did."""

    num_refused: int = 0
    num_valid_refused: int = 0
    num_as_written_refused: int = 0
    num_invalid_accepted: int = 0  # by the grammar alone
    num_wrong_ok: int = 0  # ours: by the grammar and the final validator
    wrong_enforced: list[str] = field(default_factory=list)
    compile_s: list[float] = field(default_factory=list)
    mask_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ConstraintsBench:
    """What to measure."""

    path: Path
    tokenizer: str  # a model's name or directory
    has_peers: bool = True
    compile_timeout_s: float = 20.0  # a schema that takes longer is refused


def run_constraints_bench(bench: ConstraintsBench) -> tuple[dict[str, Any], list[str]]:
    """Measure every schema of the file; returns the figures and lines to print."""
    started = time.perf_counter()
    schemas = [read_schema(line) for line in bench.path.read_text().splitlines() if line.strip()]
    encode, systems = _make_systems(bench)
    tallies = {system.name: Tally() for system in systems}
    for schema in schemas:
        for system in systems:
            _measure(system, schema, encode, tallies[system.name], bench.compile_timeout_s)
    figures = _figures(schemas, tallies) | {"seconds": round(time.perf_counter() - started, 1)}
    facts = {"commit": commit(), "hardware": hardware(), "versions": versions(), "input": bench.path.name}
    return figures | facts, list(_lines(figures))


def read_schema(line: str) -> Schema:
    """Load one line, ask the oracle about its documents and write them as our grammar would."""
    entry = json.loads(line)
    constraint: Constraint | None = None
    engine, is_full, order = "", False, None
    try:
        constraint = load_constraint(ConstraintKind.JSON_SCHEMA, json.dumps(entry["schema"], ensure_ascii=False))
        engine = grammar_engine(constraint).value
        is_full = all(row.decision is Decision.ENFORCED for row in enforcement_plan(constraint))
        order = KeyOrder(grammar_source(constraint))
    except ConstraintError:
        pass
    oracle = _make_oracle(entry["schema"])
    cases, num_disputed = [], 0
    for test in entry["tests"]:
        verdict = test["valid"] if oracle is None else oracle.is_valid(test["data"])
        num_disputed += verdict != test["valid"]
        is_valid = verdict and test["valid"]
        document = order.apply(test["data"]) if order else test["data"]
        cases.append(Case(is_valid, _as_text(test["data"]), _as_text(document)))
    return Schema(entry["id"], entry["schema"], constraint, engine, is_full, tuple(cases), num_disputed)


def _make_oracle(schema: Any) -> Any:
    """jsonschema-rs with formats asserted; None where it refuses the schema."""
    try:
        return jsonschema_rs.validator_for(schema, validate_formats=True, offline=True)
    except (ValueError, jsonschema_rs.ReferencingError):
        return None


def _as_text(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False)


def _make_systems(bench: ConstraintsBench) -> tuple[Any, list[System]]:
    from engine.text import Text
    from schemas.model_files import resolve_model

    text = Text(resolve_model(bench.tokenizer))
    arguments = (text.tokenizer, text.vocab_size, min(text.eos_token_ids))
    peers = (PlainXgrammar, PlainGuidance) if bench.has_peers else ()
    return lambda document: text.encode_after((), document), [make(*arguments) for make in (Nightmill, *peers)]


def _measure(system: System, schema: Schema, encode: Any, tally: Tally, timeout_s: float) -> None:
    started = time.perf_counter()
    try:
        compiled = system.compile(schema.schema, schema.constraint)
    except Exception:  # noqa: BLE001 - the peers' errors have no common class
        tally.num_refused += 1
        return
    seconds = time.perf_counter() - started
    tally.compile_s.append(seconds)
    is_ours = isinstance(system, Nightmill)
    if is_ours and seconds > timeout_s:
        tally.num_refused += 1
        return
    validator = make_validator(schema.constraint) if is_ours and schema.constraint else None
    is_timed = False
    for case in schema.cases:
        token_ids = encode(case.as_written)
        if case.is_valid and not is_timed:
            walk(system, compiled, token_ids[:MAX_TIMED_TOKENS], tally.mask_s)
            is_timed = True
        is_accepted = walk(system, compiled, token_ids)
        tally.num_as_written_refused += case.is_valid and not is_accepted
        if not is_accepted and is_ours and case.canonical != case.as_written:
            is_accepted = walk(system, compiled, encode(case.canonical))
        tally.num_valid_refused += case.is_valid and not is_accepted
        if is_accepted and not case.is_valid:
            tally.num_invalid_accepted += 1
            tally.num_wrong_ok += validator is not None and validator.check(case.as_written)[1] is None
            if schema.is_fully_enforced and is_ours:
                tally.wrong_enforced.append(schema.name)


def _figures(schemas: Sequence[Schema], tallies: dict[str, Tally]) -> dict[str, Any]:
    ours = tallies[Nightmill.name]
    num_valid = sum(case.is_valid for schema in schemas for case in schema.cases)
    num_invalid = sum(not case.is_valid for schema in schemas for case in schema.cases)
    return {
        "wrong_ok": ours.num_wrong_ok,
        "wrong_enforced": len(ours.wrong_enforced),
        "valid_refused_rate": _rate(ours.num_valid_refused, num_valid),
        "valid_refused_as_written_rate": _rate(ours.num_as_written_refused, num_valid),
        "schemas_refused_rate": _rate(ours.num_refused, len(schemas)),
        "fully_enforced_rate": _rate(sum(schema.is_fully_enforced for schema in schemas), len(schemas)),
        "schemas": len(schemas),
        "valid_documents": num_valid,
        "invalid_documents": num_invalid,
        "disputed_documents": sum(schema.num_disputed for schema in schemas),
        "engines": {name: sum(schema.engine == name for schema in schemas) for name in ("xgrammar", "llguidance")},
        "systems": {name: _system_figures(tally) for name, tally in tallies.items()},
    }


def _system_figures(tally: Tally) -> dict[str, Any]:
    return {
        "schemas_refused": tally.num_refused,
        "valid_refused": tally.num_valid_refused,
        "invalid_accepted": tally.num_invalid_accepted,
        "compile_ms": percentiles(tally.compile_s, 1e3),
        "mask_us": percentiles(tally.mask_s, 1e6),
    }


def _rate(part: int, whole: int) -> float:
    return round(part / whole, 5) if whole else 0.0


def _lines(figures: dict[str, Any]) -> Iterator[str]:
    for key, value in figures.items():
        if not isinstance(value, dict):
            yield f"{key:32} {value}"
    yield f"{'engines':32} " + ", ".join(f"{name} {count}" for name, count in figures["engines"].items())
    yield f"{'':12}{'schemas':>9}{'valid':>9}{'invalid':>9}{'compile ms':>22}{'mask us':>22}"
    yield f"{'':12}{'refused':>9}{'refused':>9}{'accepted':>9}{'p50':>11}{'p99':>11}{'p50':>11}{'p99':>11}"
    for name, system in figures["systems"].items():
        counts = "".join(f"{system[key]:>9}" for key in ("schemas_refused", "valid_refused", "invalid_accepted"))
        times = "".join(
            f"{system[key].get(cut, ''):>11}" for key in ("compile_ms", "mask_us") for cut in ("p50", "p99")
        )
        yield f"{name:12}{counts}{times}"
