"""Keeps the machine busy with processes of the lowest priority, as a batch job beside a server would.

Used by the command for `--busy N`. What must always hold: the processes end with the block, and with this one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SPIN = """
import os
os.nice(19)
print(flush=True)
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""


@contextmanager
def busy(num_processes: int) -> Iterator[list[int]]:
    """Run this many processes that compute all the time, and yield their ids."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(num_processes):
            processes.append(subprocess.Popen([sys.executable, "-c", _SPIN], stdout=subprocess.PIPE))
            assert processes[-1].stdout is not None
            processes[-1].stdout.readline()
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
