"""The ticket workload: prompts as token ids, so that no tokenizer can differ, and the schema of the answers.

Knows no engine.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from schemas.constraints import load_constraint, make_validator
from schemas.errors import InputDataError
from schemas.records import Constraint, ConstraintKind

MAX_TOKENS = 64
DEFAULT_DATA = Path(__file__).resolve().parents[3] / "shared" / "peer-bench" / "cpu" / "data"


@dataclass(frozen=True)
class TicketWorkload:
    """``prompts[i]`` are the token ids of row i; answers are greedy and at most ``max_tokens`` long."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    constraint: Constraint
    max_tokens: int = MAX_TOKENS

    def num_valid(self, texts: list[str]) -> int:
        """Count the answers that the independent validator accepts."""
        validator = make_validator(self.constraint)
        return sum(validator.check(text)[1] is None for text in texts)


def load_tickets(data: Path, variant: Literal["a", "b"], num_rows: int) -> TicketWorkload:
    """Read the first ``num_rows`` rows of ``prompts.jsonl`` and the variant's schema.

    Raises InputDataError if the files are not there or hold fewer rows.
    """
    prompts_path, schema_path = data / "prompts.jsonl", data / f"schema_{variant}.json"
    for path in (prompts_path, schema_path):
        if not path.is_file():
            raise InputDataError(
                f"no workload at {path}: pass --data DIRECTORY with prompts.jsonl and schema_{variant}.json"
            )
    lines = prompts_path.read_text().splitlines()[:num_rows]
    if len(lines) < num_rows:
        raise InputDataError(f"{prompts_path} holds {len(lines)} rows, {num_rows} were asked for: lower --rows")
    prompts = tuple(tuple(json.loads(line)["prompt_ids"]) for line in lines)
    constraint = load_constraint(ConstraintKind.JSON_SCHEMA, schema_path.read_text())
    return TicketWorkload(variant, prompts, constraint)
