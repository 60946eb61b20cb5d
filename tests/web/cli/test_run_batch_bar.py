"""The bar of `quipu run-batch`: on a terminal it shows how many lines have run, elsewhere there is none."""

from __future__ import annotations

import io
from typing import Any

import httpx2
import pytest

from quipu.web.cli import run_batch_command
from quipu.web.cli.run_batch_command import RunBatchError

STATES = [("validating", 0, 0, 0), ("in_progress", 4, 1, 0), ("in_progress", 4, 2, 1), ("completed", 4, 3, 1)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> httpx2.Client:
    """A client of a server whose batch goes through these states."""
    monkeypatch.setattr(run_batch_command, "POLL_S", 0.0)
    monkeypatch.setenv("TQDM_MININTERVAL", "0")
    left = iter(STATES)

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/batches/one"
        status, total, completed, failed = next(left)
        counts = {"total": total, "completed": completed, "failed": failed}
        return httpx2.Response(200, json={"status": status, "request_counts": counts})

    return httpx2.Client(base_url="http://test", transport=httpx2.MockTransport(answer))


def shown(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, output: io.StringIO) -> str:
    """Wait for the end of the batch, and return what was written to stderr meanwhile."""
    monkeypatch.setattr("sys.stderr", output)
    with http:
        batch: Any = run_batch_command.wait_for_end(http, "one")
    assert batch["status"] == "completed"
    return output.getvalue()


def test_terminal(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar ends at all lines, those with errors included."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = shown(http, monkeypatch, Terminal())
    assert "100%" in text and "4/4" in text and "█" in text and "\x1b[3" not in text


def test_no_color(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NO_COLOR it has plain characters."""
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(http, monkeypatch, Terminal())
    assert "4/4" in text and "#" in text and text.isascii()


def test_no_terminal(http: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to a file or a pipe has no bar."""
    assert shown(http, monkeypatch, io.StringIO()) == ""


def test_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server refuses ends the wait with its message."""
    refuse = httpx2.MockTransport(lambda _: httpx2.Response(503, json={"error": {"message": "No room."}}))
    with httpx2.Client(base_url="http://test", transport=refuse) as http, pytest.raises(RunBatchError, match="No room"):
        run_batch_command.wait_for_end(http, "one")
