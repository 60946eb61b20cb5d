"""The mover: carries out moves in its own threads, so that no step waits for a copy.

Receives `Move` from the KV-block manager and answers each with `Moved` or `MoveFailed`. `block_carrier.py` does the
copying. Loads, which sequences wait for, and stores, which nothing waits for, run concurrently, and so do moves from or
to different tiers.

What must always hold: moves into one tier below the device run one at a time, in order; a load begins once the executor
has run every plan that may write to its blocks, which means all plans sent before; a load that is not over in time is
reported as late, whatever it waits for; the event loop never waits for a copy; when this actor has ended, no copy is in
progress. An exception here ends the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, Protocol, TypeVar, runtime_checkable

import structlog
import trio

from ...channel import Channel, Poster, Receiver
from ...messages.executor import Barrier
from ...messages.mover import (
    BarrierPassed,
    ClearTier,
    ListedPage,
    ListingFailed,
    ListTier,
    Move,
    MoveLate,
    MoveNews,
    MoveResult,
    MoverMessage,
)
from ...messages.tiers import Tier
from ...threads import run_in_thread
from .block_carrier import BlockCarrier
from .write_rate import RateLimit

log = structlog.get_logger()

Delay = Callable[[], float]
A = TypeVar("A")
R = TypeVar("R")

LOAD_TIMEOUT_S = 30.0
"""How long sequences wait for a load, including earlier loads in the queue: many times as long as a normal load."""
LOADS_TOGETHER: Final = {Tier.HOST: 1, Tier.DISK: 4, Tier.REMOTE: 8}
"""Loads from a tier that are carried out at the same time. Each uses several threads."""


@runtime_checkable
class ListedStore(Protocol):
    """A store that can tell what it holds. Used in threads."""

    def list_names(self) -> Iterator[ListedPage]: ...


async def run_mover(
    carrier: BlockCarrier,
    inbox: Receiver[MoverMessage],
    executor: Poster[Barrier],
    results: Poster[MoveNews],
    delay_in_loop: Delay | None = None,
    write_rate: RateLimit | None = None,
) -> None:
    """Carry out moves until cancelled, in threads.

    With `delay_in_loop`, which returns the seconds that a move takes, they run in the loop, so that the clock may be a
    mock. `write_rate` limits the bytes that are written to the disk.
    """
    mover = _Mover(carrier, results, delay_in_loop, write_rate)
    stores: dict[Tier, Channel[Move | ClearTier]] = {tier: Channel(1) for tier in carrier.stores}
    waiting: dict[int, Move] = {}
    async with trio.open_nursery() as nursery:
        for lane in stores.values():
            nursery.start_soon(mover.store_in_order, lane)
        while True:
            for message in await inbox.receive_all():
                if isinstance(message, BarrierPassed):
                    nursery.start_soon(mover.load, waiting.pop(message.number))
                elif isinstance(message, ClearTier):
                    stores[message.tier].post(message)
                elif isinstance(message, ListTier):
                    nursery.start_soon(mover.list_names, message.tier)
                elif message.target is Tier.DEVICE:
                    nursery.start_soon(mover.tell_if_late, message.number, mover.begin_wait(message.number))
                    waiting[message.number] = message
                    executor.post(Barrier(message.number))
                else:
                    stores[message.target].post(message)


class _Mover:
    """The moves under way."""

    def __init__(
        self,
        carrier: BlockCarrier,
        results: Poster[MoveNews],
        delay_in_loop: Delay | None,
        write_rate: RateLimit | None,
    ) -> None:
        self._carrier = carrier
        self._results = results
        self._delay_in_loop = delay_in_loop
        self._write_rate = write_rate
        self._patience: dict[int, trio.CancelScope] = {}
        self._loading = {tier: trio.CapacityLimiter(LOADS_TOGETHER[tier]) for tier in carrier.stores}
        self._threads = trio.CapacityLimiter(sum(LOADS_TOGETHER.values()) + len(carrier.stores))

    async def store_in_order(self, lane: Receiver[Move | ClearTier]) -> None:
        """Carry out what changes a tier, one after the other, until cancelled."""
        while True:
            for message in await lane.receive_all():
                if isinstance(message, ClearTier):
                    await self._clear(message.tier)
                    continue
                if message.target is Tier.DISK and self._write_rate is not None:
                    await trio.sleep(self._write_rate.wait_s(trio.current_time()))
                    self._write_rate.spend(len(message.keys) * self._carrier.block_bytes, trio.current_time())
                self._results.post(await self._carry(message))

    async def load(self, move: Move) -> None:
        """Carry out a load when it is its turn, and answer it."""
        async with self._loading[move.source]:
            result = await self._carry(move)
        self._patience.pop(move.number).cancel()
        self._results.post(result)

    async def _carry(self, move: Move) -> MoveResult:
        return await self._call(self._carrier.carry, move)

    async def _call(self, call: Callable[[A], R], argument: A) -> R:
        """Call what copies, reads or writes: in a thread, or in the loop where a test wants that."""
        if self._delay_in_loop is None:
            return await run_in_thread(call, argument, limiter=self._threads)
        await trio.sleep(self._delay_in_loop())
        return call(argument)

    def begin_wait(self, number: int) -> trio.CancelScope:
        """Return a scope that is cancelled when a load is over."""
        self._patience[number] = scope = trio.CancelScope()
        return scope

    async def tell_if_late(self, number: int, over: trio.CancelScope) -> None:
        """Report a load as late that is not over in time."""
        with over:
            await trio.sleep(LOAD_TIMEOUT_S)
            self._results.post(MoveLate(number))

    async def list_names(self, tier: Tier) -> None:
        """Tell page by page what a tier holds that other servers share."""
        store = self._carrier.stores[tier]
        assert isinstance(store, ListedStore)
        pages = store.list_names()
        try:
            while True:
                page = await self._call(next, pages)
                self._results.post(page)
                if page.is_last:
                    return
        except OSError as error:
            self._results.post(ListingFailed(f"{type(error).__name__}: {error}"))

    async def _clear(self, tier: Tier) -> None:
        try:
            await self._call(lambda store: store.clear(), self._carrier.stores[tier])
        except OSError as error:
            log.error("kv_tier.not_cleared", tier=tier.value, error=f"{type(error).__name__}: {error}")
