"""``python -m tests.e2e.gcs_server PORT``: a peer that speaks the XML interface of Google Cloud Storage, on loopback.

That interface is S3's with other headers: moto keeps the objects, and the precondition under which they are written
is put into S3's words. A header of Google's that is not known here is refused, not ignored.
"""

import sys
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

GENERATION = "HTTP_X_GOOG_IF_GENERATION_MATCH"
PREFIX = "HTTP_X_GOOG_"
SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
ANSWER = {"x-amz-version-id": "x-goog-generation"}

Start = Callable[..., Any]


class XmlInterface:
    """A WSGI application before that of moto."""

    def __init__(self, inner: Callable[[dict[str, Any], Start], Iterable[bytes]]) -> None:
        self._inner = inner

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answer one request."""
        path, mark, query = environ["RAW_URI"].partition("?")
        environ["RAW_URI"] = environ["REQUEST_URI"] = quote(unquote(path)) + mark + query  # as S3 spells names
        environ["HTTP_AUTHORIZATION"] = SIGNED  # for a token of OAuth's
        if environ.pop(GENERATION, None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        unknown = sorted(name for name in environ if name.startswith((PREFIX, "HTTP_X_AMZ_")))
        if unknown:
            start(f"{HTTPStatus.BAD_REQUEST.value} Bad Request", [("Content-Type", "text/plain")])
            return [f"unknown: {', '.join(unknown)}".encode()]

        def start_renamed(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start(status, [(ANSWER.get(name.lower(), name), value) for name, value in headers], *rest)

        return self._inner(environ, start_renamed)


if __name__ == "__main__":
    application = XmlInterface(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), application, threaded=True)
