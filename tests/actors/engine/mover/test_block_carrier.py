"""Moves to and from a disk, and between tiers: what is copied, what is noticed, and what an error means."""

from __future__ import annotations

import attrs
import pytest

from quipu.actors.engine.executor.block_tags import BlockTags
from quipu.actors.engine.mover.block_carrier import BlockCarrier
from quipu.actors.engine.mover.block_header import BlockHeader, checksum_of
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.messages.mover import Move, Moved, MoveFailed
from quipu.actors.messages.tiers import LoadFailure, Tier
from tests.actors.engine.mover.memory_disk import MemoryDisk
from tests.actors.engine.mover.test_host_store import KEYS, NUM_BLOCKS, SIZE, Memory, store_over


@attrs.define
class Tiers:
    memory: Memory
    tags: BlockTags
    host: HostStore
    disk: MemoryDisk
    carrier: BlockCarrier

    def move(self, source: Tier, target: Tier, sources: list[int], targets: list[int]) -> Moved | MoveFailed:
        """Move blocks whose keys are those of their first numbers on the device."""
        keys = [KEYS[1 + at] for at in range(len(sources))]
        result = self.carrier.carry(Move(1, source, target, sources, targets, keys))
        return Moved(1) if isinstance(result, Moved) else result


@pytest.fixture
def tiers() -> Tiers:
    memory, tags = Memory(), BlockTags(NUM_BLOCKS, SIZE)
    tags.set_loaded(range(1, 31), KEYS[1:31])
    host, disk = store_over(memory), MemoryDisk(memory.memory_plan.block_bytes)
    carrier = BlockCarrier(
        memory,
        tags,
        {Tier.HOST: host, Tier.DISK: disk},
        block_size=SIZE,
        block_bytes=memory.memory_plan.block_bytes,
        numerics="here",
    )
    return Tiers(memory, tags, host, disk, carrier)


def test_to_the_disk_and_back(tiers: Tiers) -> None:
    """Blocks are stored in runs of any length and loaded into others, which have tags afterwards."""
    blocks, slots, targets = list(range(1, 31)), list(range(100, 130)), list(range(31, 61))
    assert tiers.move(Tier.DEVICE, Tier.DISK, blocks, slots) == Moved(1)
    assert tiers.move(Tier.DISK, Tier.DEVICE, slots, targets) == Moved(1)
    assert tiers.memory.contents(targets) == blocks
    assert all(tiers.tags.contains(target, KEYS[block]) for block, target in zip(blocks, targets, strict=True))


def test_over_the_host(tiers: Tiers) -> None:
    """Blocks move from the host to the disk with their headers, whatever the order of their slots there."""
    blocks = list(range(1, 7))
    assert tiers.move(Tier.DEVICE, Tier.HOST, blocks, [9, 8, 3, 2, 1, 0]) == Moved(1)
    assert tiers.move(Tier.HOST, Tier.DISK, [9, 8, 3, 2, 1, 0], list(range(6))) == Moved(1)
    assert tiers.move(Tier.DISK, Tier.DISK, list(range(6)), list(range(10, 16))) == Moved(1)
    assert tiers.move(Tier.DISK, Tier.DEVICE, list(range(10, 16)), list(range(50, 56))) == Moved(1)
    assert tiers.memory.contents(list(range(50, 56))) == blocks


def test_only_confirmed_blocks_are_written(tiers: Tiers) -> None:
    """Blocks without the expected tag leave holes; those on either side of them are written to their own slots."""
    tiers.tags.forget([2, 5])
    assert tiers.move(Tier.DEVICE, Tier.DISK, list(range(1, 7)), list(range(6))) == MoveFailed(1, [0, 2, 3, 5], {})
    assert sorted(tiers.disk.blocks) == [0, 2, 3, 5]
    assert tiers.move(Tier.DISK, Tier.DEVICE, [0, 1, 2], [50, 51, 52]) == MoveFailed(1, [0], {1: LoadFailure.MISSING})


def test_wrong_blocks_do_not_move_on(tiers: Tiers) -> None:
    """A block that changed in one tier is not copied to another."""
    tiers.move(Tier.DEVICE, Tier.HOST, [1, 2, 3], [0, 1, 2])
    tiers.host.bytes[tiers.memory.memory_plan.block_bytes] ^= 1
    result = tiers.move(Tier.HOST, Tier.DISK, [0, 1, 2], [0, 1, 2])
    assert result == MoveFailed(1, [0, 2], {1: LoadFailure.CORRUPT})
    assert sorted(tiers.disk.blocks) == [0, 2]


@pytest.mark.parametrize("change", ["bit", "swapped", "numerics", "tokens", "key"])
def test_changed_on_the_disk(tiers: Tiers, change: str) -> None:
    """A load ends at the first block that is not exactly what was stored; what is before it comes."""
    tiers.move(Tier.DEVICE, Tier.DISK, [1, 2, 3], [0, 1, 2])
    header, contents = tiers.disk.blocks[1]
    if change == "bit":
        contents[5] ^= 16
    elif change == "swapped":
        tiers.disk.blocks[1] = tiers.disk.blocks[2]
    elif change == "numerics":
        tiers.disk.blocks[1] = (attrs.evolve(header, numerics="there"), contents)
    elif change == "tokens":
        tiers.disk.blocks[1] = (attrs.evolve(header, num_tokens=SIZE - 1), contents)
    else:
        tiers.disk.blocks[1] = (attrs.evolve(header, key=KEYS[9]), contents)
    result = tiers.move(Tier.DISK, Tier.DEVICE, [0, 1, 2], [50, 51, 52])
    assert result == MoveFailed(1, [0], {1: LoadFailure.CORRUPT})
    assert tiers.tags.contains(50, KEYS[1]) and tiers.tags.tag_of(51) is None and tiers.tags.tag_of(52) is None


@pytest.mark.parametrize("is_load", [False, True])
def test_failing_disk(tiers: Tiers, *, is_load: bool) -> None:
    """An error of the disk names the tier, so that it is not used again; one of the device's memory names none."""
    tiers.move(Tier.DEVICE, Tier.DISK, [1], [0])
    moves = ((Tier.DISK, Tier.DEVICE, [0], [50]) if is_load else (Tier.DEVICE, Tier.DISK, [1], [1]),)
    tiers.disk.fail_calls = 1
    for source, target, sources, targets in moves:
        error = "OSError: injected fault: the disk fails"
        assert tiers.move(source, target, sources, targets) == MoveFailed(1, [], {}, error, Tier.DISK)

    def fail() -> None:
        raise OSError("no such memory")

    tiers.memory.before = fail
    assert tiers.move(Tier.DEVICE, Tier.DISK, [1], [2]) == MoveFailed(1, [], {}, "OSError: no such memory")


def test_headers_come_from_tags(tiers: Tiers) -> None:
    """A stored block has its tag's key and fill, this engine's numerics, and the checksum of its bytes."""
    tiers.move(Tier.DEVICE, Tier.DISK, [1], [7])
    header, contents = tiers.disk.blocks[7]
    assert header == BlockHeader(KEYS[1], SIZE, "here", checksum_of(memoryview(contents)))
