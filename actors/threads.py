"""Runs calls in worker threads, and waits while the machine has no thread for them.

Used instead of `trio.to_thread.run_sync` by everything that runs in the web process: a limit of threads or memory that
is reached for a moment must not end a task that everybody depends on.

What must always hold: a call that has begun is never repeated; whatever it raises is raised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, TypeVarTuple

import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

FIRST_PAUSE_S: Final = 0.01
MAX_PAUSE_S: Final = 0.5
_NO_THREAD: Final = "can't start new thread"


async def run_in_thread(
    call: Callable[[*Ts], T],
    *args: *Ts,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Run `call(*args)` as `trio.to_thread.run_sync` does, but wait until there is a thread for it.

    The wait ends with the surrounding cancel scope, and holds nothing of `limiter`.
    """
    has_begun = False

    def begin() -> T:
        nonlocal has_begun
        has_begun = True
        return call(*args)

    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await trio.to_thread.run_sync(begin, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        except (RuntimeError, MemoryError) as error:
            if has_begun or not (isinstance(error, MemoryError) or _NO_THREAD in str(error)):
                raise
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
