"""Work that Ctrl-C stops: waiting for an answer.

Meanwhile SIGINT cancels that work instead of raising KeyboardInterrupt wherever the program happens to be. The
connection is then closed properly, so the server stops generating.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ..bench.answer import Outcome, Piece
from ..bench.client import Target, open_client
from ..bench.workload import Ask

T = TypeVar("T")


def ask_until_stopped(target: Target, ask: Ask, on_piece: Callable[[Piece], object]) -> Outcome | None:
    """Return the outcome, None if the user stopped it. Raises the OSError of an `on_piece` that cannot print."""
    errors: list[OSError] = []

    async def work() -> Outcome | None:
        with trio.CancelScope() as scope:

            def take(piece: Piece) -> None:
                try:
                    on_piece(piece)
                except OSError as error:  # raised here, it would leave the response's generators unfinished
                    errors.append(error)
                    scope.cancel()

            async with open_client(target) as client:
                return await client.ask(ask, take)
        return None

    outcome = run_until_stopped(work)
    if errors:
        raise errors[0]
    return outcome


def run_until_stopped(work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the result of `work`, or None if the user stopped it."""
    try:
        return trio.run(_work_until_stopped, work)
    except KeyboardInterrupt:  # before its first line, or after its last
        return None


async def _work_until_stopped(work: Callable[[], Awaitable[T]]) -> T | None:
    token = trio.lowlevel.current_trio_token()
    with trio.CancelScope() as scope:
        # A signal handler may interrupt any line of the event loop, so it must not cancel by itself.
        previous = signal.signal(signal.SIGINT, lambda *_: token.run_sync_soon(scope.cancel, idempotent=True))
        try:
            return await work()
        finally:
            signal.signal(signal.SIGINT, previous)
    return None
