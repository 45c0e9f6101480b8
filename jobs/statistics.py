"""The numbers of a job's report, from one pass over its parts and, for gold and examples, its inputs.

Exact: what is counted is counted, quantiles are of all rows. Knows no HTML and no charts.
"""

import heapq
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from jobs.agreement import align
from jobs.arrow_types import output_names
from jobs.job import Job
from jobs.labels import LABELLED, label_fields, label_text, read_parts
from jobs.prompts import PromptBuilder
from jobs.source import ChunkReader
from schemas.errors import JobError
from schemas.records import Chunk, RowStatus

MAX_CLASSES = 1000  # distinct values that are counted one by one; what has more is free text
NUM_LEAST_CERTAIN = 20
NUM_FAILURE_KINDS = 20
NUM_EXAMPLES = 3  # of each kind of failure
OTHER = "(other)"
NUMBERS = re.compile(r"\d+")
ASKED_FIELDS = ("prompt_tokens", "cached_tokens", "output_tokens", "attempts", "seconds", "first_token_seconds")


class Place(NamedTuple):
    """Where a row is, ordered as the job reads them."""

    chunk_index: int
    row_index: int


@dataclass
class Example:
    """A row that the report shows. ``inputs`` are what its prompt reads; none if the input is gone."""

    place: Place
    status: RowStatus
    text: str  # the label, or what the model wrote
    error: str | None = None
    confidence: float | None = None
    inputs: dict[str, Any] = field(default_factory=dict)


@dataclass
class FailureKind:
    """Rows that failed for the same reason, numbers in it apart."""

    status: RowStatus
    reason: str
    num_rows: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class Gold:
    """Labels beside known ones: pairs (gold, label) as text, of labelled rows with a gold value."""

    pairs: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_unlabelled: int = 0  # rows with a gold value and no label
    num_equal: int = 0
    confidences: list[float] = field(default_factory=list)  # where known, with ``outcomes`` beside them
    outcomes: list[bool] = field(default_factory=list)

    @property
    def num_compared(self) -> int:
        """Labelled rows with a gold value."""
        return self.pairs.total()


@dataclass
class Statistics:
    """What ``collect`` found; grows while it runs."""

    num_rows: int = 0
    num_copied: int = 0
    statuses: Counter[RowStatus] = field(default_factory=Counter)
    labels: dict[str, Counter[str]] = field(default_factory=dict)  # by field of the label
    failures: dict[tuple[RowStatus, str], FailureKind] = field(default_factory=dict)
    least_certain: list[Example] = field(default_factory=list)
    confidences: np.ndarray = field(default_factory=lambda: np.empty(0))
    asked: dict[str, np.ndarray] = field(default_factory=dict)  # ASKED_FIELDS of the rows that were asked
    gold: Gold | None = None
    gold_problem: str | None = None

    def num_asked(self) -> int:
        """Rows that the model was asked about in this job."""
        return len(self.asked["attempts"])


def collect(job: Job) -> Statistics:
    """Count everything in the committed parts. Raises JobError if one is damaged.

    Inputs that are gone cost gold and the text of examples, nothing else.
    """
    try:
        return _Collector(job, job.spec.gold_column).run()
    except JobError as error:
        if job.spec.gold_column is None:
            raise
        found = _Collector(job, None).run()
        found.gold_problem = str(error)
        return found


def count_labels(job: Job) -> dict[str, Counter[str]]:
    """Only the labels of a job, by field: last night's beside this one's."""
    labels: dict[str, Counter[str]] = {}
    names = output_names(job.spec.output_column)
    for _, part, _ in read_parts(job):
        _count_labels(labels, part[names.status].to_pylist(), part[names.label].to_pylist())
    return labels


class _Collector:
    """One pass; the statistics are its result."""

    def __init__(self, job: Job, gold_column: str | None) -> None:
        self._job = job
        self._gold_column = gold_column
        self._names = output_names(job.spec.output_column)
        self._found = Statistics(gold=None if gold_column is None else Gold())
        self._confidences: list[np.ndarray] = []
        self._asked: dict[str, list[np.ndarray]] = {name: [] for name in ASKED_FIELDS}

    def run(self) -> Statistics:
        found = self._found
        columns = [] if self._gold_column is None else [self._gold_column]
        for chunk, part, rows in read_parts(self._job, columns):
            self._add(chunk, part, rows)
        found.confidences = np.concatenate([np.empty(0), *self._confidences])
        found.asked = {name: np.concatenate([np.empty(0), *arrays]) for name, arrays in self._asked.items()}
        _fill_inputs(self._job, list(_examples(found)))
        return found

    def _add(self, chunk: Chunk, part: pa.Table, rows: list[dict[str, Any]]) -> None:
        found, names = self._found, self._names
        statuses = [RowStatus(status) for status in part[names.status].to_pylist()]
        labels, raws, errors = (part[name].to_pylist() for name in (names.label, names.raw, names.error))
        meta = part[names.meta]
        found.num_rows += len(statuses)
        found.statuses.update(statuses)
        _count_labels(found.labels, statuses, labels)
        self._add_asked(meta)
        confidences = part[names.confidence].to_pylist()
        self._confidences.append(part[names.confidence].drop_null().to_numpy())
        places = [Place(chunk.index, chunk.start_row + offset) for offset in range(len(statuses))]
        is_twin = pc.fill_null(pc.equal(pc.struct_field(meta, "copied_from"), self._job.job_id), False).to_pylist()
        self._add_least_certain(
            places, statuses, labels, [None if t else c for c, t in zip(confidences, is_twin, strict=True)]
        )
        for offset, status in enumerate(statuses):
            if status not in LABELLED and status is not RowStatus.SKIPPED:
                self._add_failure(places[offset], status, raws[offset], errors[offset])
        if found.gold is not None:
            golds = [row[self._gold_column or ""] for row in rows]
            _add_gold(found.gold, self._gold_column or "", labels, golds, confidences)

    def _add_asked(self, meta: pa.ChunkedArray) -> None:
        copied = pc.struct_field(meta, "copied_from")
        self._found.num_copied += len(copied) - copied.null_count
        is_asked = pc.and_(pc.is_null(copied), pc.greater(pc.struct_field(meta, "attempts"), 0))
        for name in ASKED_FIELDS:
            values = pc.struct_field(meta, name).filter(is_asked).cast(pa.float64())
            self._asked[name].append(values.to_numpy())  # null is NaN

    def _add_least_certain(
        self, places: list[Place], statuses: list[RowStatus], labels: list[Any], confidences: list[float | None]
    ) -> None:
        """``confidences`` are None for rows that are not to be shown: what several ask is shown once."""
        known = [
            (confidence, places[offset], offset)
            for offset, confidence in enumerate(confidences)
            if confidence is not None and statuses[offset] in LABELLED
        ]
        candidates = self._found.least_certain + [
            Example(place, statuses[offset], label_text(labels[offset]), confidence=confidence)
            for confidence, place, offset in heapq.nsmallest(NUM_LEAST_CERTAIN, known)
        ]
        self._found.least_certain = heapq.nsmallest(
            NUM_LEAST_CERTAIN, candidates, key=lambda example: (example.confidence or 0.0, example.place)
        )

    def _add_failure(self, place: Place, status: RowStatus, raw: Any, error: str | None) -> None:
        reason = NUMBERS.sub("…", error or "")
        kinds = self._found.failures
        if (status, reason) not in kinds and len(kinds) >= MAX_CLASSES:
            reason = OTHER
        kind = kinds.setdefault((status, reason), FailureKind(status, reason))
        kind.num_rows += 1
        if len(kind.examples) < NUM_EXAMPLES:
            kind.examples.append(Example(place, status, "" if raw is None else label_text(raw), error))


def _count_labels(labels: dict[str, Counter[str]], statuses: list[Any], values: list[Any]) -> None:
    for status, value in zip(statuses, values, strict=True):
        if RowStatus(status) in LABELLED:
            for name, text in label_fields(value).items():
                counter = labels.setdefault(name, Counter())
                counter[text if text in counter or len(counter) < MAX_CLASSES else OTHER] += 1


def _add_gold(
    gold: Gold, gold_column: str, labels: list[Any], golds: list[Any], confidences: list[float | None]
) -> None:
    for label, known, confidence in zip(labels, golds, confidences, strict=True):
        if known is None:
            continue
        if label is None:
            gold.num_unlabelled += 1
            continue
        aligned, expected = align(label, known, gold_column)
        is_equal = bool(aligned == expected)
        gold.num_equal += is_equal
        pair = (label_text(expected), label_text(aligned))
        gold.pairs[pair if pair in gold.pairs or len(gold.pairs) < MAX_CLASSES**2 else (OTHER, OTHER)] += 1
        if confidence is not None:
            gold.confidences.append(confidence)
            gold.outcomes.append(is_equal)


def _examples(found: Statistics) -> Iterator[Example]:
    yield from found.least_certain
    kinds = sorted(found.failures.values(), key=lambda kind: -kind.num_rows)
    for kind in kinds[:NUM_FAILURE_KINDS]:
        yield from kind.examples


def _fill_inputs(job: Job, examples: list[Example]) -> None:
    """Read the example rows; in order, so that a row group is decoded once."""
    builder = PromptBuilder(job.spec, job.input_schema)
    with closing(ChunkReader()) as reader:
        for example in sorted(examples, key=lambda example: example.place):
            alone = msgspec.structs.replace(
                job.chunks[example.place.chunk_index], start_row=example.place.row_index, num_rows=1
            )
            try:
                (example.inputs,) = job.read_rows(alone, builder.columns, reader)
            except JobError:
                return  # the input is gone or changed: the report says what it can
