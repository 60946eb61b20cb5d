"""Copies between device and host, and the headers that decide what may be loaded again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.executor.block_tags import BlockTags
from quipu.actors.engine.mover.block_carrier import BlockCarrier
from quipu.actors.engine.mover.block_header import checksum_of, numerics_digest
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.engine.mover.slot_store import MOST_TOGETHER
from quipu.actors.messages.mover import Move, Moved, MoveFailed
from quipu.actors.messages.tiers import LoadFailure, Tier
from quipu.kernels.backend import BackendConfig
from quipu.kernels.fake import FakeBackend

SIZE = 4
NUM_BLOCKS = 64
KEYS = [bytes([index]) * 32 for index in range(NUM_BLOCKS)]


class Memory(FakeBackend):
    """A backend whose blocks hold their own numbers, and that calls `before` and `during` when it copies."""

    def __init__(self) -> None:
        super().__init__(
            BackendConfig(
                model_path=Path(),
                dtype="auto",
                load_format="auto",
                block_size=SIZE,
                num_blocks=NUM_BLOCKS,
                max_num_seqs=1,
                max_model_len=SIZE * NUM_BLOCKS,
                max_num_batched_tokens=16,
            )
        )
        for block in range(NUM_BLOCKS):
            self.write_halves(block, block)
        self.before: Callable[[], object] = bool
        self.during: Callable[[], object] = bool

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self.before()
        super().read_blocks(blocks, to)
        self.during()

    def write_halves(self, block: int, value: int) -> None:
        """Write a block slot by slot, as a pass would."""
        for slot in range(block * SIZE, (block + 1) * SIZE):
            self.blocks.slots[slot] = value

    def contents(self, blocks: list[int]) -> list[int]:
        return [self.blocks.of(block)[0] for block in blocks]


@attrs.define
class Bench:
    memory: Memory
    tags: BlockTags
    carrier: BlockCarrier
    store: HostStore

    def move(self, target: Tier, blocks: list[int], slots: list[int], keys: list[bytes]) -> Moved | MoveFailed:
        if target is Tier.HOST:
            move = Move(1, Tier.DEVICE, Tier.HOST, blocks, slots, keys)
        else:
            move = Move(1, Tier.HOST, Tier.DEVICE, slots, blocks, keys)
        result = self.carrier.carry(move)
        return Moved(1) if isinstance(result, Moved) else result


def carrier_over(memory: Memory, tags: BlockTags, store: HostStore, **options: Any) -> BlockCarrier:
    size = memory.memory_plan.block_bytes
    stores = {Tier.HOST: store}
    return BlockCarrier(memory, tags, stores, block_size=SIZE, block_bytes=size, numerics="here", **options)


def store_over(memory: Memory) -> HostStore:
    return HostStore(memory.allocate_on_host(40), [None] * 40, memory.memory_plan.block_bytes)


@pytest.fixture
def bench() -> Bench:
    memory, tags = Memory(), BlockTags(NUM_BLOCKS, SIZE)
    tags.set_loaded(range(1, 40), KEYS[1:40])
    store = store_over(memory)
    return Bench(memory, tags, carrier_over(memory, tags, store), store)


def test_there_and_back(bench: Bench) -> None:
    """Stored blocks are loaded into other blocks, which have tags afterwards, whatever the order of the slots."""
    blocks = list(range(1, 31))
    slots = [*range(3, 3 + MOST_TOGETHER + 2), *range(39, 39 - (30 - MOST_TOGETHER - 2), -1)]
    assert bench.move(Tier.HOST, blocks, slots, KEYS[1:31]) == Moved(1)
    targets = list(range(33, 63))
    assert bench.move(Tier.DEVICE, targets, slots, KEYS[1:31]) == Moved(1)
    assert bench.memory.contents(targets) == blocks
    assert all(bench.tags.contains(block, key) for block, key in zip(targets, KEYS[1:31], strict=True))


def test_block_that_is_written_while_it_is_stored(bench: Bench) -> None:
    """A block whose tag is removed or replaced during the copy is not stored, even if the key is the same; the others
    are."""

    def write() -> None:
        bench.tags.forget([2])
        bench.tags.set_loaded([3], KEYS[3:4])

    bench.memory.during = write
    result = bench.move(Tier.HOST, [1, 2, 3, 4], [0, 1, 2, 3], KEYS[1:5])
    assert result == MoveFailed(1, [0, 3], {})
    assert [header is not None for header in bench.store.headers[:4]] == [True, False, False, True]


def test_block_without_the_expected_tag(bench: Bench) -> None:
    """A block whose tag in the executor has another key, or that has no tag, is not stored."""
    bench.tags.forget([2])
    assert bench.move(Tier.HOST, [1, 2, 3], [0, 1, 2], [KEYS[1], KEYS[2], KEYS[9]]) == MoveFailed(1, [0], {})


def test_failed_store_empties_its_slot(bench: Bench) -> None:
    """A slot whose store failed contains nothing, not what it contained before."""
    assert bench.move(Tier.HOST, [1], [0], KEYS[1:2]) == Moved(1)
    assert bench.move(Tier.HOST, [2], [0], KEYS[9:10]) == MoveFailed(1, [], {})
    assert bench.move(Tier.DEVICE, [50], [0], KEYS[1:2]) == MoveFailed(1, [], {0: LoadFailure.MISSING})


def test_load_ends_at_the_first_wrong_block(bench: Bench) -> None:
    """Blocks before the corrupt one are loaded; those after it are not written, and its own target has no tag."""
    bench.move(Tier.HOST, [1, 2, 3, 4], [0, 1, 2, 3], KEYS[1:5])
    bench.store.bytes[2 * bench.memory.memory_plan.block_bytes] ^= 1
    bench.tags.set_loaded([50, 51, 52, 53], KEYS[50:54])
    result = bench.move(Tier.DEVICE, [50, 51, 52, 53], [0, 1, 2, 3], KEYS[1:5])
    assert result == MoveFailed(1, [0, 1], {2: LoadFailure.CORRUPT})
    assert bench.memory.contents([50, 51, 52, 53]) == [1, 2, 52, 53]
    assert bench.tags.contains(51, KEYS[2]) and not bench.tags.contains(52, KEYS[3])


@pytest.mark.parametrize("is_fatal", [False, True])
def test_error_of_a_copy(*, is_fatal: bool) -> None:
    """An error of a copy is reported; if it is fatal to all later moves, it is raised."""
    memory, tags = Memory(), BlockTags(NUM_BLOCKS, SIZE)
    tags.set_loaded([1], KEYS[1:2])
    carrier = carrier_over(
        memory, tags, store_over(memory), is_fatal=lambda error: is_fatal and str(error) == "device lost"
    )

    def fail() -> None:
        raise RuntimeError("device lost")

    memory.during = fail
    move = Move(1, Tier.DEVICE, Tier.HOST, [1], [0], KEYS[1:2])
    if is_fatal:
        with pytest.raises(RuntimeError, match="device lost"):
            carrier.carry(move)
    else:
        assert carrier.carry(move) == MoveFailed(1, [], {}, "RuntimeError: device lost")


def test_stores_beside_a_writer() -> None:
    """While a writer, which removes a block's tag before it writes, is at work, no block is stored with torn bytes."""
    memory, tags = Memory(), BlockTags(NUM_BLOCKS, SIZE)
    plan, store = memory.memory_plan, store_over(memory)
    carrier = carrier_over(memory, tags, store)
    blocks = list(range(1, 9))
    done, written = threading.Event(), threading.Event()

    def write() -> None:
        version = 0
        while not done.is_set():
            version += 1
            for block in blocks:
                tags.forget([block])
                memory.write_halves(block, version)
                written.set()
                tags.set_loaded([block], [version.to_bytes(32, "big")])

    writer = threading.Thread(target=write)
    writer.start()
    num_carried = num_stored = 0

    def let_write() -> None:
        """Let the writer go on before some of the copies, even if it would not be scheduled."""
        if num_carried % 10 == 0:
            written.clear()
            assert written.wait(60)

    memory.before = let_write
    deadline_s = time.monotonic() + 60
    try:
        while num_carried < 300 or num_stored < 100:
            assert time.monotonic() < deadline_s, "hardly any block is stored beside the writer"
            num_carried += 1
            tag = tags.tag_of(5)
            keys = [KEYS[0] if tag is None or tag.key is None else tag.key] * len(blocks)
            result = carrier.carry(Move(1, Tier.DEVICE, Tier.HOST, blocks, list(range(8)), keys))
            for at in range(8) if isinstance(result, Moved) else result.moved:
                values = memoryview(bytes(store.bytes[at * plan.block_bytes : (at + 1) * plan.block_bytes])).cast("q")
                assert {*values} == {int.from_bytes(keys[at], "big")}
                num_stored += 1
    finally:
        done.set()
        writer.join()


@given(st.integers(0, 40_000), st.integers(0, 2**32))
def test_any_flipped_bit_changes_the_checksum(num_bytes: int, seed: int) -> None:
    """Flipping any one bit changes the checksum, however many bytes there are."""
    memory = bytearray((7 * at + at // 256) % 256 for at in range(num_bytes))
    before = checksum_of(memoryview(memory))
    assert checksum_of(memoryview(bytearray(memory))) == before
    if num_bytes:
        draw = random.Random(seed)
        memory[draw.randrange(num_bytes)] ^= 1 << draw.randrange(8)
        assert checksum_of(memoryview(memory)) != before


def test_numerics_digest() -> None:
    """Each argument changes the digest."""
    digests = {
        numerics_digest("a", "w", 16, 512),
        numerics_digest("b", "w", 16, 512),
        numerics_digest("a", "x", 16, 512),
        numerics_digest("a", "w", 8, 512),
        numerics_digest("a", "w", 16, 1024),
    }
    assert len(digests) == 5


def test_loaded_by_several_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large load ends at the first corrupt block, as a small one does, whichever thread finds it."""
    monkeypatch.setattr("quipu.actors.engine.mover.block_carrier.LOADED_TOGETHER", 1)
    blocks, targets = list(range(1, 31)), list(range(33, 63))
    bench.move(Tier.HOST, blocks, blocks, KEYS[1:31])
    assert bench.move(Tier.DEVICE, targets, blocks, KEYS[1:31]) == Moved(1)
    bench.store.bytes[21 * bench.memory.memory_plan.block_bytes] ^= 1
    result = bench.move(Tier.DEVICE, targets, blocks, KEYS[1:31])
    assert result == MoveFailed(1, list(range(20)), {20: LoadFailure.CORRUPT})
    assert bench.memory.contents(targets) == blocks
