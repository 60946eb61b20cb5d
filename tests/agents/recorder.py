"""A proxy between a client and a server that keeps every exchange: what was asked, and what was streamed back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs

PATIENCE_S = 600.0
HOP_BY_HOP = {"connection", "transfer-encoding", "host", "keep-alive"}


@attrs.define
class Exchange:
    """A request and its answer."""

    method: str
    path: str
    body: bytes
    status: int
    headers: dict[str, str]
    answer: bytes = b""

    @property
    def request(self) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed

    @property
    def endpoint(self) -> str:
        return self.path.partition("?")[0]

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")


@attrs.define
class Recorder:
    """What was exchanged so far, in the order in which the answers began."""

    url: str
    exchanges: list[Exchange] = attrs.field(factory=list)

    @property
    def streams(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.is_stream]


@contextmanager
def recording(server_url: str) -> Iterator[Recorder]:
    """Forward requests to the server until the block is left."""
    kept: list[Exchange] = []

    class Forward(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = HTTPConnection(server_url.removeprefix("http://"), timeout=PATIENCE_S)
            sent = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
            connection.request(self.command, self.path, body, sent)
            with connection.getresponse() as answer:
                headers = {name.lower(): value for name, value in answer.getheaders()}
                exchange = Exchange(self.command, self.path, body, answer.status, headers)
                kept.append(exchange)
                self.send_response(answer.status)
                for name, value in headers.items():
                    if name not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                with suppress(ConnectionError):  # the client may leave
                    while part := answer.read1():
                        exchange.answer += part
                        self.wfile.write(part)
                        self.wfile.flush()
            connection.close()
            self.close_connection = True

        do_HEAD = do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Stay silent: the exchanges are kept."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Forward) as proxy:
        proxy.daemon_threads = True
        thread = threading.Thread(target=proxy.serve_forever, daemon=True)
        thread.start()
        try:
            yield Recorder(f"http://127.0.0.1:{proxy.server_port}", kept)
        finally:
            proxy.shutdown()
            thread.join()
