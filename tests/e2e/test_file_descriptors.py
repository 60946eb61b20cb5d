"""A server without file descriptors: it goes on, says so once, answers probes, and starts engines when it can."""

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


def test_slow_posts_take_all_descriptors(tmp_path: Path) -> None:
    """Under a limit of 256 that came after the start, 280 slow posts lock out nobody who asks for `/health`."""
    folder = tmp_path / "server"
    folder.mkdir()
    with serving(folder, "--executor", "fake") as server, ExitStack() as stack:
        limit = 256
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, limit))
        for _ in range(NUM_SLOW):
            sock = stack.enter_context(socket.create_connection(server.address))
            sock.sendall(SLOW_POST)
        eventually(lambda: num_files(server.pid) >= limit - 2, "its descriptors are taken")
        for _ in range(5):
            assert server.get("/health").status_code == 200
        assert "Traceback" not in server.log_text
        assert len(server.events("connections.no_file_descriptors")) == 1
        stack.close()
        assert server.complete("Hello.").status_code == 200


def test_engine_dies_while_there_are_no_descriptors(tmp_path: Path) -> None:
    """Another one is started as soon as that can be done; the server does not end, and blames nobody's port."""
    folder = tmp_path / "server"
    folder.mkdir()
    with serving(folder, "--executor", "fake") as server:
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        os.kill(server.engine_pid(), signal.SIGKILL)
        eventually(lambda: len(server.events("engine.not_started")) > 3, "it is tried again and again")
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
        server.wait_ready()
        assert server.complete("Hello.").status_code == 200
        assert "cannot listen" not in server.log_text
