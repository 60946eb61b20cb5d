"""Processes that keep the machine busy have the lowest priority and end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path

from bench.stalls.busy import busy
from tests.processes import PATIENCE_S


def test_busy_processes_are_niced_and_end() -> None:
    """Busy processes have the lowest priority, and are gone when the block is left."""
    pids: list[int] = []
    niceness: set[int] = set()

    def be_busy() -> None:
        with busy(2) as found:
            pids.extend(found)
            niceness.update(os.getpriority(os.PRIO_PROCESS, pid) for pid in found)

    thread = threading.Thread(target=be_busy, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    has_ended = not thread.is_alive() and not any(Path(f"/proc/{pid}").exists() for pid in pids)
    for pid in pids if not has_ended else ():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert has_ended and len(pids) == 2 and niceness == {19}
