"""Metrics, health and readiness over HTTP, for Prometheus and for whoever runs containers. Knows no engine.

``/healthz`` fails when the worker should be restarted, ``/readyz`` while it takes no work.
"""

import json
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from schemas.errors import SettingsError

Check = Callable[[], str | None]
"""Why something is not so, or None if it is."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """A scrape every few seconds is no news."""


def serve(host: str, port: int, registry: CollectorRegistry, *, healthz: Check, readyz: Check) -> WSGIServer:
    """Serve in a thread until the returned server is shut down. Raises SettingsError if the address cannot be had."""
    metrics = make_wsgi_app(registry)
    checks = {"/healthz": healthz, "/readyz": readyz}

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        check = checks.get(environ["PATH_INFO"])
        problem = check() if check else "no such path: /metrics, /healthz and /readyz are"
        status = "404 Not Found" if not check else "503 Service Unavailable" if problem else "200 OK"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps({"problem": problem}).encode() + b"\n"]

    try:
        server = make_server(host, port, answer, server_class=_Server, handler_class=_QuietHandler)
    except OSError as error:
        raise SettingsError(f"worker.metrics_port {port} on {host} cannot be had: {error}") from error
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
