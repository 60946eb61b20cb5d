"""The checksum of a block's bytes: what goes wrong in memory, on a disk or on the way changes it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.mover.block_header import checksum_of

BLOCK_BYTES = 40 * 4096
BLOCK = random.Random(0).randbytes(BLOCK_BYTES)
CHECKSUM = checksum_of(memoryview(BLOCK))
UNITS = (2, 8, 16, 64, 512, 2048, 4096)
"""What may be swapped, in bytes: elements, words, cache lines, sectors, rows, pages."""


def checksum_with(wrong: bytes | bytearray) -> int:
    return checksum_of(memoryview(wrong))


@given(st.integers(0, 8 * BLOCK_BYTES - 1))
def test_flipped_bit(at: int) -> None:
    """A flipped bit changes the checksum, wherever it is."""
    wrong = bytearray(BLOCK)
    wrong[at // 8] ^= 1 << at % 8
    assert checksum_with(wrong) != CHECKSUM


@given(st.sampled_from(UNITS), st.data())
def test_swapped_parts(size: int, data: st.DataObject) -> None:
    """Two parts in each other's place change the checksum, whatever their size."""
    first, second = data.draw(st.lists(st.integers(0, BLOCK_BYTES // size - 1), min_size=2, max_size=2, unique=True))
    wrong = bytearray(BLOCK)
    one, other = slice(first * size, (first + 1) * size), slice(second * size, (second + 1) * size)
    wrong[one], wrong[other] = wrong[other], wrong[one]
    assert (checksum_with(wrong) != CHECKSUM) == (wrong != BLOCK)


@given(st.integers(1, BLOCK_BYTES - 1))
def test_shifted_bytes(distance: int) -> None:
    """Bytes that begin elsewhere, or end early, change the checksum."""
    assert checksum_with(BLOCK[distance:] + BLOCK[:distance]) != CHECKSUM
    assert checksum_with(BLOCK[distance:] + bytes(distance)) != CHECKSUM
    assert checksum_with(BLOCK[:-distance]) != CHECKSUM


@given(st.integers(0, 39), st.integers(0, 39))
def test_page_twice(source: int, target: int) -> None:
    """A page that lies in another's place changes the checksum."""
    wrong = bytearray(BLOCK)
    wrong[target * 4096 : (target + 1) * 4096] = BLOCK[source * 4096 : (source + 1) * 4096]
    assert (checksum_with(wrong) != CHECKSUM) == (source != target)


def test_zeros() -> None:
    """Zeros have another checksum than fewer zeros: a file with a hole is not taken for a shorter one."""
    assert len({checksum_with(bytes(length)) for length in range(0, 8192, 8)}) == 1024


def test_same_on_every_machine() -> None:
    """The checksum is that of the published algorithm, so that one machine reads what another has written."""
    assert checksum_of(memoryview(b"")) == 0x2D06800538D394C2
    assert checksum_of(memoryview(bytes(range(256)) * 1024)) == 0xF34CC5C9153C3287
