"""An engine bench with lower tiers: a test also decides when a move is carried out, and how it fails.

The bench does what the mover would do, over a host tier, a disk in memory, or both. It checks that what a sequence
counts as loaded from a tier was loaded from there for this sequence, and that everything that can be found in a tier
has been stored there.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from quipu.actors.engine.block_manager.host_index import HostIndex
from quipu.actors.engine.block_manager.lower_tier import LowerTier
from quipu.actors.engine.block_manager.segment_index import SegmentIndex
from quipu.actors.engine.block_manager.write_behind import StorePolicy, WriteBehind
from quipu.actors.engine.mover.block_carrier import BlockCarrier
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.engine.scheduler.config import SchedulerConfig
from quipu.actors.messages.accountant import StepReport
from quipu.actors.messages.block_manager import LookUp
from quipu.actors.messages.executor import StepPlan
from quipu.actors.messages.mover import ClearTier, Lend, Move, Moved, MoveLate, MoveResult, TierCleared
from quipu.actors.messages.scheduler import Granted, StepResult
from quipu.actors.messages.tiers import LoadFailure, Tier, TierReport
from quipu.actors.shared.block_keys import KEY_PREFIX_BYTES, chain_image_keys
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.actors.engine.block_manager.proposals import root_of
from tests.actors.engine.engine_bench import EngineBench, images_of
from tests.actors.engine.mover.memory_disk import MemoryDisk


class TieredBench(EngineBench):
    """Keeps moves until a test carries them. Moves into one tier are carried in order."""

    def __init__(self, limits: SchedulerConfig, **options: Any) -> None:
        super().__init__(limits, **options)
        plan, num_slots = self.executor.backend.memory_plan, self.num_host_blocks(limits)
        self.block_bytes = plan.block_bytes
        memory = self.executor.backend.allocate_on_host(num_slots)
        self.store = HostStore(memory, [None] * num_slots, plan.block_bytes)
        self.disk = MemoryDisk(plan.block_bytes)
        self.carrier = BlockCarrier(
            FaultyMemory(self),
            self.executor.tags,
            {Tier.HOST: self.store, Tier.DISK: self.disk},
            block_size=plan.block_size,
            block_bytes=plan.block_bytes,
            numerics="fake",
        )
        self.stores: deque[Move] = deque()
        self.loads: deque[Move] = deque()
        """Loads whose barrier has been passed."""
        self._before_barrier: deque[tuple[Move, list[StepPlan]]] = deque()
        """Other loads, each with the plans that were sent before it."""
        self.fail_copies = 0
        """How many of the next copies raise."""
        self.brought: dict[tuple[int, str], set[int]] = {}
        """By sequence and tier, the positions that were loaded for it."""
        self.lent: list[int] = []
        """Numbers of what peers are copying."""
        self._num_lent = 0
        self.counts = dict.fromkeys(
            (
                *(f"{what} {tier}" for what in ("stored", "loaded", "counted") for tier in ("host", "disk")),
                *LoadFailure,
            ),
            0,
        )

    def num_host_blocks(self, limits: SchedulerConfig) -> int:
        sizes = [limits.num_blocks // 2, limits.num_blocks, 2 * limits.num_blocks]
        return max(1, sizes[limits.max_num_seqs % 3]) if limits.enable_prefix_caching else 0

    def make_tiers(self, limits: SchedulerConfig) -> list[LowerTier]:
        if not limits.enable_prefix_caching:
            return []
        tiers = [LowerTier(Tier.HOST, HostIndex(self.num_host_blocks(limits)))]
        if limits.max_num_seqs % 2:
            index = SegmentIndex(2 + limits.num_blocks % 3, max(1, limits.num_blocks // 2))
            policy = StorePolicy.REUSED if limits.max_num_seqs % 4 == 1 else StorePolicy.ALL
            tiers.append(LowerTier(Tier.DISK, index, WriteBehind(index, policy, limits.num_blocks)))
        return tiers if limits.max_num_seqs % 5 or len(tiers) == 1 else tiers[1:]

    # ------------------------------------------------------------ actions of tests

    def carry(self, direction: deque[Move], at: int = 0) -> MoveResult:
        """Carry out a move of a direction, and let block manager and scheduler handle its result."""
        move = direction[at]
        del direction[at]
        tiers = self.manager.tiers
        assert tiers is not None
        load = tiers.loads._under_way.get(move.number)
        result = self.carrier.carry(move)
        moved = range(len(move.keys)) if isinstance(result, Moved) else result.moved
        if load is not None and load.epoch == self.manager._publications.epoch:
            size, first = self.limits.block_size, load.parts[move.number].stretch.first
            positions = self.brought.setdefault((load.sequence_id, move.source.value), set())
            for index in moved:
                positions.update(range((first + index) * size, (first + index + 1) * size))
        over = tiers.end_move(result)
        check_manager(self.manager)
        self.check_tiers()
        self._take_moves()
        if over is not None:
            self.batcher.on_loads_over(over.sequence_ids)
            self.pump()
        return result

    def tell_late(self) -> None:
        """Report that the first load is late, whether its barrier has been passed or not."""
        tiers = self.manager.tiers
        assert tiers is not None
        move = next(iter(self.loads), None) or self._before_barrier[0][0]
        over = tiers.on_late(MoveLate(move.number))
        check_manager(self.manager)
        if over is not None:
            self.batcher.on_loads_over(over.sequence_ids)
            self.pump()

    def lend(self, prompt: list[int]) -> None:
        """Lend a peer what is there of a prompt, between two grants."""
        self._num_lent += 1
        self.lent.append(self._num_lent)
        self.manager.lending.lend(Lend(self._num_lent, self._keys_of(prompt), waits=False))
        check_manager(self.manager)

    def end_lent(self, at: int) -> None:
        """Note that a peer has copied what it was lent."""
        if self.manager.lending.end(self.lent.pop(at)):
            self.batcher.announce_keys()
            self.pump()

    def prefetch(self, prompt: list[int]) -> None:
        """Begin to load what is there of a prompt in lower tiers, between two grants."""
        root = root_of("a", self.limits.block_size)
        self.manager.look_up(LookUp(1, prompt, root, self._keys_of(prompt), prefetch=True), self.now)
        check_manager(self.manager)
        self._take_moves()

    def _keys_of(self, prompt: list[int]) -> list[bytes]:
        if not self.limits.enable_prefix_caching:
            return []
        size, images = self.limits.block_size, images_of(prompt, self.limits.whole_image_tokens)
        return chain_image_keys(root_of("a", size), prompt, size, images, 0)

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
        while self.lent:
            self.end_lent(0)
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
        self.lent.clear()
        super().rejoin()

    # ------------------------------------------------------------ checks

    def check_tiers(self) -> None:
        """Check that the slot of every key that can be found in a tier has been stored."""
        for tier in self.lower_tiers():
            for key in tier.index.all_keys():
                slot = tier.index.slot_of(key)
                assert slot is not None
                header = self.store.headers[slot] if tier.tier is Tier.HOST else self.disk.blocks[slot][0]
                assert header is not None, f"{key.hex()} can be found, but has never been stored"

    def lower_tiers(self) -> list[LowerTier]:
        return [] if self.manager.tiers is None else list(self.manager.tiers.by_tier.values())

    def findable_keys(self) -> set[bytes]:
        lower = {key[:KEY_PREFIX_BYTES] for tier in self.lower_tiers() for key in tier.index.all_keys()}
        return super().findable_keys() | lower

    def check_at_rest(self) -> None:
        super().check_at_rest()
        tiers = self.manager.tiers
        if tiers is not None:
            assert not self.loads and not self._before_barrier and not list(tiers.loads.tables()), (
                "a load that nobody carries out holds blocks"
            )
            assert not tiers.loads._loaded and not tiers.loads._by_key, (
                "a load of a sequence that has ended is remembered"
            )
            assert not tiers.stores.are_under_way and not any(tier.store for tier in self.lower_tiers())
            for tier in self.lower_tiers():
                assert not tier.index._num_readers  # type: ignore[attr-defined]  # every index of the bench has it

    def _check_grant(self, granted: Granted) -> None:
        super()._check_grant(granted)
        assert not set(granted.loading_ids).intersection(granted.admitted_ids)
        self._take_moves()

    def _take_moves(self) -> None:
        """Take the moves that have begun since the last call."""
        tiers = self.manager.tiers
        for move in [] if tiers is None else tiers.take_moves():
            if isinstance(move, ClearTier):
                self.carrier.stores[move.tier].clear()
                assert tiers is not None
                tiers.by_tier[move.tier].on_cleared(TierCleared(move.tier))
            elif move.target is Tier.DEVICE:
                self._before_barrier.append((move, list(self.plans)))
            else:
                self.stores.append(move)
        self._pass_barriers()

    def _hear_report(self, report: StepReport) -> None:
        super()._hear_report(report)
        for tier_report in report.tiers:
            self._add(tier_report)
        assert len(report.admitted_tiers) == len(report.admitted_tier_spans)
        for sequence_id, reused, tiers, by_tier in zip(
            report.admitted_ids, report.admitted_reused, report.admitted_tiers, report.admitted_tier_spans, strict=False
        ):
            assert tiers is not None and sum(tiers.values()) == reused
            for tier, spans in by_tier.items():
                positions = {at for start, end in zip(spans[::2], spans[1::2], strict=True) for at in range(start, end)}
                assert len(positions) == tiers[tier]
                brought = self.brought.get((sequence_id, tier), set())
                assert positions <= brought, "positions are counted as loaded that were not"
                self.counts[f"counted {tier}"] += len(positions)

    def _add(self, report: TierReport) -> None:
        self.counts[f"stored {report.tier.value}"] += report.num_stored
        self.counts[f"loaded {report.tier.value}"] += report.num_loaded
        for reason, count in report.failed_loads.items():
            self.counts[reason] += count


class FaultyMemory:
    """The bench's backend, with copies that raise."""

    def __init__(self, bench: TieredBench) -> None:
        self._bench = bench

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return self._bench.executor.backend.allocate_on_host(num_blocks)

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
