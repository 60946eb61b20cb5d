"""Processes that keep the machine busy have the lowest priority and end."""

from __future__ import annotations

import os
from pathlib import Path

from bench.stalls.busy import busy


def test_busy_processes_are_niced_and_end() -> None:
    with busy(2) as pids:
        assert len(pids) == 2
        assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {19}
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
