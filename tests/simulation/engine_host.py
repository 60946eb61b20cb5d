"""Engines of a simulation: the real host and the real server of an engine process, in one loop, over a `Wire`.

ConnectedHost (the web side's) ══ Wire ══ serve_until_unwanted (the engine process's)
      SimulatedProcess stands for the process, Door for the listener through which it may come back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import attrs
import trio

from quipu import __version__
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.engine.engine import Engine
from quipu.actors.engine.engine_server import serve_until_unwanted
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.engine.peers.peer_link import PeerNetwork
from quipu.actors.fleet.processes.connected_host import ConnectedHost
from quipu.actors.fleet.processes.engine_child import EngineChild
from quipu.actors.fleet.processes.greeting import greeting
from quipu.actors.fleet.processes.heartbeat import HEARTBEAT_INTERVAL_S
from quipu.actors.fleet.processes.reconnection import RETRY_S, Admission
from quipu.actors.fleet.supervisor import Death
from quipu.actors.shared.error_groups import first_leaf
from tests.simulation.wire import Wire, WireEnd

REPORT = 4
"""The number of a StepReport on the wire; a report of one token each has another, and only large steps have those."""


def is_report(frame: bytes) -> bool:
    return frame[8:10] == REPORT.to_bytes(2, "little")


@attrs.define(eq=False)
class Door:
    """Where the process of one host may connect again: implements `Entrance` for the host, `Way` for the process."""

    on_wire: Callable[[Wire], None]
    is_closed: bool = False
    is_unreachable: bool = False
    """The way back is cut."""
    _callers: list[tuple[WireEnd, WireEnd]] = attrs.field(factory=list)
    _admitted: dict[int, int] = attrs.field(factory=dict)
    _changed: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)

    async def wait_for_caller(self) -> None:
        while not self._callers:
            await self._changed.park()

    async def admit(self, incarnation: int) -> trio.SocketStream:
        await self.wait_for_caller()
        near, far = self._callers.pop()
        self._admitted[id(far)] = incarnation
        self._changed.unpark_all()
        return cast(trio.SocketStream, near)

    def close(self) -> None:
        self.is_closed = True
        self._changed.unpark_all()

    def is_open(self) -> bool:
        return not self.is_closed

    async def connect(self) -> Admission | None:
        while self.is_unreachable and not self.is_closed:
            await trio.sleep(RETRY_S)
        if self.is_closed:
            return None
        wire = Wire(is_report)
        self.on_wire(wire)
        ends = wire.ends()
        self._callers.append(ends)
        self._changed.unpark_all()
        try:
            while id(ends[1]) not in self._admitted:
                if self.is_closed:
                    return None
                await self._changed.park()
        except BaseException:
            wire.cut()  # as the kernel does when a process is killed
            raise
        return Admission(cast(Any, ends[1]), self._admitted.pop(id(ends[1])))


@attrs.define(eq=False)
class SimulatedProcess:
    """What a host knows of an engine's process."""

    engine: Engine
    _scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    _ended: trio.Event = attrs.field(factory=trio.Event)
    _why: str = "it was killed"
    _step_ids: tuple[int, ...] | None = None

    async def run(self, admission: Admission, door: Door) -> None:
        """Serve until nobody wants it, an actor raises, or it is killed."""
        try:
            with self._scope:
                await serve_until_unwanted(admission, self.engine, door, HEARTBEAT_INTERVAL_S)
                self._why = "it ended"
        except* Exception as group:
            error = first_leaf(group)
            self._why = f"{type(error).__name__}: {error}"
        finally:
            step = self.engine.executor.running_step
            self._step_ids = None if step is None else tuple(step.sequence_ids)
            self.engine.close()
            self.engine.executor.close()
            self._ended.set()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        await self._ended.wait()

    def kill(self) -> None:
        self._scope.cancel()

    def step_ids(self) -> tuple[int, ...] | None:
        step = self.engine.executor.running_step
        return self._step_ids if step is None else tuple(step.sequence_ids)

    async def explain(self) -> Death:
        return Death(self._why)

    def release(self) -> None:
        pass


class SimulatedHost(ConnectedHost):
    """Hosts one engine after the other. `wire` and `process` are those of the last one."""

    def __init__(
        self,
        nursery: trio.Nursery,
        config: EngineConfig,
        load: Callable[[EngineConfig], Executor],
        network: PeerNetwork | None,
        step_timeout_s: float,
    ) -> None:
        super().__init__(step_timeout_s=step_timeout_s)
        self._nursery = nursery
        self._config = config
        self._load = load
        self._network = network
        self.wire: Wire | None = None
        self.process: SimulatedProcess | None = None
        self.door: Door | None = None

    def note_wire(self, wire: Wire) -> None:
        self.wire = wire

    async def _start_child(self, incarnation: int) -> tuple[EngineChild, trio.SocketStream]:
        await trio.lowlevel.checkpoint()
        wire = self.wire = Wire(is_report)
        near, far = wire.ends()
        wire.put(wire.to_host, greeting(__version__))
        self.door = Door(self.note_wire)
        self.process = SimulatedProcess(Engine(self._config, self._load(self._config), self._network))
        self._nursery.start_soon(self.process.run, Admission(cast(Any, far), incarnation), self.door)
        stream = cast(Any, near)
        return EngineChild(self.process, self.door, stream), stream
