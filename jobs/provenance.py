"""How chunks were computed: when, where, with what, and what the machine did meanwhile. Lies in each part's footer.

Also the sums over them: busy time, energy, throughput. Knows no files and no worker.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from jobs.pace import Pace
from schemas.records import Record, RowResult


class Sample(Record):
    """What a worker's engine and GPUs did at one moment; None where nobody tells. GPUs are taken together."""

    at_s: float  # since 1970
    num_running: int = 0  # sequences in the batch
    num_waiting: int = 0
    gpu_share: float | None = None  # of the time in which a kernel ran, 0 to 1
    memory_gib: float | None = None
    power_w: float | None = None
    energy_j: float | None = None  # a counter since the driver was loaded


class Provenance(Record):
    """One chunk's. Tokens are those of rows that were asked here, each once."""

    started_s: float
    finished_s: float
    worker: str  # host and process id
    device: str
    gpus: tuple[str, ...] = ()  # their names
    kernels: tuple[tuple[str, str, str], ...] = ()  # operation, backend, reason
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    settings: dict[str, Any] = msgspec.field(default_factory=dict)  # of the engine
    samples: tuple[Sample, ...] = ()
    start_s: float = 0.0  # that the worker took to be ready, loading the model
    num_asked: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0  # guessed and verified
    num_accepted_tokens: int = 0  # of these, drawn as guessed
    pace: Pace | None = None  # when the engine answered; None if nothing was asked

    @property
    def num_devices(self) -> int:
        """GPUs, or the machine where there is none."""
        return max(1, len(self.gpus))

    @property
    def hardware(self) -> str:
        """The kind of machine: rates of one kind are comparable."""
        return f"{len(self.gpus)} x {self.gpus[0]}" if self.gpus else self.device


class Throughput(Record):
    """How fast a job was: what its chunks took together, in ``busy_s`` seconds in which any of them ran."""

    hardware: str
    num_workers: int
    num_devices: int  # of all workers: GPUs, or machines without one
    start_s: float  # that a worker took to be ready
    busy_s: float
    num_asked: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def rows_per_s(self) -> float | None:
        """Rows asked per second; None if that cannot be said."""
        return self.num_asked / self.busy_s if self.busy_s and self.num_asked else None


def count_work(rows: Iterable[RowResult]) -> dict[str, int]:
    """The token and row counts of a Provenance."""
    asked = [row for row in rows if row.attempts and row.copied_from is None]
    return {
        "num_asked": len(asked),
        "num_prompt_tokens": sum(row.num_prompt_tokens for row in asked),
        "num_cached_tokens": sum(row.num_cached_tokens for row in asked),
        "num_output_tokens": sum(row.num_output_tokens for row in asked),
        "num_draft_tokens": sum(row.num_draft_tokens for row in asked),
        "num_accepted_tokens": sum(row.num_accepted_tokens for row in asked),
    }


def measure_throughput(chunks: Sequence[Provenance]) -> Throughput | None:
    """Add up a job's chunks; None if none says how it was computed. Different machines are named together."""
    if not chunks:
        return None
    return Throughput(
        hardware=" + ".join(sorted({chunk.hardware for chunk in chunks})),
        num_workers=len({chunk.worker for chunk in chunks}),
        num_devices=sum({chunk.worker: chunk.num_devices for chunk in chunks}.values()),
        start_s=max(chunk.start_s for chunk in chunks),
        busy_s=busy_seconds(chunks),
        num_asked=sum(chunk.num_asked for chunk in chunks),
        num_prompt_tokens=sum(chunk.num_prompt_tokens for chunk in chunks),
        num_cached_tokens=sum(chunk.num_cached_tokens for chunk in chunks),
        num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
        num_draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
        num_accepted_tokens=sum(chunk.num_accepted_tokens for chunk in chunks),
    )


def merge_spans(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time spans in order: chunks overlap, and a paused job does nothing in between."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_seconds(chunks: Iterable[Provenance]) -> float:
    """Seconds in which at least one of the chunks ran."""
    return sum(end - start for start, end in merge_spans((chunk.started_s, chunk.finished_s) for chunk in chunks))


def merge_samples(chunks: Iterable[Provenance]) -> dict[str, list[Sample]]:
    """The samples of each worker in order of time, each once: neighbouring chunks share some."""
    merged: dict[str, dict[float, Sample]] = {}
    for chunk in chunks:
        merged.setdefault(chunk.worker, {}).update((sample.at_s, sample) for sample in chunk.samples)
    return {worker: [samples[at_s] for at_s in sorted(samples)] for worker, samples in merged.items()}


def measure_energy(chunks: Sequence[Provenance]) -> float | None:
    """Joules of the GPUs while the job's chunks ran; None unless the GPUs count them."""
    spans = merge_spans((chunk.started_s, chunk.finished_s) for chunk in chunks)
    steps = [
        (first.at_s, second.at_s, second.energy_j - first.energy_j)
        for samples in merge_samples(chunks).values()
        for first, second in itertools.pairwise(samples)
        if first.energy_j is not None and second.energy_j is not None
    ]
    return sum(joules for start, end, joules in steps if _is_within((start + end) / 2, spans)) if steps else None


def _is_within(at_s: float, spans: Sequence[tuple[float, float]]) -> bool:
    index = bisect.bisect_right(spans, at_s, key=lambda span: span[0]) - 1
    return index >= 0 and at_s <= spans[index][1]


def device_seconds(chunks: Sequence[Provenance]) -> float:
    """Seconds for which devices were held: each worker's busy time, times its GPUs; a CPU counts as one."""
    total = 0.0
    for worker in {chunk.worker for chunk in chunks}:
        own = [chunk for chunk in chunks if chunk.worker == worker]
        total += own[0].num_devices * busy_seconds(own)
    return total
