"""Applies the faults of a plan that come at a time: to engines, wires, the ledger's disk, clocks and tiers."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import trio

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.mover.disk_io import DiskCalls
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.messages.tiers import Tier
from quipu.actors.request_desk.adapters import AdapterRefused
from quipu.actors.request_desk.health import CannotMove, DrainMode, LastEngine, UnknownEngine
from quipu.actors.wiring import Runtime
from quipu.kernels.fake import Dials
from tests.simulation.arrival import STEP_S
from tests.simulation.drawn_faults import Fault
from tests.simulation.engine_host import SimulatedHost
from tests.simulation.fake_grammars import MaskFaults
from tests.simulation.memory_bucket import BucketDials
from tests.simulation.memory_ledger import DiskDials
from tests.simulation.seen import Applied
from tests.simulation.tap import Tap
from tests.simulation.virtual_time import Clocks

MODES = tuple(DrainMode)
ROLES = tuple(EngineRole)
HANGING_S = 40.0
"""Longer than a load is waited for."""


@attrs.define(eq=False)
class TierDiskDials:
    """Faults of the disk on which blocks are kept."""

    fails_reads: bool = False
    fails_writes: bool = False
    num_bits_to_flip: int = 0


@contextmanager
def failing_disk(dials: TierDiskDials) -> Iterator[None]:
    """Have the system calls of tiers on disks fail as the dials say."""
    read, write = DiskCalls.read, DiskCalls.write

    def failing_read(calls: DiskCalls, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if dials.fails_reads:
            raise OSError(errno.EIO, "Input/output error")
        count = read(calls, descriptor, buffers, offset)
        if dials.num_bits_to_flip and count:
            dials.num_bits_to_flip -= 1
            buffers[-1][len(buffers[-1]) // 3] ^= 1
        return count

    def failing_write(calls: DiskCalls, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if dials.fails_writes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(calls, descriptor, buffers, offset)

    with mock.patch.multiple(DiskCalls, read=failing_read, write=failing_write):
        yield


@attrs.define(eq=False)
class Disturber:
    _runtime: Runtime
    _disk: DiskDials
    _dials: Mapping[int, Dials]
    _masks: MaskFaults
    _bucket: BucketDials
    _clocks: Clocks
    _tap: Tap
    _began: float
    disk_dials: TierDiskDials = attrs.field(factory=TierDiskDials)
    happened: list[Applied] = attrs.field(factory=list)
    applied: list[str] = attrs.field(factory=list)

    async def apply(self, fault: Fault) -> None:
        """Wait for a fault's time, apply it, and undo it where it lasts."""
        await trio.sleep_until(self._began + fault.at_s)
        self._tap.note("fault", str(fault))
        if not await self._do(fault):
            return
        self.applied.append(str(fault))
        over_s = trio.current_time() - self._began
        self.happened.append(Applied(fault.number, fault.kind, fault.at_s, over_s))

    async def _do(self, fault: Fault) -> bool:
        """Do what the fault's kind says; return whether that was possible."""
        disk = self._disk
        match fault.kind:
            case "disk full":
                disk.is_full = True
                await trio.sleep(fault.lasts_s)
                disk.is_full = False
            case "writes fail":
                disk.fails_writes = True
                await trio.sleep(fault.lasts_s)
                disk.fails_writes = False
            case "short writes":
                disk.writes_half = True
                await trio.sleep(fault.lasts_s)
                disk.writes_half = False
            case "syncs fail":
                disk.fails_syncs = True
                await trio.sleep(fault.lasts_s)
                disk.fails_syncs = False
            case "clock step":
                self._clocks.step_s += (fault.amount - 20) * 1000.0
            case "reset cache":
                self._runtime.desk.reset_prefix_cache()
            case "add engine":
                self._runtime.desk.control.add(1)
            case "lose mask":
                self._masks.num_to_lose += min(fault.amount, 3)
            case "disk reads fail":
                await _for_a_while(self.disk_dials, "fails_reads", fault.lasts_s)
            case "disk writes fail":
                await _for_a_while(self.disk_dials, "fails_writes", fault.lasts_s)
            case "object reads fail":
                await _for_a_while(self._bucket, "fails_reads", fault.lasts_s)
            case "object writes fail":
                await _for_a_while(self._bucket, "fails_writes", fault.lasts_s)
            case "objects are damaged":
                self._bucket.num_to_damage += fault.amount
            case "objects are lost":
                self._bucket.num_to_lose += fault.amount
            case "disk bits flip":
                self.disk_dials.num_bits_to_flip += fault.amount
            case "reload adapter":
                return await self._reload(fault)
            case "change role":
                return self._change_role(fault)
            case "drain engine" | "move requests":
                return self._leave_engine(fault)
            case _:
                return await self._do_to_engine(fault)
        return True

    async def _reload(self, fault: Fault) -> bool:
        """Unload an adapter once its requests have ended, and load it again."""
        adapters = self._runtime.desk.adapters
        served: dict[str, Any] = dict(adapters.served())
        if not served:
            return False
        name = sorted(served)[fault.amount % len(served)]
        await adapters.unload(name)
        while True:
            try:
                await adapters.load(name, served[name].folder)
                return True
            except AdapterRefused:  # no engine is ready
                await trio.sleep(STEP_S)

    def _change_role(self, fault: Fault) -> bool:
        try:
            self._runtime.desk.control.set_role(fault.engine, ROLES[fault.amount % len(ROLES)])
        except UnknownEngine:
            return False
        return True

    def _leave_engine(self, fault: Fault) -> bool:
        control = self._runtime.desk.control
        try:
            if fault.kind == "drain engine":
                control.drain(fault.engine, MODES[fault.amount % len(MODES)], fault.lasts_s)
            else:
                control.move(fault.engine, fault.amount)
        except (LastEngine, UnknownEngine, CannotMove):
            return False
        return True

    async def _do_to_engine(self, fault: Fault) -> bool:
        host = self._runtime.hosts.get(fault.engine)
        dials = self._dials.get(fault.engine)
        if not isinstance(host, SimulatedHost) or host.process is None or host.wire is None or dials is None:
            return False
        wire, door = host.wire, host.door
        match fault.kind:
            case "kill engine":
                host.process.kill()
                if not wire.is_held:
                    wire.cut()
            case "cut wire":
                wire.cut()
            case "cut in a frame":
                wire.to_host.bytes_until_cut = fault.amount
            case "hold wire":
                assert door is not None
                wire.hold()
                door.is_unreachable = True
                await trio.sleep(4 * fault.lasts_s)
                door.is_unreachable = False
                wire.let_go()
            case "repeat report":
                wire.to_host.frames_to_repeat += fault.amount
            case "lose report":
                wire.to_host.frames_to_lose += 1
            case "fail passes":
                dials.fail_steps += min(fault.amount, 3)
            case "no memory":
                dials.max_tokens_in_memory = fault.amount
                await trio.sleep(fault.lasts_s)
                dials.max_tokens_in_memory = None
            case "slow passes":
                dials.step_seconds = fault.amount * STEP_S
                await trio.sleep(fault.lasts_s)
                dials.step_seconds = STEP_S
            case "slow copies" | "hang copies":
                copy_s = dials.move_seconds = fault.amount * STEP_S if fault.kind == "slow copies" else HANGING_S
                await trio.sleep(fault.lasts_s)
                dials.move_seconds = 0.0
                await trio.sleep(copy_s)
            case "flip bit":
                return self._flip_bit(host, fault.amount)
            case _:
                raise ValueError(f"no such fault: {fault.kind}")
        return True

    def _flip_bit(self, host: SimulatedHost, amount: int) -> bool:
        assert host.process is not None
        carrier = host.process.engine.carrier
        store = None if carrier is None else carrier.stores.get(Tier.HOST)
        if not isinstance(store, HostStore):
            return False
        held = [at for at, header in enumerate(store.headers) if header is not None]
        if not held:
            return False
        size = len(store.bytes) // len(store.headers)
        for place in held[:amount]:
            store.bytes[place * size + amount % size] ^= 1 << amount % 8
        return True


async def _for_a_while(dials: object, dial: str, lasts_s: float) -> None:
    setattr(dials, dial, True)
    await trio.sleep(lasts_s)
    setattr(dials, dial, False)
