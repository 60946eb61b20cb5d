"""A server that runs out of file descriptors: it continues, logs it once, answers probes, and starts engines later."""

from __future__ import annotations

import os
import resource
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.servers import eventually, num_files, serving

SLOW_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
NUM_SLOW = 280


def test_slow_posts_exhaust_descriptors(tmp_path: Path) -> None:
    """With a limit of 256 set after the start, 280 slow posts do not block requests to `/health`."""
    folder = tmp_path / "server"
    with serving(folder, "--executor", "fake") as server, ExitStack() as stack:
        limit = 256
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(NUM_SLOW):
            sock = stack.enter_context(socket.create_connection(server.address))
            sock.sendall(SLOW_POST)
        eventually(lambda: num_files(server.pid) >= limit - 2, "all descriptors are used")
        for _ in range(5):
            assert server.get("/health").status_code == 200
        assert "Traceback" not in server.log_text
        assert len(eventually(lambda: server.events("connections.no_file_descriptors"), "it is logged")) == 1
        stack.close()
        assert server.complete("Hello.").status_code == 200


def test_engine_dies_without_descriptors(tmp_path: Path) -> None:
    """A new engine is started as soon as possible; the server does not exit, and reports no port problem."""
    folder = tmp_path / "server"
    with serving(folder, "--executor", "fake") as server:
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: len(server.events("engine.not_started")) > 3, "starting is retried")
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        server.wait_ready()
        assert server.complete("Hello.").status_code == 200
        assert "cannot listen" not in server.log_text
