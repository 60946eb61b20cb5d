"""A log that cannot be written does not stop or delay the server, and no record is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.servers import PATIENCE_S, QUIPU, Process, Server, eventually, serve_command, start_with_streams
from tests.processes import free_ports

KINDS = ("reader gone", "reader that does not read", "partition full", "none")


@contextmanager
def logging_to(kind: str, folder: Path) -> Iterator[Server]:
    """Run a server whose standard error cannot be written."""
    (port,) = free_ports(1)
    folder.mkdir()
    arguments = serve_command("--executor", "fake", "--port", str(port), "--log-level", "debug")
    with ExitStack() as stack:
        server = Server(start(kind, folder, arguments, stack), folder / "none.log", f"http://127.0.0.1:{port}")
        try:
            eventually(lambda: is_ready(server), "the server is ready")
            yield server
        finally:
            server.process.kill()
            server.process.wait()


def start(kind: str, folder: Path, arguments: Sequence[str], stack: ExitStack) -> Process:
    """Start `quipu`; `stack` keeps open what must stay open while it runs."""
    if kind == "none":
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", str(QUIPU), *arguments]
        return subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    if kind == "partition full":
        writer = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, writer = os.pipe()
        if kind == "reader gone":
            os.close(reader)
        else:
            stack.callback(os.close, reader)
    with os.fdopen(writer, "wb") as log, Path(os.devnull).open("wb") as nowhere:
        return start_with_streams(folder, arguments, nowhere, log)


def is_ready(server: Server) -> bool:
    assert server.process.poll() is None, "the server has ended"
    try:
        return server.is_ready()
    except OSError:
        return False


@pytest.mark.parametrize("kind", KINDS)
def test_unwritable_log(tmp_path: Path, kind: str) -> None:
    """Responses, streams, counters and shutdown work as usual; dropped lines are counted."""
    with logging_to(kind, tmp_path / "server") as server:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            body = {"model": "demo", "prompt": "Hi.", "max_tokens": 4, "metadata": {"why": "x" * 400}}
            for at in range(60):
                answer = client.post("/v1/completions", json=body, headers={"X-Request-Id": "y" * 250})
                assert answer.status_code == 200, at
            streamed = client.post("/v1/completions", json=body | {"stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
        metrics = server.wait_at_rest()
        assert metrics["prompt_tokens_total"] > 0 and metrics['requests_total{outcome="finished"}'] == 61
        dropped = metrics["log_lines_dropped_total"]
        assert dropped == 0 if kind == "reader that does not read" else dropped > 60
        os.kill(server.engine_pid(), signal.SIGKILL)  # logged as an error, with no effect on the web process
        eventually(lambda: is_ready(server) and server.complete("Hi.").status_code == 200, "it serves again")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
