"""Helpers for tests of real processes: waiting for a condition, and whether a process has ended."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 60.0
"""How long a test waits for a condition; only a failing test waits this long."""

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, within_s: float = PATIENCE_S, *, most_pause_s: float = 0.1) -> T:
    """Call `look` until it returns something true, and return that. This is the only place where a test sleeps.

    The longer it has waited, the less often it looks, because it competes with what it waits for: it may return a tenth
    later than necessary, and `most_pause_s` is for what does not last.
    """
    begun = time.monotonic()
    while not (seen := look()):
        waited_s = time.monotonic() - begun
        assert waited_s < within_s, f"not within {within_s} s: {what}"
        time.sleep(max(0.005, min(most_pause_s, waited_s / 10)))
    return seen


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def free_ports(count: int) -> list[int]:
    """Return ports on loopback that are currently unused.

    If possible, they lie below the range from which the system takes the ports of connections, so that no connection
    gets one of them before the test binds it.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    candidates = range(end // 2, end) if end > 8192 else (0,)  # 0 leaves the choice to the system
    draw = random.SystemRandom()
    with ExitStack() as stack:
        ports: list[int] = []
        while len(ports) < count:
            with suppress(OSError):  # another process has this one
                sock = stack.enter_context(socket.create_server(("127.0.0.1", draw.choice(candidates))))
                ports.append(sock.getsockname()[1])
        return ports
