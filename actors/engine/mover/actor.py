"""The mover: carries out moves in its own threads, so that no step waits for a copy.

Receives `Move` from the KV-block manager and answers each with `Moved` or `MoveFailed`. `host_store.py` does the
copying. Loads, which sequences wait for, and stores, which nothing waits for, run concurrently.

What must always hold: moves in one direction run one at a time, in order; a load begins once the executor has run every
plan that may write to its blocks, which means all plans sent before; a load that is not over in time is reported as
late, whatever it waits for; the event loop never waits for a copy; when this actor has ended, no copy is in progress.
An exception here ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from ...channel import Channel, Poster, Receiver
from ...messages.executor import Barrier
from ...messages.mover import BarrierPassed, Move, MoveLate, MoveNews, MoverMessage
from ...messages.tiers import Tier
from ...threads import run_in_thread
from .host_store import HostStore

Delay = Callable[[], float]

LOAD_TIMEOUT_S = 30.0
"""How long sequences wait for a load, including earlier loads in the queue: many times as long as a normal load."""


async def run_mover(
    store: HostStore,
    inbox: Receiver[MoverMessage],
    executor: Poster[Barrier],
    results: Poster[MoveNews],
    delay_in_loop: Delay | None = None,
) -> None:
    """Carry out moves until cancelled, in threads.

    With `delay_in_loop`, which returns the seconds that a move takes, they run in the loop, so that the clock may be a
    mock.
    """
    loads: Channel[Move] = Channel(1)
    stores: Channel[Move] = Channel(1)
    patience: dict[int, trio.CancelScope] = {}
    async with trio.open_nursery() as nursery:
        for lane in (loads, stores):
            nursery.start_soon(_carry_in_order, store, lane, results, patience, delay_in_loop)
        waiting: dict[int, Move] = {}
        while True:
            for message in await inbox.receive_all():
                if isinstance(message, BarrierPassed):
                    loads.post(waiting.pop(message.number))
                elif message.target is Tier.DEVICE:
                    patience[message.number] = scope = trio.CancelScope()
                    nursery.start_soon(_tell_if_late, message.number, scope, results)
                    waiting[message.number] = message
                    executor.post(Barrier(message.number))
                else:
                    stores.post(message)


async def _tell_if_late(number: int, over: trio.CancelScope, results: Poster[MoveNews]) -> None:
    with over:
        await trio.sleep(LOAD_TIMEOUT_S)
        results.post(MoveLate(number))


async def _carry_in_order(
    store: HostStore,
    moves: Receiver[Move],
    results: Poster[MoveNews],
    patience: dict[int, trio.CancelScope],
    delay_in_loop: Delay | None,
) -> None:
    while True:
        for move in await moves.receive_all():
            if delay_in_loop is None:
                result = await run_in_thread(store.carry, move)
            else:
                await trio.sleep(delay_in_loop())
                result = store.carry(move)
            if move.number in patience:
                patience.pop(move.number).cancel()
            results.post(result)
