"""Hosts of real engine processes whose connection can be cut without being closed, and healed again."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any

import attrs
import trio
import trio.testing

from quipu.actors.fleet.processes.process_host import ProcessHost
from quipu.actors.fleet.processes.reconnection import Listener


class Cable:
    """Carries bytes between two ends. While it is cut nothing arrives at either: no byte, no end of file."""

    def __init__(self) -> None:
        self._is_whole = trio.Event()
        self._is_whole.set()

    def cut(self) -> None:
        self._is_whole = trio.Event()

    def heal(self) -> None:
        self._is_whole.set()

    async def wait_whole(self) -> None:
        while not self._is_whole.is_set():
            await self._is_whole.wait()

    async def carry(self, one: trio.SocketStream, other: trio.SocketStream) -> None:
        async with one, other, trio.open_nursery() as nursery:
            nursery.start_soon(self._carry_one_way, one, other)
            nursery.start_soon(self._carry_one_way, other, one)

    async def _carry_one_way(self, source: trio.SocketStream, target: trio.SocketStream) -> None:
        try:
            while True:
                await self.wait_whole()
                data = await source.receive_some()
                await self.wait_whole()
                if not data:
                    await target.send_eof()
                    return
                await target.send_all(data)
        except (trio.BrokenResourceError, OSError):
            await trio.aclose_forcefully(source)
            await trio.aclose_forcefully(target)
        except trio.ClosedResourceError:
            pass


@attrs.frozen
class FarListener:
    """What a process is told of its host's listener: the address of the cable's end."""

    lifeline: int
    address: str


class CableHost(ProcessHost):
    """Connects its process by a cable, at first and whenever it connects again."""

    def __init__(self, nursery: trio.Nursery, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._nursery = nursery
        self.cable = Cable()
        self.num_callers = 0
        """Connections that the process has made."""

    async def _start(self, descriptor: int, memory: int, incarnation: int, listener: Any) -> trio.Process:
        assert isinstance(listener, Listener)
        near, far = socket.socketpair()
        outer = socket.socket(fileno=os.dup(descriptor))
        self._nursery.start_soon(self.cable.carry, _stream_of(outer), _stream_of(near))
        named = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        named.bind("")
        named.listen()
        named.setblocking(False)
        entrance = trio.socket.from_stdlib_socket(named)
        self._nursery.start_soon(self._forward, entrance, bytes.fromhex(listener.address))
        address: bytes = entrance.getsockname()
        with far:
            told: Any = FarListener(listener.lifeline, address.hex())
            return await super()._start(far.fileno(), memory, incarnation, told)

    async def _forward(self, entrance: trio.socket.SocketType, address: bytes) -> None:
        with entrance:
            while True:
                caller, _ = await entrance.accept()
                self.num_callers += 1
                self._nursery.start_soon(self._forward_one, trio.SocketStream(caller), address)

    async def _forward_one(self, caller: trio.SocketStream, address: bytes) -> None:
        async with caller:
            await self.cable.wait_whole()
            await trio.testing.wait_all_tasks_blocked(0.01)  # what an earlier connection had sent arrives first
            with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                with suppress(OSError):
                    await listener.connect(address)
                    await self.cable.carry(caller, trio.SocketStream(listener))


def _stream_of(connection: socket.socket) -> trio.SocketStream:
    connection.setblocking(False)
    return trio.SocketStream(trio.socket.from_stdlib_socket(connection))
