"""A trace collector for tests: OTLP over HTTP, with a configurable response status; takes usage events at `/usage`."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@attrs.define(eq=False)
class Collector:
    url: str = ""
    status: int = 200
    """Status of its responses; spans are kept only if it is 200."""
    spans: list[Span] = attrs.field(factory=list)
    resources: list[dict[str, Any]] = attrs.field(factory=list)
    raw: bytes = b""
    """All bodies that were accepted."""
    num_refused: int = 0

    def by_request(self) -> dict[str, tuple[Span, dict[str, Any]]]:
        """Return each span with its attributes, by request id; assert that no request has two."""
        found: dict[str, tuple[Span, dict[str, Any]]] = {}
        for span in list(self.spans):
            attributes = plain(span.attributes)
            assert attributes["quipu.request_id"] not in found, "a request has two spans"
            found[attributes["quipu.request_id"]] = (span, attributes)
        return found


def plain(attributes: Any) -> dict[str, Any]:
    def value_of(value: AnyValue) -> Any:
        kind = value.WhichOneof("value")
        return [value_of(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    pairs: list[KeyValue] = list(attributes)
    return {pair.key: value_of(pair.value) for pair in pairs}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector on a free port, in its own thread."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path == "/usage":
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
            if collector.status == 200:
                collector.raw += body
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(plain(resource.resource.attributes))
                    for scope in resource.scope_spans:
                        collector.spans += scope.spans
            else:
                collector.num_refused += 1
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(collector.status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
