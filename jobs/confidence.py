"""How sure a label is: its confidence, the columns that hold it, and the temperatures that calibrate it.

Probabilities come with the engine's completions; ``engine.labels`` says what they are of. Knows no files.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from schemas.choices import MAX_LABELS
from schemas.records import JobSpec, Label, Sampling

RANKED_TYPE = pa.list_(pa.struct({"label": pa.string(), "probability": pa.float64()}))
LABELS_TYPE = pa.list_(
    pa.struct(
        {
            "path": pa.string(),
            "label": pa.string(),
            "probability": pa.float64(),
            "margin": pa.float64(),
            "entropy": pa.float64(),
            "ranked": RANKED_TYPE,
        }
    )
)


def labels_value(labels: Sequence[Label]) -> list[tuple[Any, ...]]:
    """A row's labels as ``LABELS_TYPE`` has them."""
    return [
        (label.path, label.text, label.probability, label.margin, label.entropy, list(label.ranked)) for label in labels
    ]


def confidence(labels: Sequence[Label]) -> float | None:
    """The probability of all labels of an output together; None if it has none."""
    return math.prod(label.probability for label in labels) if labels else None


def engine_sampling(spec: JobSpec) -> Sampling:
    """What the engine is asked for: to calibrate a label, it must rank the whole set."""
    return msgspec.structs.replace(spec.sampling, top_labels=MAX_LABELS) if spec.calibration else spec.sampling


def calibrate(labels: Sequence[Label], spec: JobSpec) -> tuple[Label, ...]:
    """Labels with the probabilities that the job's temperatures give them, and as many ranked as the job asks for."""
    if not spec.calibration:
        return tuple(labels)
    return tuple(_calibrate(label, spec.calibration, spec.sampling.top_labels) for label in labels)


def _calibrate(label: Label, temperatures: Mapping[str, float], num_ranked: int) -> Label:
    temperature = temperatures.get(general_path(label.path), 1.0)
    names = [name for name, _ in label.ranked]
    probabilities = scale([probability for _, probability in label.ranked], temperature)
    if not names:
        return label
    return Label(
        path=label.path,
        text=label.text,
        probability=probabilities[names.index(label.text)],
        margin=probabilities[0] - probabilities[1],
        entropy=-sum(p * math.log(p) for p in probabilities if p > 0),
        ranked=tuple(zip(names, probabilities, strict=True))[:num_ranked],
    )


def scale(probabilities: Sequence[float], temperature: float) -> list[float]:
    """A distribution at another temperature: each p to the power of 1 / temperature, renormalised."""
    powers = [p ** (1 / temperature) for p in probabilities]
    total = sum(powers)
    return [power / total for power in powers]


def general_path(path: str) -> str:
    """A label's path with ``*`` for the index of an item: items of one array share a temperature."""
    return re.sub(r"/\d+(?=/|$)", "/*", path)
