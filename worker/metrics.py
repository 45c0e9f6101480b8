"""What a worker tells Prometheus: chunks and rows that it counts itself, and its engine's counters at each scrape.

Labels are statuses, outcomes and versions: bounded, and never a job's name or a prompt. Knows no HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.client import EngineClient
from schemas.records import RowStatus

CHUNK_BUCKETS_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

ENGINE_COUNTERS = {
    "steps": ("num_steps", "Steps of the engine."),
    "step_seconds": ("step_s", "Seconds in steps: waiting for the device included."),
    "mask_seconds": ("mask_s", "Seconds of these in which grammars said what may come next."),
    "prompt_tokens": ("num_prompt_tokens", "Tokens of admitted prompts, cached ones included."),
    "cached_tokens": ("num_cached_tokens", "Prompt tokens that the prefix cache had."),
    "output_tokens": ("num_output_tokens", "Tokens generated, forced ones included."),
    "forced_tokens": ("num_forced_tokens", "Output tokens that the grammar forced, so that none was drawn."),
    "draws": (
        "num_draws",
        "Steps that gave a sequence tokens, each sequence counted: output tokens over these come at once.",
    ),
    "draft_tokens": ("num_draft_tokens", "Tokens guessed and verified."),
    "accepted_tokens": ("num_accepted_tokens", "Of these, those that were drawn as guessed."),
    "batched_tokens": ("num_batched_tokens", "Rows computed: divided by the steps, how full a batch is."),
    "preemptions": ("num_preemptions", "Sequences that lost their cache to others and began anew."),
    "finished_requests": ("num_finished", "Requests that ended, however."),
}
"""Name behind ``nightmill_engine_`` -> the heartbeat's field and what it says."""

ENGINE_POSITIONS = {
    "draft_position_tokens": ("drafts_by_position", "Tokens guessed and verified, by their position in the draft."),
    "accepted_position_tokens": ("accepted_by_position", "Those drawn as guessed, by their position in the draft."),
}
"""As above, of fields with a number for each position in a draft."""

ENGINE_GAUGES = {
    "running_sequences": ("num_running", "Sequences in the batch."),
    "waiting_sequences": ("num_waiting", "Requests that wait for a place in it."),
    "kv_blocks": ("num_kv_blocks", "Blocks of the KV cache."),
    "kv_blocks_used": ("num_kv_blocks_used", "Blocks that running sequences hold."),
}


class Metrics:
    """The numbers of one worker process; owned by its app. Thread-safe."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._client: EngineClient | None = None
        self._rows = Counter("nightmill_rows", "Rows committed, by status.", ["status"], registry=self.registry)
        self._chunks = Counter("nightmill_chunks", "What became of chunks.", ["outcome"], registry=self.registry)
        self._chunk_seconds = Histogram(
            "nightmill_chunk_seconds",
            "From a chunk's start to its part.",
            buckets=CHUNK_BUCKETS_S,
            registry=self.registry,
        )
        self._broker_up = Gauge("nightmill_broker_up", "Whether the broker answered last time.", registry=self.registry)
        self._queue_depth = Gauge("nightmill_queue_depth", "Chunks that wait in the queue.", registry=self.registry)
        self._queue_age = Gauge(
            "nightmill_queue_age_seconds", "How long the chunk waits that waits longest.", registry=self.registry
        )
        for status in RowStatus:
            self._rows.labels(status.value)
        for outcome in OUTCOMES:
            self._chunks.labels(outcome)
        self.registry.register(self)

    def attach(self, client: EngineClient) -> None:
        """Tell of this engine from now on."""
        self._client = client

    def count_chunk(self, outcome: str) -> None:
        """Count a chunk; ``outcome`` is one of ``OUTCOMES``."""
        assert outcome in OUTCOMES, outcome
        self._chunks.labels(outcome).inc()

    def count_part(self, statuses: Mapping[RowStatus, int], seconds: float) -> None:
        """Count a chunk that was done, and its rows."""
        self.count_chunk("done")
        self._chunk_seconds.observe(seconds)
        self.count_rows(statuses)

    def count_rows(self, statuses: Mapping[RowStatus, int]) -> None:
        """Count rows that were committed."""
        for status, number in statuses.items():
            self._rows.labels(status.value).inc(number)

    def observe_queue(self, depth: int, age_s: float) -> None:
        """Note the queue as it is; the broker answered."""
        self._broker_up.set(1)
        self._queue_depth.set(depth)
        self._queue_age.set(age_s)

    def miss_broker(self) -> None:
        """Note that the broker did not answer."""
        self._broker_up.set(0)

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's numbers as they are; counters begin at zero with a new engine, which Prometheus knows."""
        client = self._client
        stats = client.stats if client else None
        is_up = client is not None and client.pid is not None and stats is not None
        yield _gauge("engine_up", "Whether an engine is loaded and alive.", float(is_up))
        yield _counter("engine_restarts", "Engines started again after a death.", client.num_restarts if client else 0)
        yield _counter("engine_hangs", "Engines killed because they fell silent.", client.num_hangs if client else 0)
        for name, (field, text) in ENGINE_COUNTERS.items():
            yield _counter(f"engine_{name}", text, getattr(stats, field, 0))
        for name, (field, text) in ENGINE_POSITIONS.items():
            yield _by_position(f"engine_{name}", text, getattr(stats, field, ()))
        for name, (field, text) in ENGINE_GAUGES.items():
            yield _gauge(f"engine_{name}", text, getattr(stats, field, 0))


OUTCOMES = (
    "done",
    "parked",  # given up after several tries
    "failed",  # an attempt that broke
    "postponed",  # the store or the engine failed
    "given_back",  # the worker stops
    "dropped",  # the job is cancelled, paused or aborted
    "lease_held",  # another worker had its lease
    "overtaken",  # another worker committed it first
)


def _counter(name: str, text: str, value: Any) -> CounterMetricFamily:
    return CounterMetricFamily(f"nightmill_{name}", text, value=float(value))


def _by_position(name: str, text: str, values: Sequence[int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"nightmill_{name}", text, labels=["position"])
    for position, value in enumerate(values or (0,), start=1):  # the first is always there, for who asks for the series
        family.add_metric([str(position)], float(value))
    return family


def _gauge(name: str, text: str, value: Any) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"nightmill_{name}", text, value=float(value))
