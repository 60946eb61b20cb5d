"""Copies between an engine's device and the buffers that it shares with another one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import pytest

from quipu.actors.engine.mover.peer_copies import RUN_BYTES, CopyFailed, PeerCopies

SIZE, BYTES = 16, 4
KEYS = [bytes([number]) * 32 for number in range(4)]


@attrs.frozen(eq=False)
class Tag:
    key: bytes | None
    num_filled: int = SIZE


@attrs.define(eq=False)
class Device:
    """Blocks of four bytes, and the executor's tags."""

    tags: dict[int, Tag] = attrs.field(factory=dict)
    contents: dict[int, bytes] = attrs.field(factory=dict)
    while_copying: Callable[[], object] = lambda: None

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return memoryview(bytearray(num_blocks * BYTES))

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self.while_copying()
        to[:] = b"".join(self.contents[block] for block in blocks)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self.while_copying()
        assert not any(block in self.tags for block in blocks), "a block is overwritten that can be confirmed"
        for at, block in enumerate(blocks):
            self.contents[block] = bytes(source[at * BYTES : (at + 1) * BYTES])

    def tag_of(self, block: int, /) -> Tag | None:
        return self.tags.get(block)

    def forget(self, blocks: Sequence[int], /) -> None:
        for block in blocks:
            self.tags.pop(block, None)

    def set_loaded(self, blocks: Sequence[int], keys: Sequence[bytes], /) -> None:
        self.tags.update({block: Tag(key) for block, key in zip(blocks, keys, strict=True)})


@pytest.fixture
def device() -> Device:
    """A device whose blocks 1 to 4 hold the four keys."""
    blocks = range(1, 5)
    return Device(
        {block: Tag(key) for block, key in zip(blocks, KEYS, strict=True)},
        {block: bytes([block]) * BYTES for block in blocks},
    )


def copies(device: Device, block_bytes: int = BYTES) -> PeerCopies:
    return PeerCopies(device, device, SIZE, block_bytes, "numerics")


def test_from_one_device_to_another(device: Device) -> None:
    """Blocks come with their bytes and tags."""
    buffer = memoryview(bytearray(4 * BYTES))
    assert copies(device).copy_out([1, 2, 3, 4], KEYS, buffer) == 4
    other = Device({9: Tag(b"old")})
    copies(other).forget([9, 8, 7, 6])
    copies(other).copy_in([9, 8, 7, 6], KEYS, buffer)
    assert [other.contents[block] for block in (9, 8, 7, 6)] == [bytes([n]) * BYTES for n in (1, 2, 3, 4)]
    assert [tag.key for block in (9, 8, 7, 6) if (tag := other.tag_of(block))] == KEYS


@pytest.mark.parametrize(
    "spoil",
    [
        lambda device: device.tags.pop(3),
        lambda device: device.tags.update({3: Tag(b"another")}),
        lambda device: device.tags.update({3: Tag(KEYS[2], SIZE - 1)}),
    ],
    ids=["no tag", "another key", "not full"],
)
def test_only_what_the_executor_confirms(device: Device, spoil: Callable[[Device], object]) -> None:
    """What the executor has not tagged as the wanted block is not sent, nor anything after it."""
    spoil(device)
    assert copies(device).copy_out([1, 2, 3, 4], KEYS, memoryview(bytearray(4 * BYTES))) == 2


def test_overwritten_during_the_copy(device: Device) -> None:
    """A block that a pass has written to meanwhile is not sent, even if it has the same key again."""
    device.while_copying = lambda: device.tags.update({2: Tag(KEYS[1])})
    assert copies(device).copy_out([1, 2, 3, 4], KEYS, memoryview(bytearray(4 * BYTES))) == 1


@pytest.mark.parametrize(("block_bytes", "most"), [(BYTES, 256), (RUN_BYTES // 3, 3), (3 * RUN_BYTES, 1)])
def test_buffers(device: Device, block_bytes: int, most: int) -> None:
    """A buffer holds a few small blocks, or one of any size."""
    assert copies(device, block_bytes).most_together == most
    assert copies(device, block_bytes).buffer_bytes == most * block_bytes


@pytest.mark.parametrize("is_fatal", [False, True])
def test_copy_that_raises(device: Device, *, is_fatal: bool) -> None:
    """An error ends the copy, and the engine only if no later one can succeed; nothing is tagged."""

    def fail() -> None:
        raise ValueError("no such memory")

    device.while_copying = fail
    faulty = PeerCopies(device, device, SIZE, BYTES, "numerics", lambda error: is_fatal)
    with pytest.raises(ValueError if is_fatal else CopyFailed, match="no such memory"):
        faulty.copy_out([1], KEYS[:1], memoryview(bytearray(BYTES)))
    faulty.forget([9])
    with pytest.raises(ValueError if is_fatal else CopyFailed, match="no such memory"):
        faulty.copy_in([9], KEYS[:1], memoryview(bytearray(BYTES)))
    assert device.tag_of(9) is None
