"""Graceful shutdown: running requests may finish, new ones are rejected, and the exit code is 0."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.ledger_command import ledger
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, has_ended, runs, serving
from tests.e2e.streams import streaming
from tests.fake_oracle import continuation
from tests.runtimes import text_of


def test_stream_finishes_in_grace_period(tmp_path: Path) -> None:
    """A running stream completes with its usage; new requests get a retryable 503; the exit code is 0."""
    prompt = token_prompt("grace", 40)
    with serving(tmp_path, "--executor", "fake", "--fake-step-seconds", "0.01") as server:
        with streaming(server, prompt, 200) as stream:
            with server.paused_engine():
                server.process.send_signal(signal.SIGTERM)
                eventually(lambda: server.get("/ready").status_code == 503, "/ready answers 503")
                assert server.get("/health").status_code == 200  # the server is healthy and must not be killed
                late = server.complete(token_prompt("late", 10))
                assert late.status_code == 503 and "Retry-After" in late.headers
                assert late.json()["error"]["message"] == "The server is shutting down."
                late = server.complete(token_prompt("late", 10), stream=True)
                assert late.status_code == 503
            stream.read_all()
        assert stream.text == text_of(continuation(prompt, 200))
        assert stream.done and stream.finish_reason == "length" and stream.error is None
        assert stream.usage is not None and stream.usage["completion_tokens"] == 200
        assert server.process.wait(PATIENCE_S) == 0
        assert [e["outcome"] for e in server.events("request.done")].count("finished") == 1


def test_stream_exceeds_grace_period(tmp_path: Path) -> None:
    """A request that exceeds the grace period gets an error in a well-formed response; the server exits with 0."""
    flags = ["--executor", "fake", "--fake-step-seconds", "0.01", "--shutdown-timeout", "0.2"]
    with serving(tmp_path, *flags) as server:
        engine = server.engine_pid()
        with streaming(server, token_prompt("outlives", 40), 4000) as stream:
            server.process.send_signal(signal.SIGTERM)
            stream.read_all()
            assert stream.error is not None and "shut down" in stream.error["message"]
            assert stream.done and stream.finish_reason is None
        assert server.process.wait(PATIENCE_S) == 0
        assert has_ended(engine)


def test_clients_that_left_are_recorded(tmp_path: Path) -> None:
    """Requests whose clients leave at the moment of the signal are recorded with what they have computed."""
    with serving(tmp_path, "--executor", "fake", "--fake-step-seconds", "0.05") as server:
        with streaming(server, token_prompt("leaves", 40), 4000) as stream:
            stream.read_some()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
    (record,) = map(json.loads, ledger(tmp_path, "export", "--format", "jsonl").stdout.splitlines())
    assert (record["outcome"], record["fault"], record["prompt_tokens"]) == ("cancelled", None, 40)
    assert ledger(tmp_path, "verify").stdout.startswith("in order: 1 records")


def test_second_signal(tmp_path: Path) -> None:
    """A second signal ends the server and all its processes, even hung ones, with the signal's exit code."""
    with serving(tmp_path, "--executor", "fake") as server:
        children = eventually(lambda: all_children(server), "the engine and the workers are running")
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in children]
        assert all("libtorch" in text for text in maps), "they must be forks, which `spare_processes.py` makes"
        with streaming(server, token_prompt("second signal", 40), 4000):
            os.kill(server.engine_pid(), signal.SIGSTOP)
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: server.events("server.stopping"), "the first signal is handled")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
            eventually(lambda: all(map(has_ended, children)), "every process ends")


def all_children(server: Server) -> list[int] | None:
    """Return all children of the web process once there is at least one of each kind."""
    kinds = (
        "quipu.actors.fleet.processes.engine_process",
        "quipu.actors.text_workers.chat_worker",
        "quipu.actors.text_workers.encode_worker",
    )
    children = server.children()
    return children if all(any(runs(pid, kind) for pid in children) for kind in kinds) else None


def test_second_signal_while_ledger_closes(tmp_path: Path) -> None:
    """A second signal has the same effect while only the ledger is left to close, without a traceback."""
    with serving(tmp_path, "--executor", "fake") as server:
        engine = server.engine_pid()
        with closing(sqlite3.connect(tmp_path / "data" / "ledger.sqlite3", isolation_level=None)) as reader:
            reader.execute("begin exclusive")  # blocks the ledger's last entries
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: has_ended(engine), "only the ledger is left to close")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
        assert "Traceback" not in server.log_text


def test_service_manager(tmp_path: Path) -> None:
    """A server tells its service manager when it is ready, alive and stopping; its engine would be killed first."""
    address = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
        link.bind(str(address))
        link.settimeout(PATIENCE_S)
        environment = {"NOTIFY_SOCKET": str(address), "WATCHDOG_USEC": "1000000"}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with serving(tmp_path, "--executor", "fake") as server:
                told: list[str] = []
                while told.count("WATCHDOG=1") < 3 or not any(message.startswith("READY=1") for message in told):
                    told.append(link.recv(4096).decode())
                engine = server.engine_pid()
                assert "NOTIFY_SOCKET" not in Path(f"/proc/{engine}/environ").read_text()
                scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (server.process.pid, engine)]
                assert scores[1] - scores[0] == min(500, 1000 - scores[0])
                assert server.stop() == 0
                while not told[-1].startswith("STOPPING=1"):
                    told.append(link.recv(4096).decode())
