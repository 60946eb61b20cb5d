"""Errors of the commands that ask a server, if it requires a key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from quipu.web.cli.cli import main


class Refusing(BaseHTTPRequestHandler):
    """Refuses as a server with keys does."""

    def do_GET(self) -> None:
        status = 403 if self.headers.get("Authorization") else 401
        body = b'{"error": {"message": "No API key provided."}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def closed_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("key", "hint"), [(None, "it is not set"), ("sk-1", "not an admin key")])
def test_reconcile(
    closed_server: str,
    key: str | None,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`quipu ledger reconcile` names the variable, and says whether there is a key in it."""
    monkeypatch.delenv("QUIPU_ADMIN_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("QUIPU_ADMIN_KEY", key)
    command = ["ledger", "reconcile", "--data-dir", str(tmp_path), "--metrics-url", f"{closed_server}/metrics"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "QUIPU_ADMIN_KEY" in said and hint in said and said.count("\n") == 1


def test_explain(closed_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`quipu explain` names its flag and its variable."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["explain", "req-1", "--base-url", closed_server]) == 2
    said = capsys.readouterr().err
    assert "--api-key" in said and "OPENAI_API_KEY" in said


def test_bench_serve(closed_server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """`quipu bench serve` names its flag and its variable."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert main(["bench", "serve", "--quick", "--base-url", closed_server]) != 0
    said = capsys.readouterr().err
    assert "--api-key" in said and "OPENAI_API_KEY" in said
