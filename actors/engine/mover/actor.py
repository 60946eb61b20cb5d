"""The mover: carries out moves in its own threads, so that no step waits for a copy.

Receives `Move` from the KV-block manager and answers each with `Moved` or `MoveFailed`. `block_carrier.py` does the
copying. Loads, which sequences wait for, and stores, which nothing waits for, run concurrently, and so do moves from or
to different tiers. Blocks that come from other engines, or go there, are `engine/peers/`'s.

What must always hold: moves into one tier below the device run one at a time, in order; a load begins once the executor
has run every plan that may write to its blocks, which means all plans sent before; a load that is not over in time is
reported as late, whatever it waits for; the event loop never waits for a copy; when this actor has ended, no copy is in
progress. An exception here ends the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import structlog
import trio

from ...channel import Channel, Poster, Receiver
from ...messages.executor import Barrier
from ...messages.mover import (
    BarrierPassed,
    ClearTier,
    EndMove,
    HurryMove,
    Lent,
    ListedPage,
    ListingFailed,
    ListTier,
    Move,
    MoveLate,
    MoveNews,
    MoveResult,
    MoverMessage,
    TierCleared,
)
from ...messages.tiers import Tier
from ...threads import run_in_thread
from .block_carrier import BlockCarrier
from .write_rate import RateLimit

log = structlog.get_logger()

Delay = Callable[[], float]
R = TypeVar("R")

LOAD_TIMEOUT_S = 30.0
"""How long sequences wait for a load, including earlier loads in the queue: many times as long as a normal load."""
LOADS_TOGETHER: Final = {Tier.HOST: 1, Tier.DISK: 4, Tier.REMOTE: 8}
"""Loads from a tier that are carried out at the same time. Each uses several threads."""


COPIES_FOR_PEERS: Final = 4
"""Copies to and from other engines' buffers that are carried out at the same time."""


class Transfers(Protocol):
    """Blocks from and to other engines: `peers/traffic.py`."""

    async def run(
        self, call: Callable[..., Awaitable[Any]], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve other engines until cancelled. `call` calls what copies, with its arguments."""

    def expect(self, number: int) -> None:
        """Note that a fetch begins: what is said of it from now on concerns it."""

    async def fetch(self, move: Move) -> MoveResult:
        """Carry out a move from another engine, which was expected."""

    def hurry(self, number: int) -> bool:
        """Have a fetch wait for nothing that is being computed. Return whether it was under way."""

    def end(self, number: int) -> None:
        """Have a fetch end early. Ignored if it is over."""

    def on_lent(self, lent: Lent) -> None:
        """Pass on what the KV-block manager has lent."""


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
    peers: Transfers | None = None,
) -> None:
    """Carry out moves until cancelled, in threads. Without `peers`, there are no other engines.

    With `delay_in_loop`, which returns the seconds that a move takes, they run in the loop, so that the clock may be a
    mock. `write_rate` limits the bytes that are written to the disk.
    """
    mover = _Mover(carrier, results, delay_in_loop, write_rate)
    stores: dict[Tier, Channel[Move | ClearTier]] = {tier: Channel(1) for tier in carrier.stores}
    waiting: dict[int, Move] = {}
    async with trio.open_nursery() as nursery:
        for lane in stores.values():
            nursery.start_soon(mover.store_in_order, lane)
        if peers is not None:
            await nursery.start(peers.run, mover.call_for_peers)
        while True:
            for message in await inbox.receive_all():
                if isinstance(message, BarrierPassed):
                    move = waiting.pop(message.number)
                    if peers is not None and move.source is Tier.PEER:
                        nursery.start_soon(mover.fetch, move, peers)
                    else:
                        nursery.start_soon(mover.load, move)
                elif isinstance(message, Lent):
                    if peers is not None:
                        peers.on_lent(message)
                elif isinstance(message, HurryMove):
                    number = message.number
                    if peers is not None and peers.hurry(number) and not mover.is_awaited(number):
                        nursery.start_soon(mover.tell_if_late, number, mover.begin_wait(number))
                elif isinstance(message, EndMove):
                    if peers is not None:
                        peers.end(message.number)
                elif isinstance(message, ClearTier):
                    stores[message.tier].post(message)
                elif isinstance(message, ListTier):
                    nursery.start_soon(mover.list_names, message.tier)
                elif message.target is Tier.DEVICE:
                    if not message.waits:
                        nursery.start_soon(mover.tell_if_late, message.number, mover.begin_wait(message.number))
                    if peers is not None and message.source is Tier.PEER:
                        peers.expect(message.number)  # now: it may be hurried, or end, while it waits for a pass
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
        self._for_peers = trio.CapacityLimiter(COPIES_FOR_PEERS)
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

    async def fetch(self, move: Move, peers: Transfers) -> None:
        """Carry out a load from another engine, and answer it."""
        result = await peers.fetch(move)
        if (over := self._patience.pop(move.number, None)) is not None:
            over.cancel()
        self._results.post(result)

    async def _carry(self, move: Move) -> MoveResult:
        return await self._call(self._carrier.carry, move)

    async def _call(self, call: Callable[..., R], *arguments: object) -> R:
        return await self._call_within(self._threads, call, *arguments)

    async def call_for_peers(self, call: Callable[..., R], *arguments: object) -> R:
        """Call what copies to or from another engine's buffers."""
        return await self._call_within(self._for_peers, call, *arguments)

    async def _call_within(self, limiter: trio.CapacityLimiter, call: Callable[..., R], *arguments: object) -> R:
        """Call what copies, reads or writes: in a thread, or in the loop where a test wants that."""
        if self._delay_in_loop is None:
            return await run_in_thread(call, *arguments, limiter=limiter)
        await trio.sleep(self._delay_in_loop())
        return call(*arguments)

    def is_awaited(self, number: int) -> bool:
        """Return whether a load in progress will be reported as late."""
        return number in self._patience

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
        has_failed = False
        try:
            await self._call(lambda store: store.clear(), self._carrier.stores[tier])
        except OSError as error:
            log.error("kv_tier.not_cleared", tier=tier.value, error=f"{type(error).__name__}: {error}")
            has_failed = True
        self._results.post(TierCleared(tier, has_failed))
