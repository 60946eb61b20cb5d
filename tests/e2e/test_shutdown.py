"""How a server stops when it is asked to: what runs may finish, nothing new begins, and the exit code is 0."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from quipu.kernels.fake import continuation
from tests.e2e.prompts import token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, has_ended, runs, serving
from tests.e2e.streams import streaming
from tests.runtimes import text_of


def test_stream_finishes_within_the_grace(tmp_path: Path) -> None:
    """A stream that runs goes on to its end with its usage; new requests get 503 and may be tried elsewhere; exit 0."""
    prompt = token_prompt("grace", 40)
    with serving(tmp_path, "--executor", "fake", "--fake-step-seconds", "0.01") as server:
        with streaming(server, prompt, 100) as stream:
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: server.get("/ready").status_code == 503, "/ready answers 503")
            assert server.get("/health").status_code == 200  # nothing is wrong: no reason to kill it
            late = server.complete(token_prompt("late", 10))
            assert late.status_code == 503 and "Retry-After" in late.headers
            assert late.json()["error"]["message"] == "The server is shutting down."
            late = server.complete(token_prompt("late", 10), stream=True)
            assert late.status_code == 503
            stream.read_all()
        assert stream.text == text_of(continuation(prompt, 100))
        assert stream.done and stream.finish_reason == "length" and stream.error is None
        assert stream.usage is not None and stream.usage["completion_tokens"] == 100
        assert server.process.wait(PATIENCE_S) == 0
        assert [e["outcome"] for e in server.events("request.done")].count("finished") == 1


def test_stream_that_outlives_the_grace(tmp_path: Path) -> None:
    """What still runs after the grace is told why it ends, in a response that ends properly; exit 0, in time."""
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


def test_asked_twice(tmp_path: Path) -> None:
    """A second signal ends the server at once, with the signal's exit code, and every process of it, hung or not."""
    with serving(tmp_path, "--executor", "fake") as server:
        children = eventually(lambda: everybody(server), "the engine and its helpers run")
        with streaming(server, token_prompt("twice asked", 40), 4000):
            os.kill(server.engine_pid(), signal.SIGSTOP)
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: server.events("server.stopping"), "the first signal is heard")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
            eventually(lambda: all(map(has_ended, children)), "every process ends, too", within_s=2.0)


def everybody(server: Server) -> list[int] | None:
    """All children of the web process, once there are some of each kind."""
    kinds = (
        "quipu.actors.processes.engine_process",
        "quipu.actors.text_workers.chat_worker",
        "quipu.actors.text_workers.encode_worker",
    )
    children = server.children()
    return children if all(any(runs(pid, kind) for pid in children) for kind in kinds) else None


def test_asked_twice_while_the_books_are_closed(tmp_path: Path) -> None:
    """A second signal means the same when only the ledger is left to close: its exit code, and no traceback."""
    with serving(tmp_path, "--executor", "fake") as server:
        engine = server.engine_pid()
        with closing(sqlite3.connect(tmp_path / "data" / "ledger.sqlite3", isolation_level=None)) as reader:
            reader.execute("begin exclusive")  # the ledger's last entries have to wait
            server.process.send_signal(signal.SIGINT)
            eventually(lambda: has_ended(engine), "only the books are open")
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(PATIENCE_S) == 128 + signal.SIGINT
        assert "Traceback" not in server.log_text
