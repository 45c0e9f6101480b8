"""What is noted of a row beside its label: how it went, what it cost, what computed it. Knows no files."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from jobs.confidence import LABELS_TYPE, labels_value
from schemas.records import Attempt, JobSpec, RowResult

ATTEMPT_TYPE = pa.struct(
    {
        "status": pa.string(),
        "finish_reason": pa.string(),
        "seed": pa.int64(),
        "max_tokens": pa.int32(),
        "temperature": pa.float64(),
        "output_tokens": pa.int32(),
    }
)
META_TYPE = pa.struct(
    {
        "finish_reason": pa.string(),
        "attempts": pa.int32(),
        "prompt_tokens": pa.int32(),
        "cached_tokens": pa.int32(),
        "output_tokens": pa.int32(),
        "reasoning_tokens": pa.int32(),
        "seconds": pa.float64(),
        "first_token_seconds": pa.float64(),
        "labels": LABELS_TYPE,
        "model_digest": pa.string(),
        "constraint_hash": pa.string(),
        "chunk": pa.int32(),
        "version": pa.string(),
        "attempt_log": pa.list_(ATTEMPT_TYPE),
        "copied_from": pa.string(),
    }
)


def meta_array(spec: JobSpec, chunk_index: int, rows: Sequence[RowResult], version: str) -> pa.StructArray:
    """Lay out what is noted of results of one chunk."""
    constraint_hash = spec.constraint.key if spec.constraint else None
    columns = {
        "finish_reason": [row.finish_reason for row in rows],
        "attempts": [len(row.attempts) for row in rows],
        "prompt_tokens": [row.num_prompt_tokens for row in rows],
        "cached_tokens": [row.num_cached_tokens for row in rows],
        "output_tokens": [row.num_output_tokens for row in rows],
        "reasoning_tokens": [row.num_reasoning_tokens for row in rows],
        "seconds": [row.seconds for row in rows],
        "first_token_seconds": [row.first_token_s for row in rows],
        "labels": [labels_value(row.labels) for row in rows],
        "model_digest": [spec.model.digest] * len(rows),
        "constraint_hash": [constraint_hash] * len(rows),
        "chunk": [chunk_index] * len(rows),
        "version": [version] * len(rows),
        "attempt_log": [[_attempt_values(attempt) for attempt in row.attempts] for row in rows],
        "copied_from": [row.copied_from for row in rows],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in META_TYPE]
    return pa.StructArray.from_arrays(arrays, fields=list(META_TYPE))


def _attempt_values(attempt: Attempt) -> tuple[Any, ...]:
    """In the order of ATTEMPT_TYPE."""
    return (
        attempt.status,
        attempt.finish_reason,
        attempt.seed,
        attempt.max_tokens,
        attempt.temperature,
        attempt.num_output_tokens,
    )
