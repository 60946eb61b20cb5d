"""What tests of real processes share: waiting for what must happen, and whether a process has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE_S = 20.0
"""How long a test waits for what must happen; only a test that fails waits so long."""

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str, within_s: float = PATIENCE_S) -> T:
    """Look until there is something true to see, and return it. The one place where a test lets time pass."""
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.005)
    return seen


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or only waits for its parent to hear of it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
