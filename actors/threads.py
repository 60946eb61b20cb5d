"""Runs calls in worker threads, starts threads and processes, and waits while the machine has no thread for them.

The web process uses these instead of `trio.to_thread.run_sync` and `trio.lowlevel.open_process`, which starts a process
in a thread: a limit of threads or memory that is reached for a moment must not end a task that all requests need.

What must always hold: a call that has begun is never repeated, and its errors are raised; a wait ends with the
surrounding cancel scope.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar, TypeVarTuple

import structlog
import trio

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = structlog.get_logger()

FIRST_PAUSE_S: Final = 0.01
MAX_PAUSE_S: Final = 0.5
_NO_THREAD: Final = "can't start new thread"


async def run_in_thread(
    call: Callable[[*Ts], T],
    *args: *Ts,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
) -> T:
    """Run `call(*args)` like `trio.to_thread.run_sync`, but wait for a thread; the wait holds nothing of `limiter`."""
    has_begun = False

    def begin() -> T:
        nonlocal has_begun
        has_begun = True
        return call(*args)

    async def run() -> T:
        return await trio.to_thread.run_sync(begin, limiter=limiter, abandon_on_cancel=abandon_on_cancel)

    return await _repeat_while_short(run, lambda: has_begun)


async def open_process(command: Sequence[str], **options: Any) -> trio.Process:
    """Start a process like `trio.lowlevel.open_process`, but wait for a thread. Raises OSError, also without memory."""

    async def start() -> trio.Process:
        try:
            return await trio.lowlevel.open_process(command, **options)
        except MemoryError:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from None

    return await _repeat_while_short(start)


async def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a thread of its own for `run()`, a daemon, as soon as there is one."""

    async def start() -> threading.Thread:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    return await _repeat_while_short(start)


async def _repeat_while_short(attempt: Callable[[], Awaitable[T]], has_begun: Callable[[], bool] = lambda: False) -> T:
    """Repeat `attempt` while it raises for want of a thread or memory, unless `has_begun()`; return its result."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await attempt()
        except (RuntimeError, MemoryError) as error:
            is_shortage = isinstance(error, MemoryError) or _NO_THREAD in str(error)
            if has_begun() or not is_shortage:
                raise
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


async def outlive_shortages(run: Callable[[], Awaitable[None]], task: str) -> None:
    """Run `run()`, and again after a pause whenever it ends for want of memory. `task` names it in the log."""
    while True:
        try:
            return await run()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.error("task.out_of_memory", task=task)
        await trio.sleep(MAX_PAUSE_S)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or each of a group, is a MemoryError."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(is_out_of_memory, error.exceptions))
    return isinstance(error, MemoryError)
