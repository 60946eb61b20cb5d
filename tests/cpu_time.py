"""Limits on CPU time that hold on a busy machine, for tests of work that must be bounded.

CPU time does not pass while other processes run. But a virtual machine may count time in which it was stopped, so only
one of several attempts has to keep a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

ATTEMPTS = 5


def takes_less_than(limit_s: float, call: Callable[[], object]) -> bool:
    """Return whether any of several calls takes less CPU time than this in the current thread."""
    for _ in range(ATTEMPTS):
        begun = time.thread_time()
        call()
        if time.thread_time() - begun < limit_s:
            return True
    return False
