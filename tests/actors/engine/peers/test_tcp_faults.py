"""Two engines that are connected by TCP, whose connection is cut or stands still after any number of bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

import attrs
import pytest
import trio

from quipu.actors.engine.peers import peer_client, peer_connections, tcp_link
from quipu.actors.engine.peers.peer_link import PeerLink
from quipu.actors.engine.peers.tcp_network import PeerAddress, TcpListener, TcpNetwork
from quipu.actors.fleet.processes.link_tls import LinkTls
from tests.actors.engine.engine_pairs import Side, open_sides
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import eventually
from tests.tiny import BLOCK

HOST: Final = "127.0.0.1"
SECRET: Final = bytes(range(32))
PROMPT: Final = [*prompt_of(20 * BLOCK, seed=1), 7, 8, 9]


@attrs.define(eq=False)
class BadCable:
    """A network whose connections go over a cable that fails after some number of bytes, once."""

    network: TcpNetwork
    nursery: trio.Nursery
    at: int | None
    """None: never."""
    is_silent: bool
    """Whether it brings no more bytes from then on; otherwise its ends are closed."""
    num_bytes: int = 0
    carried: list[int] = attrs.field(factory=list)
    """How many bytes there were after each piece."""
    has_failed: bool = False
    entrances: dict[str, str] = attrs.field(factory=dict)
    cables: list[trio.SocketStream] = attrs.field(factory=list)
    dead: list[trio.SocketStream] = attrs.field(factory=list)

    def listen(self) -> TcpListener:
        return self.network.listen()

    async def connect(self, address: str) -> PeerLink:
        place = PeerAddress.parse(address)
        if address not in self.entrances:
            listeners = await self.nursery.start(partial(trio.serve_tcp, partial(self.carry, place), 0, host=HOST))
            self.entrances[address] = str(attrs.evolve(place, port=listeners[0].socket.getsockname()[1]))
        return await self.network.connect(self.entrances[address])

    async def carry(self, place: PeerAddress, caller: trio.SocketStream) -> None:
        try:
            server = await trio.open_tcp_stream(place.host, place.port)
        except OSError:
            await caller.aclose()
            return
        async with caller, server, trio.open_nursery() as both:
            self.cables += (caller, server)
            both.start_soon(self.carry_one_way, caller, server)
            both.start_soon(self.carry_one_way, server, caller)

    async def carry_one_way(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        try:
            async for data in source:
                if source in self.dead:
                    continue
                left = len(data) if self.at is None or self.has_failed else self.at - self.num_bytes
                self.num_bytes += len(data)
                self.carried.append(self.num_bytes)
                await target.send_all(data[:left])
                if left < len(data):
                    await self.fail()
            await target.send_eof()
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await trio.aclose_forcefully(source)
            await trio.aclose_forcefully(target)

    async def fail(self) -> None:
        self.has_failed = True
        self.dead, self.cables = self.cables, []
        if not self.is_silent:
            for end in self.dead:
                await trio.aclose_forcefully(end)


@asynccontextmanager
async def cabled(tls: LinkTls | None, at: int | None, *, is_silent: bool) -> AsyncIterator[BadCable]:
    async with trio.open_nursery() as nursery:
        yield BadCable(TcpNetwork(HOST, SECRET, tls), nursery, at, is_silent)
        nursery.cancel_scope.cancel()


async def move_once(cable: BadCable) -> int:
    """Prefill on one engine and decode on another, twice. Check texts and leftovers; return the tokens moved."""
    async with open_sides(2, cable) as (prefill, decode):
        num_moved = 0
        for sequence_id, prompt in ((1, PROMPT), (2, [3, *PROMPT])):
            first = await prefill.submit(sequence_id, prompt, ends_after_prefill=True)
            await decode.fetch(sequence_id, prompt, prefill.peer)
            await first.over.wait()
            rest = await decode.serve(
                sequence_id, prompt, output_token_ids=first.tokens, is_resumed=True, peer=prefill.peer
            )
            assert first.tokens + rest.tokens == continuation(prompt, 6)
            assert rest.error is None
            assert all(admitted.reused == admitted.read for admitted in rest.admissions)
            num_moved += sum(admitted.by_tier.get("peer", 0) for admitted in rest.admissions)
        for side in (prefill, decode):
            await eventually(partial(is_at_rest, side), "nothing is held")
            side.check()
        return num_moved


def is_at_rest(side: Side) -> bool:
    manager = side.engine.block_manager
    return not manager.lending.num_blocks and (manager.tiers is None or not manager.tiers.loads.are_under_way)


async def places_to_cut(tls: LinkTls | None) -> list[int]:
    """Return numbers of bytes after which each piece of an undisturbed run is cut off, whole or in its middle."""
    async with cabled(tls, None, is_silent=False) as cable:
        assert await move_once(cable) == 2 * 20 * BLOCK
        ends = cable.carried
    return sorted({at for before, end in zip([0, *ends], ends, strict=False) for at in (before, (before + end) // 2)})


async def disturb(tls: LinkTls | None, places: list[int], *, is_silent: bool) -> None:
    num_failed = 0
    for at in places:
        async with cabled(tls, at, is_silent=is_silent) as cable:
            await move_once(cable)
            num_failed += cable.has_failed
    assert num_failed >= len(places) - 4, "the last places may not be reached: runs differ by a few messages"


async def test_cut_after_any_number_of_bytes(tls: LinkTls | None) -> None:
    """Wherever the connection is cut, the texts are right, and nothing stays held."""
    with trio.fail_after(100):
        places = await places_to_cut(tls)
        assert len(places) > 40
        await disturb(tls, places if tls is None else places[::3], is_silent=False)


async def test_stands_still_after_any_number_of_bytes(tls: LinkTls | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hears nothing any more gives up after a while, and computes."""
    with trio.fail_after(100):
        places = await places_to_cut(tls)
        for module in (peer_client, peer_connections):
            monkeypatch.setattr(module, "SILENCE_S", 0.3)
        monkeypatch.setattr(peer_connections, "CONNECT_S", 0.5)
        monkeypatch.setattr(tcp_link, "STALLED_S", 0.3)
        await disturb(tls, places[:: len(places) // 8], is_silent=True)
