"""The committed labels of a job beside the input rows they belong to, chunk by chunk, and labels as text.

Reads parts and inputs; knows no output files, so it works on a job that still runs.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import pyarrow as pa

from jobs.arrow_types import output_names
from jobs.job import Job
from jobs.source import ChunkReader, python_rows
from schemas.records import Chunk, RowStatus

LABELLED = frozenset({RowStatus.OK, RowStatus.CLOSED})


class LabelledRow(NamedTuple):
    """One committed row: where it is, its input columns that were asked for, and its result."""

    input_index: int
    row_index: int
    inputs: dict[str, Any]
    label: Any
    status: RowStatus

    @property
    def text(self) -> str:
        """The label for people; a row without one has its status in brackets."""
        return label_text(self.label) if self.status in LABELLED else f"({self.status})"


def read_parts(job: Job, columns: Sequence[str] = ()) -> Iterator[tuple[Chunk, pa.Table, list[dict[str, Any]]]]:
    """Yield each committed chunk with its part and its rows' input ``columns``; no rows if there are no columns.

    Raises JobError if a part is damaged or an input changed since submit.
    """
    committed = job.committed()
    with closing(ChunkReader()) as reader:
        for chunk in job.chunks:
            if chunk.index not in committed:
                continue
            batches = job.read_batches(chunk, columns, reader) if columns else []
            yield chunk, job.read_part(chunk.index), [row for batch in batches for row in python_rows(batch)]


def read_labels(job: Job, columns: Sequence[str] = ()) -> Iterator[LabelledRow]:
    """Yield the committed rows in order. Raises JobError as ``read_parts`` does."""
    names = output_names(job.spec.output_column)
    for chunk, part, rows in read_parts(job, columns):
        labels, statuses = part[names.label].to_pylist(), part[names.status].to_pylist()
        for offset, (label, status) in enumerate(zip(labels, statuses, strict=True)):
            inputs = rows[offset] if rows else {}
            yield LabelledRow(chunk.input_index, chunk.start_row + offset, inputs, label, RowStatus(status))


def label_fields(label: Any) -> dict[str, str]:
    """What can be counted of a label: an object's fields one by one, anything else as a whole, under the name ""."""
    if isinstance(label, dict) and len(label) > 1:
        return {name: label_text(value) for name, value in label.items()}
    return {"": label_text(label)}


def label_text(label: Any) -> str:
    """A text label as it is, an object with one field as that field, anything else as JSON."""
    if isinstance(label, dict) and len(label) == 1:
        (label,) = label.values()
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False, default=str)
