"""The disk store against a model of it: writes, failed writes, segments begun anew, reads and restarts in any order."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import attrs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from .disk_bench import FaultyDisk, bytes_for, key_of, open_store, read, write

BLOCK_BYTES = 100
PER_SEGMENT = 4
NUM_SEGMENTS = 64
NUM_BLOCKS = PER_SEGMENT * NUM_SEGMENTS
USED_SEGMENTS = 4
"""Segments that the machine writes to, so that they are often begun anew."""


@attrs.define
class ModelSegment:
    """What a segment should contain."""

    begun: int
    """Segments are numbered in the order in which they are begun."""
    names: dict[int, int] = attrs.Factory(dict)
    """By position."""
    next_position: int = 0


class DiskMachine(RuleBasedStateMachine):
    """Drives a store as the block manager does: slots of a segment in ascending order, some passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.path = Path(tempfile.mkdtemp())
        self.disk = FaultyDisk()
        self.store = open_store(self.path, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, calls=self.disk)
        assert self.store.blocks_per_segment == PER_SEGMENT and self.store.num_slots == NUM_BLOCKS
        self.segments: dict[int, ModelSegment] = {}
        """By their index."""
        self.num_begun = 0

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.path)

    @rule(
        first=st.integers(0, USED_SEGMENTS * PER_SEGMENT - 1),
        gaps=st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=7),
        names=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    )
    def write(self, first: int, gaps: list[int], names: list[int]) -> None:
        """Write to slots from `first` on, into new segments or after what their segments hold."""
        slots = self._slots(first, gaps)
        write(self.store, slots, names[: len(slots)], BLOCK_BYTES)
        for slot, name in zip(slots, names, strict=False):
            self._put(slot, name)

    @precondition(lambda self: self.segments)
    @rule(
        gaps=st.lists(st.sampled_from([1, 1, 1, 2]), max_size=7),
        names=st.lists(st.integers(0, 40), min_size=8, max_size=8),
    )
    def append(self, gaps: list[int], names: list[int]) -> None:
        """Write after the slots that were written last."""
        index, newest = max(self.segments.items(), key=lambda each: each[1].begun)
        self.write(index * PER_SEGMENT + newest.next_position, gaps, names)

    @rule(
        first=st.integers(0, USED_SEGMENTS * PER_SEGMENT - 1),
        gaps=st.lists(st.sampled_from([1, 1, 1, 2, 3]), max_size=7),
        room=st.integers(0, 8 * 8192).map(lambda bytes_: bytes_ // 512 * 512),
    )
    def fail_to_write(self, first: int, gaps: list[int], room: int) -> None:
        """Write until the disk is full: nothing of the call is there, and segments that were begun anew are empty."""
        slots = self._slots(first, gaps)
        self.disk.free_bytes = room
        try:
            write(self.store, slots, range(100, 100 + len(slots)), BLOCK_BYTES)
        except OSError as error:
            assert error.errno == errno.ENOSPC
            self._forget(slots)
        else:
            for name, slot in enumerate(slots, 100):
                self._put(slot, name)
        finally:
            self.disk.free_bytes = None

    @rule()
    def restart(self) -> None:
        """Close the store and open it again: what was written is found, oldest first, each key once."""
        self.store.close()
        self.store = open_store(self.path, num_blocks=NUM_BLOCKS, block_bytes=BLOCK_BYTES, calls=self.disk)
        left = sorted((segment for segment in self.segments.values() if segment.names), key=lambda each: each.begun)
        self.segments = dict(enumerate(left))
        expected: dict[bytes, int] = {}
        for index, segment in self.segments.items():
            segment.next_position = max(segment.names) + 1
            for position, name in sorted(segment.names.items()):
                expected.pop(key_of(name), None)
                expected[key_of(name)] = index * PER_SEGMENT + position
        assert [(stored.key, stored.slot) for stored in self.store.stored] == [*expected.items()]
        if left:
            last = (len(left) - 1) * PER_SEGMENT
            assert self.store.blank == range(last + left[-1].next_position, last + PER_SEGMENT)
        else:
            assert not self.store.blank

    @rule(slots=st.lists(st.integers(0, (USED_SEGMENTS + 4) * PER_SEGMENT), min_size=1, max_size=8))
    def read(self, slots: list[int]) -> None:
        """Read slots in any order, some of them twice."""
        assert read(self.store, slots, BLOCK_BYTES) == [self._name_in(slot) for slot in slots]

    @invariant()
    def files_have_their_size(self) -> None:
        """Files have at most the given size, and there is one for each segment."""
        files = [*self.store.folder.glob("segment-*")]
        assert sum(file.stat().st_size for file in files) <= bytes_for(NUM_BLOCKS, BLOCK_BYTES)
        assert len(files) <= NUM_SEGMENTS

    def _slots(self, first: int, gaps: list[int]) -> list[int]:
        slots = [first]
        for gap in gaps:
            slots.append(slots[-1] + gap)
        return slots

    def _name_in(self, slot: int) -> int | None:
        segment = self.segments.get(slot // PER_SEGMENT)
        return None if segment is None else segment.names.get(slot % PER_SEGMENT)

    def _put(self, slot: int, name: int) -> None:
        index, position = divmod(slot, PER_SEGMENT)
        segment = self._segment_for(index, position)
        segment.names[position] = name
        segment.next_position = position + 1

    def _segment_for(self, index: int, position: int) -> ModelSegment:
        segment = self.segments.get(index)
        if segment is None or position < segment.next_position:
            segment = self.segments[index] = ModelSegment(self.num_begun)
            self.num_begun += 1
        return segment

    def _forget(self, slots: list[int]) -> None:
        """Have each segment to which slots would have been written begun anew if it must have been, as far as the
        store got; which shows in what it holds."""
        for slot in slots:
            index, position = divmod(slot, PER_SEGMENT)
            segment = self.segments.get(index)
            if segment is not None and position < segment.next_position and segment.names:
                (held, *_) = read(self.store, [index * PER_SEGMENT + min(segment.names)], BLOCK_BYTES)
                if held is None:
                    del self.segments[index]


DiskMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_disk_machine = DiskMachine.TestCase
