"""What takes over two seconds shows how far it is on standard error: a bar on a terminal, elsewhere lines."""

from __future__ import annotations

import io
import sys
import time
from typing import Any

import httpx2
import pytest

from quipu.web.cli import command_progress as progress_module
from quipu.web.cli import run_batch_command
from quipu.web.cli.command_progress import Count, command_progress, counted, progress_line
from quipu.web.cli.run_batch_command import RunBatchError

PATIENCE_S = 60.0
STATES = [("validating", 0, 0, 0), ("in_progress", 4, 1, 0), ("in_progress", 4, 2, 1), ("completed", 4, 3, 1)]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show everything at once."""
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)
    monkeypatch.setattr(progress_module, "DRAW_S", 0.001)
    monkeypatch.setattr(progress_module, "LINES_S", (0.001, 0.001))
    monkeypatch.setenv("TERM", "xterm")


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, awaited: str, count: int = 0, **options: Any) -> str:
    """Return what was written to standard error until this text was, and after it."""
    monkeypatch.setattr(sys, "stderr", stream)
    with command_progress("lines", **options) as advance:
        advance(count)
        end = time.monotonic() + PATIENCE_S
        while awaited not in stream.getvalue():
            assert time.monotonic() < end, stream.getvalue()
            time.sleep(0.001)
    return stream.getvalue()


def test_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has number, rate and estimate, no colours, and is removed at the end."""
    text = shown(monkeypatch, Screen(), "3/4", 3, total=4, unit="lines")
    assert "75%" in text and "lines/s" in text and "<" in text and "\x1b[3" not in text and text.endswith("\r")


def test_bar_without_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait shows its time, or what has been counted."""
    assert "lines: 00:00" in shown(monkeypatch, Screen(), "00:00")
    assert "7 records" in shown(monkeypatch, Screen(), "7 records", 7, unit="records")


@pytest.mark.parametrize("stream", [io.StringIO(), Screen()], ids=["file", "dumb terminal"])
def test_lines(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> None:
    """Elsewhere there are whole lines, nothing that a terminal would draw over."""
    monkeypatch.setenv("TERM", "dumb" if stream.isatty() else "xterm")
    text = shown(monkeypatch, stream, "3 of 4", 3, total=4, unit="lines")
    assert "\r" not in text and text.startswith("quipu: lines: ") and text.endswith("\n")


def test_words() -> None:
    assert progress_line("a", 30, 120, "lines", 10) == "a: 30 of 120 lines (25%), 10 s so far, about 30 s to go"
    assert progress_line("a", 120, 120, "lines", 10) == "a: 120 of 120 lines (100%), 10 s so far"
    assert progress_line("a", 0, 0, "lines", 1) == "a: 0 lines, 1 s so far"
    assert progress_line("a", 0, None, "", 5) == "a: 5 s so far"


def test_nothing_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends within two seconds shows nothing, nor does what is off, or has no standard error."""
    for stream in (Screen(), io.StringIO()):
        monkeypatch.setattr(progress_module, "DELAY_S", 1000.0)
        monkeypatch.setattr(progress_module, "LINES_S", (1000.0, 1000.0))
        monkeypatch.setattr(sys, "stderr", stream)
        with command_progress("a", 2, "lines") as count:
            assert list(counted("ab", count)) == ["a", "b"]
        assert stream.getvalue() == ""
    monkeypatch.setattr(progress_module, "DELAY_S", 0.0)
    for off in (Screen(), None):
        monkeypatch.setattr(sys, "stderr", off)
        with command_progress("a", 2, is_off=off is not None) as count:
            count(1)
        assert off is None or off.getvalue() == ""


def server_of_batch(states: list[tuple[str, int, int, int]]) -> httpx2.MockTransport:
    left = iter(states)

    def answer(request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/batches/one"
        status, total, completed, failed = next(left)
        counts = {"total": total, "completed": completed, "failed": failed}
        return httpx2.Response(200, json={"status": status, "request_counts": counts})

    return httpx2.MockTransport(answer)


def test_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`quipu run-batch` counts all lines, those with errors included, and returns the batch at its end."""
    monkeypatch.setattr(run_batch_command, "POLL_S", 0.0)
    seen: list[int] = []

    class Counting:
        def __init__(self, *args: object) -> None:
            pass

        def __enter__(self) -> Count:
            return seen.append

        def __exit__(self, *args: object) -> None:
            pass

    monkeypatch.setattr(run_batch_command, "command_progress", Counting)
    with httpx2.Client(base_url="http://test", transport=server_of_batch(STATES)) as http:
        assert run_batch_command.wait_for_end(http, "one")["status"] == "completed"
    assert sum(seen) == 4
    refuse = httpx2.MockTransport(lambda _: httpx2.Response(503, json={"error": {"message": "No room."}}))
    with httpx2.Client(base_url="http://test", transport=refuse) as http, pytest.raises(RunBatchError, match="No room"):
        run_batch_command.wait_for_end(http, "one")
