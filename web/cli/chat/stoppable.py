"""Work that Ctrl-C stops: waiting for an answer.

Meanwhile SIGINT cancels that work instead of raising KeyboardInterrupt wherever the program happens to be. The
connection is then closed properly, so the server stops generating.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from ..bench.answer import Outcome, Piece
from ..bench.client import Client, Target
from ..bench.workload import Ask

T = TypeVar("T")


def ask_until_stopped(target: Target, ask: Ask, on_piece: Callable[[Piece], object]) -> Outcome | None:
    """Return the outcome, or None if the user stopped the answer. `on_piece` is called with its text as it arrives."""

    async def work() -> Outcome:
        async with Client.of(target) as client:
            return await client.ask(ask, on_piece)

    return run_until_stopped(work)


def run_until_stopped(work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of `work`, or None if the user stopped it."""
    try:
        return trio.run(_work_until_stopped, work)
    except KeyboardInterrupt:  # before its first line, or after its last
        return None


async def _work_until_stopped(work: Callable[[], Awaitable[T]]) -> T | None:
    with trio.CancelScope() as scope, _cancelling_on_interrupt(scope):
        return await work()
    return None


@contextmanager
def _cancelling_on_interrupt(scope: trio.CancelScope) -> Iterator[None]:
    token = trio.lowlevel.current_trio_token()
    # A signal handler may interrupt any line of the event loop, so it must not cancel by itself.
    previous = signal.signal(signal.SIGINT, lambda *_: token.run_sync_soon(scope.cancel, idempotent=True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
