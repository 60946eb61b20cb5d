"""An engine bench with a host tier: a test also decides when a move is carried out, and how it fails.

The bench does what the mover would do. It checks that what a sequence counts as loaded from the host was loaded for
this sequence, and that everything that can be found on the host has been stored there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.mover import Move, Moved, MoveLate, MoveResult
from quipu.actors.messages.scheduler import Granted, StepResult
from quipu.actors.messages.tiers import LoadFailure, Tier, TierReport
from quipu.actors.shared.block_keys import KEY_PREFIX_BYTES
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.engine_bench import EngineBench


class TieredBench(EngineBench):
    """Keeps moves until a test carries them. Moves of one direction are carried in order."""

    def __init__(self, limits: SchedulerConfig, **options: Any) -> None:
        super().__init__(limits, **options)
        plan, num_slots = self.executor.backend.memory_plan, self.num_host_blocks(limits)
        self.store = HostStore(
            FaultyMemory(self),
            self.executor.tags,
            self.executor.backend.allocate_on_host(num_slots),
            [None] * num_slots,
            block_size=plan.block_size,
            block_bytes=plan.block_bytes,
            numerics="fake",
        )
        self.block_bytes = plan.block_bytes
        self.stores: deque[Move] = deque()
        self.loads: deque[Move] = deque()
        """Loads whose barrier has been passed."""
        self._before_barrier: deque[tuple[Move, list[StepPlan]]] = deque()
        """Other loads, each with the plans that were sent before it."""
        self.fail_copies = 0
        """How many of the next copies raise."""
        self.brought: dict[int, set[int]] = {}
        """By sequence, the positions that were loaded for it."""
        self.counts = dict.fromkeys(("stored", "loaded", *LoadFailure, "counted"), 0)

    def num_host_blocks(self, limits: SchedulerConfig) -> int:
        sizes = [limits.num_blocks // 2, limits.num_blocks, 2 * limits.num_blocks]
        return max(1, sizes[limits.max_num_seqs % 3]) if limits.enable_prefix_caching else 0

    # ------------------------------------------------------------ actions of tests

    def carry(self, direction: deque[Move]) -> MoveResult:
        """Carry out the next move of a direction, and let block manager and scheduler handle its result."""
        move = direction.popleft()
        host = self.manager.host
        assert host is not None
        load = host.loads._under_way.get(move.number)
        result = self.store.carry(move)
        moved = range(len(move.blocks)) if isinstance(result, Moved) else result.moved
        if load is not None and load.epoch == self.manager._publications.epoch:
            size = self.limits.block_size
            positions = self.brought.setdefault(load.sequence_id, set())
            for at in moved:
                positions.update(range((load.first + at) * size, (load.first + at + 1) * size))
        over = host.end_move(result)
        check_manager(self.manager)
        self.check_host()
        if over is not None:
            self.batcher.on_loads_over(over.sequence_ids)
            self.pump()
        return result

    def tell_late(self) -> None:
        """Report that the first load is late, whether its barrier has been passed or not."""
        host = self.manager.host
        assert host is not None
        move = next(iter(self.loads), None) or self._before_barrier[0][0]
        over = host.on_late(MoveLate(move.number))
        check_manager(self.manager)
        if over is not None:
            self.batcher.on_loads_over(over.sequence_ids)
            self.pump()

    @property
    def num_loads(self) -> int:
        """Loads under way."""
        return len(self.loads) + len(self._before_barrier)

    def run_one(self) -> StepResult:
        result = super().run_one()
        self._pass_barriers()
        return result

    def _pass_barriers(self) -> None:
        while self._before_barrier and not any(plan in self.plans for plan in self._before_barrier[0][1]):
            self.loads.append(self._before_barrier.popleft()[0])

    def flip_bit(self, slot: int, bit: int) -> None:
        """Flip a bit of a slot's bytes, which nothing is told of."""
        self.store.bytes[slot * self.block_bytes + bit // 8 % self.block_bytes] ^= 1 << bit % 8

    def misplace(self, slot: int, other: int) -> None:
        """Put into a slot a whole block that belongs elsewhere, with its header."""
        size, memory = self.block_bytes, self.store.bytes
        memory[slot * size : (slot + 1) * size] = memory[other * size : (other + 1) * size]
        self.store.headers[slot] = self.store.headers[other]

    def finish(self) -> None:
        """Run plans and carry out moves until nothing is left."""
        for _ in range(10_000):
            if self.loads:
                self.carry(self.loads)
            elif self.results:
                self.handle_one()
            elif self.plans:
                self.run_one()
            elif self.stores:
                self.carry(self.stores)
            else:
                break
        else:
            raise AssertionError("the engine never stops taking steps")
        super().finish()

    def rejoin(self) -> None:
        self.stores.clear()
        self.loads.clear()
        self._before_barrier.clear()
        self.brought.clear()
        super().rejoin()

    # ------------------------------------------------------------ checks

    def check_host(self) -> None:
        """Check that the slot of every key that can be found on the host has been stored."""
        host = self.manager.host
        assert host is not None
        for key, slot in host.index._slot_of.items():
            assert self.store.headers[slot] is not None, f"{key.hex()} can be found, but has never been stored"

    def findable_keys(self) -> set[bytes]:
        host = self.manager.host
        on_host = [] if host is None else host.index.keys()
        return super().findable_keys().union(key[:KEY_PREFIX_BYTES] for key in on_host)

    def check_at_rest(self) -> None:
        super().check_at_rest()
        host = self.manager.host
        if host is not None:
            assert not self.loads and not self._before_barrier and not list(host.loads.tables()), (
                "a load that nobody carries out holds blocks"
            )
            assert not host.loads._loaded and not host.loads._by_key, (
                "a load of a sequence that has ended is remembered"
            )
            assert not host.index._num_readers and not host.index._leaving

    def _check_grant(self, granted: Granted) -> None:
        super()._check_grant(granted)
        assert not set(granted.loading_ids).intersection(granted.admitted_ids)
        host = self.manager.host
        if host is not None:
            for move in host.take_moves():
                if move.target is Tier.DEVICE:
                    self._before_barrier.append((move, list(self.plans)))
                else:
                    self.stores.append(move)
            self._pass_barriers()

    def _hear_report(self, report: StepReport) -> None:
        super()._hear_report(report)
        for of_tier in report.tiers:
            self._add(of_tier)
        assert len(report.admitted_tiers) == len(report.admitted_tier_spans)
        for sequence_id, reused, tiers, spans in zip(
            report.admitted_ids, report.admitted_reused, report.admitted_tiers, report.admitted_tier_spans, strict=False
        ):
            assert tiers is not None and sum(tiers.values()) == reused
            ends = spans.get("host", [])
            positions = {at for start, end in zip(ends[::2], ends[1::2], strict=True) for at in range(start, end)}
            assert len(positions) == tiers.get("host", 0)
            assert positions <= self.brought.get(sequence_id, set()), "positions are counted as loaded that were not"
            self.counts["counted"] += len(positions)

    def _add(self, report: TierReport) -> None:
        self.counts["stored"] += report.num_stored
        self.counts["loaded"] += report.num_loaded
        for reason, count in report.failed_loads.items():
            self.counts[reason] += count


class FaultyMemory:
    """The bench's backend, with copies that raise."""

    def __init__(self, bench: TieredBench) -> None:
        self._bench = bench

    def read_blocks(self, blocks: Any, to: memoryview) -> None:
        self._fail()
        self._bench.executor.backend.read_blocks(blocks, to)

    def write_blocks(self, blocks: Any, source: memoryview) -> None:
        self._fail()
        self._bench.executor.backend.write_blocks(blocks, source)

    def _fail(self) -> None:
        if self._bench.fail_copies:
            self._bench.fail_copies -= 1
            raise OSError("injected fault: this copy fails")
