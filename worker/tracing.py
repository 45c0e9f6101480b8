"""A trace of each chunk, where OpenTelemetry is installed and configured: a span, with an event for each step.

Configured by OpenTelemetry's own environment variables. Knows no rows and no prompts.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = structlog.get_logger(__name__)


class Tracer:
    """Traces of one process; without OpenTelemetry it does nothing."""

    def __init__(self, provider: Any = None) -> None:
        self._provider = provider
        self._tracer = provider and provider.get_tracer("nightmill")

    @contextmanager
    def chunk(self, job_id: str, index: int) -> Iterator[None]:
        """Trace a block that works on a chunk."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span("chunk", attributes={"job": job_id, "chunk": index}):
            yield

    def mark(self, step: str) -> None:
        """Note in the current trace that a step was reached."""
        if self._tracer is not None:
            from opentelemetry import trace

            trace.get_current_span().add_event(step)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()

    def marking(self, then: Callable[[str], None]) -> Callable[[str], None]:
        """Return a function that marks a step and goes on to ``then``."""

        def on_hop(hop: str) -> None:
            self.mark(hop)
            then(hop)

        return on_hop


def make_tracer() -> Tracer:
    """Build the tracer that the environment asks for; one that asks in vain is told in the log."""
    if not any(map(os.environ.get, ENDPOINTS)):
        return Tracer()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        log.warning("no_traces", reason=f"{error}: pip install 'nightmill[traces]'")
        return Tracer()
    provider = TracerProvider(resource=Resource.create({"service.name": "nightmill"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracer(provider)
