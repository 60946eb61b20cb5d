"""Every route is attacked: one that is added needs random bodies and a hostile row, or a reason why not."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.bodies import ENDPOINTS, POOLED
from bench.stalls.rows import ROWS
from bench.stored_bodies import STORED_BODIES
from quipu.web.api.operation import operations_of
from quipu.web.api.upload_forms import UPLOAD_PATHS
from quipu.web.app import QuipuApp
from tests.web.api.openapi.full_apps import full_app

NOT_DRAWN = {
    "POST /completions": "the same handler as /completion",
    "POST /score": "the same handler as /v1/score",
    "POST /rerank": "the same handler as /v1/rerank",
    "POST /v1/admin/engines": "an operator's; drawn from the OpenAPI document",
    "PATCH /v1/admin/engines/<engine_id>": "an operator's; drawn from the OpenAPI document",
    "POST /v1/admin/engines/<engine_id>/drain": "an operator's; drawn from the OpenAPI document",
    "POST /v1/admin/engines/<engine_id>/move": "an operator's; drawn from the OpenAPI document",
}
"""Routes that read a body, for which `bench/` draws none."""
_ONE_ROW = "looks one object up, whose size is bounded"
_SMALL = "answers with a small object, and reads nothing"
_OPERATORS = "an operator's"
NO_ROW = {
    "POST /completions": "the same handler as /completion",
    "POST /score": "the same handler as /v1/score",
    "POST /rerank": "the same handler as /v1/rerank",
    "POST /v2/rerank": "the same handler as /v1/rerank",
    "DELETE /v1/responses/<response_id>": _ONE_ROW,
    "POST /v1/responses/<response_id>/cancel": _ONE_ROW,
    "GET /v1/conversations/<conversation_id>": _ONE_ROW,
    "POST /v1/conversations/<conversation_id>": "reads at most 16 pairs",
    "DELETE /v1/conversations/<conversation_id>": _ONE_ROW,
    "GET /v1/conversations/<conversation_id>/items/<item_id>": _ONE_ROW,
    "DELETE /v1/conversations/<conversation_id>/items/<item_id>": _ONE_ROW,
    "GET /v1/chat/completions/<completion_id>": _ONE_ROW,
    "POST /v1/chat/completions/<completion_id>": "reads at most 16 pairs",
    "DELETE /v1/chat/completions/<completion_id>": _ONE_ROW,
    "GET /v1/chat/completions/<completion_id>/messages": "a page, as of a conversation's items",
    "GET /v1/files/<file_id>": _ONE_ROW,
    "DELETE /v1/files/<file_id>": "in a thread",
    "GET /v1/batches/<batch_id>": _ONE_ROW,
    "POST /v1/batches/<batch_id>/cancel": _ONE_ROW,
    "GET /v1/batches": "a page of 100 small objects",
    "GET /v1/messages/batches": "a page of 1,000 small objects",
    "GET /v1/messages/batches/<batch_id>": _ONE_ROW,
    "GET /v1/messages/batches/<batch_id>/results": "a file, as at /v1/files/<file_id>/content",
    "POST /v1/messages/batches/<batch_id>/cancel": _ONE_ROW,
    "DELETE /v1/messages/batches/<batch_id>": "in a thread",
    "GET /v1/models": "as many objects as the operator has named models and adapters",
    "GET /v1/models/<path:name>": _SMALL,
    "POST /ping": _SMALL,
    "GET /ping": _SMALL,
    "GET /ready": _SMALL,
    "GET /metrics": "the same size for every client; the operator bounds its labels",
    "GET /server_info": _SMALL,
    "GET /get_server_info": _SMALL,
    "GET /get_model_info": _SMALL,
    "GET /load": _SMALL,
    "GET /props": _SMALL,
    "GET /slots": "as many small objects as engines run sequences",
    "GET /version": _SMALL,
    "GET /health_generate": "one request of one token",
    "POST /reset_prefix_cache": _OPERATORS,
    "GET /v1/admin/engines": _OPERATORS,
    "POST /v1/admin/engines": _OPERATORS,
    "PATCH /v1/admin/engines/<engine_id>": _OPERATORS,
    "POST /v1/admin/engines/<engine_id>/drain": _OPERATORS,
    "POST /v1/admin/engines/<engine_id>/move": _OPERATORS,
    "DELETE /v1/admin/engines/<engine_id>": _OPERATORS,
    "GET /v1/usage/keys": _SMALL,
    "GET /": _SMALL,
    "GET /ui": "a page file, as below /ui/static",
    "GET /ui/": "a page file, as below /ui/static",
    "GET /docs": "a page file, as below /ui/static",
    "GET /ui/session": _SMALL,
    "GET /openapi.json": "made once",
}
"""Routes that no row of `bench.stalls` is sent to."""


@pytest.fixture(scope="module")
def app() -> QuipuApp:
    return full_app()


def test_every_body_is_drawn(app: QuipuApp) -> None:
    """Each route that reads a body is one that random bodies are made for."""
    reading = {
        f"{method} {rule}"
        for (method, rule), declared in operations_of(app).items()
        if declared.body is not None or (method == "POST" and rule in UPLOAD_PATHS)
    }
    drawn = rules_of(app, (f"POST {path}" for path in (*ENDPOINTS, *POOLED, *STORED_BODIES)))
    assert drawn <= reading
    assert reading - drawn == set(NOT_DRAWN)


def test_every_route_has_a_row(app: QuipuApp) -> None:
    """Each route is one that a row is sent to, with requests as hostile as it may get."""
    with answering() as port, ThreadPoolExecutor(1) as pool:  # whose thread has a stack for the deepest of them
        sent = pool.submit(requests_of_rows, port).result()
    attacked = rules_of(app, sent)
    every = {f"{method} {rule}" for method, rule in operations_of(app)}
    assert every - attacked == set(NO_ROW)


def requests_of_rows(port: int) -> set[str]:
    """Return what the rows send, such as `GET /v1/files/x?y=z`."""
    return {raw.data.partition(b" HTTP/")[0].decode() for row in ROWS for raw in row.make(port)}


def rules_of(app: QuipuApp, requests: Iterable[str]) -> set[str]:
    """Return the routes that serve such requests."""
    routes = app.url_map.bind("localhost")
    found = set()
    for method, _, path in (request.partition(" ") for request in requests):
        rule, _ = routes.match(path.partition("?")[0], method, return_rule=True)
        found.add(f"{method} {rule.rule}")
    return found


class _Anything(BaseHTTPRequestHandler):
    """Answers requests that rows send before those that are measured."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("X-Quipu-Request-Id", "req-1")
        self.end_headers()
        self.wfile.write(b'{"id":"one"}')

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[int]:
    """Run a server that answers every POST; its port is yielded."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Anything) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
