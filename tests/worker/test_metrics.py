"""What Prometheus and a trace receiver see of a real worker, and that numbers add up."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import msgspec
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from engine.frames import Heartbeat
from engine.stats import EngineStats
from schemas.records import RowStatus
from tests.worker.lab import Lab, until
from worker.metrics import ENGINE_COUNTERS, ENGINE_GAUGES, OUTCOMES, Metrics

Samples = dict[tuple[str, str], float]


def read_samples(text: str) -> Samples:
    """Values by name and by the value of the only label."""
    return {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_every_number_is_there_from_the_start() -> None:
    samples = read_samples(generate_latest(Metrics().registry).decode())
    assert {label for name, label in samples if name == "nightmill_rows_total"} == set(RowStatus)
    assert {label for name, label in samples if name == "nightmill_chunks_total"} == set(OUTCOMES)
    assert samples["nightmill_engine_up", ""] == 0
    assert set(samples.values()) <= {0.0} | {value for (name, _), value in samples.items() if "created" in name}


def test_engine_numbers_are_fields_of_the_heartbeat_and_the_heartbeat_s_are_the_engine_s() -> None:
    fields = {field for field, _ in (*ENGINE_COUNTERS.values(), *ENGINE_GAUGES.values())}
    assert fields <= set(Heartbeat.__struct_fields__)
    assert set(Heartbeat.__struct_fields__) - {"phase"} == set(EngineStats.__dataclass_fields__)


def test_parts_and_the_queue_are_counted() -> None:
    metrics = Metrics()
    metrics.count_part({RowStatus.OK: 3, RowStatus.INVALID: 1}, 2.5)
    metrics.count_rows({RowStatus.FAILED: 2})
    metrics.count_chunk("parked")
    metrics.observe_queue(7, 30.0)
    samples = read_samples(generate_latest(metrics.registry).decode())
    rows = {label: value for (name, label), value in samples.items() if name == "nightmill_rows_total" and value}
    assert rows == {"ok": 3, "invalid": 1, "failed": 2}
    assert samples["nightmill_chunks_total", "done"] == samples["nightmill_chunks_total", "parked"] == 1
    assert samples["nightmill_chunk_seconds_sum", ""] == 2.5
    assert (samples["nightmill_queue_depth", ""], samples["nightmill_queue_age_seconds", ""]) == (7, 30)
    assert samples["nightmill_broker_up", ""] == 1
    metrics.miss_broker()
    assert read_samples(generate_latest(metrics.registry).decode())["nightmill_broker_up", ""] == 0


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """A trace receiver on loopback, and what it got."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()
    server.server_close()


def test_a_worker_tells_its_numbers_its_health_and_its_traces(
    make_lab: Callable[..., Lab], receiver: tuple[str, list[ExportTraceServiceRequest]], tmp_path: Path
) -> None:
    port = free_port()
    lab = make_lab(metrics_port=port)
    endpoint, received = receiver

    def get(path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()

    waiting = lab.start_job(3)
    (tmp_path / "never-loads").touch()
    loading = lab.worker("w0", is_ready=False)
    until(lambda: "lab" in loading.log and _listens(port), "the worker to listen")
    assert (get("/healthz")[0], get("/readyz")[0], get("/nonsense")[0]) == (200, 503, 404)
    assert json.loads(get("/readyz")[1])["problem"] == "the engine is not loaded"
    until(lambda: read_samples(get("/metrics")[1])["nightmill_queue_depth", ""] == 3, "the queue to be measured")
    assert read_samples(get("/metrics")[1])["nightmill_queue_age_seconds", ""] > 0
    loading.kill()
    (tmp_path / "never-loads").unlink()
    worker = lab.worker(OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
    lab.wait_done(waiting)
    until(lambda: read_samples(get("/metrics")[1])["nightmill_engine_steps_total", ""] > 0, "a heartbeat after work")
    samples = read_samples(get("/metrics")[1])
    assert samples["nightmill_rows_total", "ok"] == samples["nightmill_chunks_total", "done"] == 3
    assert samples["nightmill_engine_up", ""] == samples["nightmill_broker_up", ""] == 1
    assert get("/readyz")[0] == 200
    worker.signal(15)
    assert worker.wait() == 0
    spans = [
        span for request in received for resource in request.resource_spans for scope in resource.scope_spans
        for span in scope.spans
    ]  # fmt: skip
    assert [span.name for span in spans] == ["chunk"] * 3
    steps = ["received", "leased", "submitted", "validated", "committed", "finished"]
    assert [[event.name for event in span.events] for span in spans] == [steps] * 3
    assert {attribute.key for span in spans for attribute in span.attributes} == {"job", "chunk"}


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_port_that_is_taken_ends_the_worker_with_its_reason(make_lab: Callable[..., Lab]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = make_lab(metrics_port=taken.getsockname()[1]).worker(is_ready=False)
        assert worker.wait() == 2
    assert "cannot be had" in worker.log


def test_messages_of_before_have_no_age(lab: Lab) -> None:
    job = lab.start_job(2)
    assert lab.queue.oldest_wait_s(job.spec.model.queue) >= 0
    message = msgspec.json.decode(lab.redis.lindex(lab.queue_key(), 0) or b"{}")
    assert message.get("headers", {}).get("sent_s", 0) > 0
    lab.redis.delete(lab.queue_key())
    assert lab.queue.oldest_wait_s(job.spec.model.queue) == 0
