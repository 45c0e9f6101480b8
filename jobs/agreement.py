"""How often labels equal the known ones of ``--gold``. Reads inputs and parts; knows no output files."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jobs.job import Job
from jobs.labels import read_labels

MAX_CLASSES = 1000  # distinct gold values; with more, a constant answer is nobody's rival


@dataclass(frozen=True)
class Agreement:
    """``num_equal`` of ``num_compared`` rows: those that have a label and a gold value.

    ``commonest`` is the gold value that a constant answer would best be, right in ``num_commonest`` of them; None
    where gold values are no few classes.
    """

    num_equal: int
    num_compared: int
    commonest: str | None = None
    num_commonest: int = 0

    @property
    def share(self) -> float | None:
        """Between 0 and 1; None if nothing could be compared."""
        return self.num_equal / self.num_compared if self.num_compared else None


def measure_agreement(job: Job) -> Agreement | None:
    """Compare all labels with the gold column; None if the job has none. Raises JobError if an input changed."""
    gold_column = job.spec.gold_column
    if gold_column is None:
        return None
    num_equal = num_compared = 0
    classes: Counter[str] = Counter()
    for row in read_labels(job, [gold_column]):
        gold = row.inputs[gold_column]
        if row.label is not None and gold is not None:
            num_compared += 1
            num_equal += agrees(row.label, gold, gold_column)
            if len(classes) <= MAX_CLASSES:
                classes[as_text(gold)] += 1
    if not 1 < len(classes) <= min(MAX_CLASSES, num_compared // 2):
        return Agreement(num_equal, num_compared)
    return Agreement(num_equal, num_compared, *classes.most_common(1)[0])


def agrees(label: Any, gold: Any, gold_column: str) -> bool:
    """Whether a label says what the gold value says, as ``align`` compares them."""
    label, gold = align(label, gold, gold_column)
    return bool(label == gold)


def align(label: Any, gold: Any, gold_column: str) -> tuple[Any, Any]:
    """Return what is to be compared of a label and a gold value.

    Several completions vote. An object is compared as a whole with an object (or its JSON text); with anything
    else, by its field of the gold column's name, or by its only field. Scalars are compared as text.
    """
    if isinstance(label, list) and not isinstance(gold, list):
        label = _majority(label)
    if isinstance(label, dict) and not isinstance(gold, dict):
        as_object = _parse_object(gold)
        if as_object is not None:
            gold = as_object
        elif gold_column in label or len(label) == 1:
            label = label.get(gold_column, next(iter(label.values())))
    if isinstance(label, dict | list) or isinstance(gold, dict | list):
        return label, gold
    return as_text(label), as_text(gold)


def _majority(labels: list[Any]) -> Any:
    votes = Counter(json.dumps(label, sort_keys=True, default=str) for label in labels if label is not None)
    return json.loads(votes.most_common(1)[0][0]) if votes else None


def gold_at(gold: Any, path: str, gold_column: str, labels: Sequence[Any]) -> Any:
    """What a gold value says of the label at ``path``, one of ``labels`` of an output; None if it says nothing."""
    as_object = gold if isinstance(gold, dict) else _parse_object(gold)
    if as_object is None:
        return gold if path in ("", f"/{gold_column}") or len(labels) == 1 else None
    for part in path.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        try:
            as_object = as_object[int(key)] if isinstance(as_object, list) else as_object[key]
        except (KeyError, IndexError, ValueError, TypeError):
            return None
    return as_object


def _parse_object(gold: Any) -> dict[str, Any] | None:
    if not isinstance(gold, str) or not gold.lstrip().startswith("{"):
        return None
    try:
        parsed = json.loads(gold)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def as_text(value: Any) -> str:
    """A scalar as labels have it: text as it is, the rest as JSON."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
