"""Helpers for tests of real processes: waiting for a condition, and whether a process has ended."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 20.0
"""How long a test waits for a condition; only a failing test waits this long."""

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, within_s: float = PATIENCE_S) -> T:
    """Call `look` until it returns something true, and return that. This is the only place where a test sleeps."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)
    return seen


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that are currently unused."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [sock.getsockname()[1] for sock in sockets]
