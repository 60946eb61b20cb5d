"""The index of a disk's segments: where blocks go, in what order they leave, and what gets a second chance."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quipu.actors.engine.block_manager.segment_index import SegmentIndex, StoredLog

KEYS = [bytes([n]) * 32 for n in range(40)]


def put_all(index: SegmentIndex, keys: list[bytes]) -> list[bytes]:
    """Store keys one by one, as far as there is room. Return what was evicted."""
    evicted = []
    for key in keys:
        taken = index.take([key])
        evicted += taken.evicted
        for slot in taken.slots:
            index.put(key, slot)
    return evicted


def test_slots_ascend_within_segments() -> None:
    """Slots are taken from front to back, one segment after the other."""
    index = SegmentIndex(3, 4)
    assert index.take(KEYS[:6]).slots == [0, 1, 2, 3, 4, 5]
    assert index.take(KEYS[6:8]).slots == [6, 7]


def test_oldest_segment_is_recycled_whole() -> None:
    """Without a blank segment the oldest one is emptied, and what follows goes there."""
    index = SegmentIndex(3, 2)
    assert put_all(index, KEYS[:6]) == []
    taken = index.take(KEYS[6:7])
    assert taken.evicted == KEYS[:2] and taken.slots == [0]
    assert not index.holds(KEYS[0]) and index.holds(KEYS[2])


def test_used_blocks_are_rescued() -> None:
    """What was used since it was stored is named before its segment is recycled, oldest first, once, and not all of a
    segment; once it is stored again it survives."""
    index = SegmentIndex(3, 4)
    put_all(index, KEYS[:8])
    assert index.take_rescues(9) == [], "nothing is evicted soon"
    for key in (KEYS[3], KEYS[1], KEYS[2], KEYS[0]):
        assert index.touch(key)
    put_all(index, KEYS[8:9])
    rescued = index.take_rescues(9)
    assert rescued == KEYS[:3]
    assert index.take_rescues(9) == []
    put_all(index, rescued)
    assert put_all(index, KEYS[9:10]) == [KEYS[3]]
    assert all(index.holds(key) for key in rescued)


def test_rescued_blocks_need_another_use() -> None:
    """A second chance is one: without another use the block goes when its new segment does."""
    index = SegmentIndex(2, 2)
    put_all(index, KEYS[:2])
    index.touch(KEYS[0])
    put_all(index, KEYS[2:3])
    put_all(index, index.take_rescues(1))
    put_all(index, KEYS[4:5])
    assert index.holds(KEYS[0]) and index.take_rescues(4) == []
    put_all(index, KEYS[5:7])
    assert not index.holds(KEYS[0])


def test_kept_keys_count_as_used() -> None:
    """Whoever knows of pins decides what is stored again."""
    index = SegmentIndex(2, 2)
    index.is_kept = lambda key: key == KEYS[1]
    put_all(index, KEYS[:3])
    assert index.take_rescues(4) == [KEYS[1]]


def test_segments_in_use_are_not_recycled() -> None:
    """A segment from which a move reads stays as it is: the next oldest is taken, or nothing at all."""
    index = SegmentIndex(3, 2)
    put_all(index, KEYS[:6])
    slots = index.read([KEYS[1]])
    assert index.take(KEYS[6:7]).evicted == KEYS[2:4]
    also = index.read([KEYS[4]])
    assert index.take(KEYS[7:9]).slots == [3], "the rest would go to a segment that is being read"
    index.end_read([*slots, *also])
    assert index.take(KEYS[9:10]).slots == [0]


def test_failed_store_leaves_a_hole() -> None:
    """A slot that was given back is not handed out again before its segment is recycled: files are appended to."""
    index = SegmentIndex(2, 2)
    index.give_back(index.take(KEYS[:1]).slots[0])
    assert index.take(KEYS[1:2]).slots == [1]
    assert index.num_used == 1


def test_opened_log() -> None:
    """What a disk holds can be found, its oldest segment goes first, and writing goes on where it ended."""
    log = StoredLog([(4, KEYS[0]), (5, KEYS[1]), (0, KEYS[2])], head=0, next_position=1)
    index = SegmentIndex(3, 2, log)
    assert [index.slot_of(key) for key in KEYS[:3]] == [4, 5, 0]
    assert index.take(KEYS[3:4]).slots == [1]
    assert index.take(KEYS[4:6]).slots == [2, 3], "a blank segment comes before the oldest"
    assert index.take(KEYS[6:7]).evicted == KEYS[:2]


def test_cleared_index_begins_a_new_segment() -> None:
    """After a reset nothing can be found, and what is stored then is not among what was there before."""
    index = SegmentIndex(3, 4)
    put_all(index, KEYS[:2])
    index.clear()
    assert index.num_used == 0 and not index.holds(KEYS[0])
    assert index.take(KEYS[2:3]).slots == [4]


class IndexMachine(RuleBasedStateMachine):
    """Stores, loads, uses, resets and restarts in any order, against a plain record of what was written where."""

    @initialize(num_segments=st.integers(2, 4), segment_blocks=st.integers(1, 5))
    def begin(self, num_segments: int, segment_blocks: int) -> None:
        self.size = (num_segments, segment_blocks)
        self.index = SegmentIndex(num_segments, segment_blocks)
        self.files: dict[int, dict[int, bytes]] = {}
        """By segment in the order of the log: what was written at which position."""
        self.taken: list[tuple[bytes, int]] = []
        self.readers: list[list[int]] = []

    @precondition(lambda self: not self.taken)
    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=6, unique=True))
    def take(self, keys: list[bytes]) -> None:
        read = {slot for slots in self.readers for slot in slots}
        taken = self.index.take(keys)
        segment_blocks = self.size[1]
        for key, slot in zip(keys, taken.slots, strict=False):
            segment, position = divmod(slot, segment_blocks)
            if position == 0 or segment not in self.files:
                assert not read & set(range(segment * segment_blocks, (segment + 1) * segment_blocks))
                self.files.pop(segment, None)
                self.files[segment] = {}
            file = self.files[segment]
            assert position not in file and all(position > other for other in file)
            file[position] = b""
            self.taken.append((key, slot))

    @precondition(lambda self: self.taken)
    @rule(outcomes=st.lists(st.booleans(), min_size=6, max_size=6))
    def end_store(self, outcomes: list[bool]) -> None:
        for (key, slot), is_stored in zip(self.taken, outcomes, strict=False):
            segment, position = divmod(slot, self.size[1])
            if is_stored:
                self.files[segment][position] = key
                self.index.put(key, slot)
            else:
                self.index.give_back(slot)
        self.taken = []

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        found = self.index.all_keys()
        if found and len(self.readers) < 3:
            self.readers.append(self.index.read([data.draw(st.sampled_from(found))]))

    @precondition(lambda self: self.readers)
    @rule()
    def end_read(self) -> None:
        self.index.end_read(self.readers.pop())

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key: bytes) -> None:
        assert self.index.touch(key) is self.index.holds(key)

    @rule()
    def rescue(self) -> None:
        assert all(self.index.holds(key) for key in self.index.take_rescues(3))

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        slot = self.index.slot_of(key)
        assert self.index.drop(key, -1) is False
        if slot is not None:
            assert self.index.drop(key, slot) and not self.index.holds(key)

    @precondition(lambda self: not self.taken and not self.readers)
    @rule()
    def restart(self) -> None:
        """Open what is in the files. What was dropped or replaced may be found again: its bytes are still there."""
        log = [
            (segment * self.size[1] + position, key)
            for segment, file in self.files.items()
            for position, key in file.items()
            if key
        ]
        head = next(reversed(self.files), None)
        next_position = 0 if head is None else max(self.files[head]) + 1
        self.index = SegmentIndex(*self.size, StoredLog(log, head, next_position))
        assert set(self.index.all_keys()) == {key for _, key in log}

    @invariant()
    def found_keys_are_in_the_files(self) -> None:
        if hasattr(self, "index"):
            for key in self.index.all_keys():
                segment, position = divmod(self.index.slot_of(key) or 0, self.size[1])
                assert self.files[segment][position] == key
            assert self.index.num_used <= self.index.num_slots


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
