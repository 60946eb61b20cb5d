"""`quipu top` without a terminal: one report, JSON, and its errors. `tests/e2e/test_top.py` runs it on a terminal."""

from __future__ import annotations

import json

import pytest

from quipu.web.cli.cli import main
from tests.web.cli.bench.bench_server import serving
from tests.web.cli.top.scripted_server import Server


def test_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One report is of two readings, sent with the admin key of the environment; as JSON it is one object."""
    monkeypatch.setenv("QUIPU_ADMIN_KEY", "secret")
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    with serving(Server().answer) as scripted:
        assert main(["top", scripted.url, "--once", "-n", "0.1"]) == 0
        assert {request.headers["authorization"] for request in scripted.requests} == {"Bearer secret"}
        assert sum(request.path == "/metrics" for request in scripted.requests) == 2
        text = capsys.readouterr().out
        assert "cached      now -   since the start 75.0% (150 of 200)" in text and "\x1b" not in text
        assert main(["top", scripted.url, "--once", "--json", "-n", "0.1", "--api-key", "mine"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert scripted.requests[-1].headers["authorization"] == "Bearer mine"
    assert document["numbers"]["since_start"] == {"prompt_tokens": 200, "cached_tokens": 150}
    assert document["reachable"] and document["numbers"]["period_s"] > 0


def test_no_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no server of quipu is at the beginning, the command says so and ends with 1; a wrong key is a mistake."""
    with serving(Server(is_gone=True).answer) as scripted:
        assert main(["top", scripted.url]) == 1
    said = f"quipu: no server at {scripted.url}: /health is not that of quipu (status 502); "
    said += "start one with `quipu serve`, or name another: quipu top URL\n"
    assert capsys.readouterr() == ("", said)
    assert main(["top", scripted.url]) == 1
    assert "attempts to connect" in capsys.readouterr().err
    monkeypatch.setenv("QUIPU_ADMIN_KEY", "k\u00e9y")
    assert main(["top"]) == 2
    assert "QUIPU_ADMIN_KEY" in capsys.readouterr().err
