"""The part of the S3 API that the tier uses, in memory, with a dial for faults of a server or a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

Fault = Callable[["S3Request"], bool]
"""Called with each request; returns whether it has answered it."""


class FaultyS3:
    """Objects by their path, and what goes wrong."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.fault: Fault | None = None
        self.released = threading.Event()
        """Ends all requests that hang."""
        self.requests: list[str] = []
        self.num_bytes_sent = 0
        self.page_size = 1000
        self.port = 0

    def page(self, prefix: str, token: str) -> str:
        """Return a page of a listing, in XML."""
        names = sorted(name for name in self.objects if name.startswith(prefix) and name > token)
        shown = names[: self.page_size]
        return listing_page(
            [(name, len(self.objects[name])) for name in shown], shown[-1] if names[len(shown) :] else ""
        )


def listing_page(objects: list[tuple[str, int]], next_token: str) -> str:
    items = "".join(
        f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f'<ETag>"0"</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass></Contents>'
        for name, size in objects
    )
    more = f"<NextContinuationToken>{escape(next_token)}</NextContinuationToken>" if next_token else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>kv</Name><IsTruncated>{'true' if next_token else 'false'}</IsTruncated>{more}{items}</ListBucketResult>"
    )


class S3Request(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    s3: FaultyS3

    def do_GET(self) -> None:
        if self._is_faulty():
            return
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if "list-type" in query:
            page = self.s3.page(query.get("prefix", [""])[0], query.get("continuation-token", [""])[0])
            self.answer(200, page.encode())
        elif (content := self.s3.objects.get(self.name)) is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self.answer(200, content)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        if not self._is_faulty():
            self.s3.objects[self.name] = content
            self.answer(200, b"")

    @property
    def name(self) -> str:
        """The object's name: the path without the bucket."""
        return unquote(urlsplit(self.path).path).split("/", 2)[2]

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.begin(status, len(body), **headers)
        self.send(body)

    def begin(self, status: int, num_bytes: int | None, **headers: str) -> None:
        """Send the head of an answer, with a length unless that is None."""
        self.send_response(status)
        if num_bytes is not None:
            self.send_header("content-length", str(num_bytes))
        self.send_header("etag", '"0"')
        self.send_header("last-modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send(self, data: bytes) -> None:
        with suppress(OSError):  # the client has had enough
            self.wfile.write(data)
            self.s3.num_bytes_sent += len(data)
            return
        self.close_connection = True

    def hang(self) -> None:
        """Wait until the test is over."""
        self.s3.released.wait(60)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _is_faulty(self) -> bool:
        self.s3.requests.append(f"{self.command} {self.path}")
        return self.s3.fault is not None and self.s3.fault(self)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that leave in the middle."""


@contextmanager
def running_faulty_s3() -> Iterator[FaultyS3]:
    s3 = FaultyS3()
    server = _Server(("127.0.0.1", 0), type("Request", (S3Request,), {"s3": s3}))
    s3.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield s3
    finally:
        s3.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
