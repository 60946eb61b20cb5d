"""A naive implementation of the block manager: an oracle simple enough to be verified by reading.

There are no keys, no index and no reference counts: a block has its holders and all tokens that it represents, from
position 0 on, and is found by looking at every block in turn. Two lists give the order in which blocks are reused. A
pin is the tokens of a prefix and the blocks that contain them.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from quipu.actors.messages.prompts import Pin
from tests.actors.engine.block_manager.proposals import Candidate

Content = tuple[str, tuple[int, ...]]
"""The cache domain, and every token from position 0 to the end of the block."""


@attrs.define
class Block:
    holders: list[int] = attrs.field(factory=list)
    content: Content | None = None
    """The contents by which it is found, once published."""
    pending_step: int | None = None
    """The step that writes it, until the step is done."""


@attrs.define(eq=False)
class NaivePin:
    content: Content
    blocks: list[int]
    ttl_s: float
    expires_at: float

    def refresh(self, now: float) -> None:
        self.expires_at = max(self.expires_at, now + self.ttl_s)


@attrs.frozen
class Mark:
    """A prefix that a step completes and that is to be pinned."""

    step: int
    sequence_id: int
    candidate: Candidate
    pin: Pin


@attrs.frozen
class Announcement:
    step: int
    sequence_id: int
    index: int
    block: int
    content: Content


@attrs.define
class Outcome:
    """The result of one grant."""

    rows: list[tuple[int, int, int, list[int]]] = attrs.field(factory=list)
    """(sequence, start, count, new blocks)"""
    admitted: list[int] = attrs.field(factory=list)
    reused: dict[int, int] = attrs.field(factory=dict)
    copy_sources: dict[int, int] = attrs.field(factory=dict)
    """The block with the contents of an admitted prompt's last block; 0 if there is none."""
    preempted: list[int] = attrs.field(factory=list)
    written: list[tuple[int, int]] = attrs.field(factory=list)
    """(sequence, block index): prompt blocks that it was the first to commit."""
    pinned: list[tuple[int, int]] = attrs.field(factory=list)
    """(sequence, tokens in its pinned prefix)"""
    num_yielded: int = 0


class NaiveManager:
    def __init__(self, num_blocks: int, block_size: int, *, caching: bool, watermark: int, max_pinned: int = 0) -> None:
        self.size = block_size
        self.caching = caching
        self.watermark = watermark
        self.blocks = [Block() for _ in range(num_blocks)]
        self.blank = list(range(1, num_blocks))
        """Free blocks without contents; the next to be taken is first."""
        self.cached: list[int] = []
        """Free blocks with contents; the next to be evicted is first."""
        self.tables: dict[int, list[int]] = {}
        self.candidates: dict[int, Candidate] = {}
        """Each holder as it was when it was admitted."""
        self.announcements: list[Announcement] = []
        self.max_pinned = max_pinned if caching else 0
        self.pins: list[NaivePin] = []
        self.marks: list[Mark] = []
        self.outdated: set[int] = set()
        """Sequences admitted before a reset: nothing of theirs is found or pinned."""

    # ------------------------------------------------------------ single blocks

    def find(self, content: Content) -> int | None:
        for number, block in enumerate(self.blocks):
            if block.content == content:
                return number
        return None

    def content_of(self, candidate: Candidate, index: int) -> Content:
        return candidate.domain, tuple(candidate.tokens[: (index + 1) * self.size])

    def take_one(self, sequence_id: int) -> int:
        if self.blank:
            number = self.blank.pop(0)
        else:
            number = self.cached.pop(0)
            self.blocks[number].content = None
            self.blocks[number].pending_step = None
        assert self.blocks[number].holders == []
        self.blocks[number].holders = [sequence_id]
        return number

    def release(self, sequence_id: int) -> None:
        for number in reversed(self.tables.pop(sequence_id)):
            block = self.blocks[number]
            block.holders.remove(sequence_id)
            if not block.holders and not self.pins_on(number):
                if block.content is None:
                    self.blank.insert(0, number)
                else:
                    self.cached.append(number)
        del self.candidates[sequence_id]
        self.outdated.discard(sequence_id)

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    # ------------------------------------------------------------ pins

    def pins_on(self, number: int) -> list[NaivePin]:
        return [pin for pin in self.pins if number in pin.blocks]

    @property
    def pinned_only(self) -> list[int]:
        return [n for n, block in enumerate(self.blocks) if not block.holders and self.pins_on(n)]

    def drop(self, pin: NaivePin) -> None:
        self.pins.remove(pin)
        for number in reversed(pin.blocks):
            if not self.blocks[number].holders and not self.pins_on(number):
                self.cached.append(number)

    def expire(self, now: float) -> None:
        for pin in list(self.pins):
            if pin.expires_at <= now:
                self.drop(pin)

    def give_way(self, num_free: int, outcome: Outcome) -> None:
        """Drop pins until enough blocks are free: soonest expiry first, those that free something before those that do
        not."""
        while self.num_free < num_free and self.pinned_only:
            soonest = sorted(self.pins, key=lambda pin: pin.expires_at)
            useful = [p for p in soonest if any(self.pins_on(n) == [p] for n in p.blocks if not self.blocks[n].holders)]
            self.drop((useful or soonest)[0])
            outcome.num_yielded += 1

    def pin(self, mark: Mark, now: float) -> bool:
        contents = [self.content_of(mark.candidate, index) for index in range(mark.pin.num_blocks)]
        pin = next((p for p in self.pins if p.content == contents[-1]), None)
        if pin is None:
            blocks = [number for number in map(self.find, contents) if number is not None]
            if len(blocks) < len(contents) or any(self.blocks[n].pending_step is not None for n in blocks):
                return False
            if len({*blocks, *(n for pin in self.pins for n in pin.blocks)}) > self.max_pinned:
                return False
            self.cached = [number for number in self.cached if number not in blocks]
            pin = NaivePin(contents[-1], blocks, mark.pin.ttl_s, now)
            self.pins.append(pin)
        pin.ttl_s = max(pin.ttl_s, mark.pin.ttl_s)
        pin.refresh(now)
        return True

    def pin_marked(self, step: int, now: float, outcome: Outcome) -> None:
        """Pin the marked prefixes of a step that is done, as are all before it."""
        for mark in [m for m in self.marks if m.step == step]:
            self.marks.remove(mark)
            if self.pin(mark, now):
                outcome.pinned.append((mark.sequence_id, mark.pin.num_blocks * self.size))

    # ------------------------------------------------------------ a grant

    def reset(self) -> None:
        """Forget the contents of all blocks, so that nothing in the cache is found."""
        for pin in list(self.pins):
            self.drop(pin)
        for block in self.blocks:
            block.content = block.pending_step = None
        self.blank = self.cached[::-1] + self.blank
        self.cached = []
        self.marks, self.announcements = [], []
        self.outdated = set(self.tables)

    def take_back(self, step: int) -> None:
        """Undo a failed step: nothing that it published is found or pinned."""
        self.marks = [mark for mark in self.marks if mark.step != step]
        for announcement in [a for a in reversed(self.announcements) if a.step == step]:
            self.announcements.remove(announcement)
            block = self.blocks[announcement.block]
            if block.content == announcement.content and block.pending_step == step:
                block.content = block.pending_step = None
                if not block.holders:
                    self.cached.remove(announcement.block)
                    self.blank.insert(0, announcement.block)

    def commit(self, step: int, outcome: Outcome, num_prompt_tokens: dict[int, int]) -> None:
        for announcement in [a for a in self.announcements if a.step == step]:
            self.announcements.remove(announcement)
            block = self.blocks[announcement.block]
            if block.content == announcement.content and block.pending_step == step:
                block.pending_step = None
                if (announcement.index + 1) * self.size <= num_prompt_tokens[announcement.sequence_id]:
                    outcome.written.append((announcement.sequence_id, announcement.index))

    def fill(self, sequence_id: int, index: int, content: Content) -> None:
        """Record a block that decoding has filled."""
        number = self.tables[sequence_id][index]
        if self.caching and self.find(content) is None and sequence_id not in self.outdated:
            assert self.blocks[number].content is None
            self.blocks[number].content = content

    def grant_rows(self, rows: Sequence[tuple[int, int, int]], victims: Sequence[int], outcome: Outcome) -> None:
        for sequence_id, start, count in rows:
            if sequence_id not in self.tables:
                continue  # preempted for an earlier row
            wanted = -(-(start + count) // self.size)
            while sequence_id in self.tables and wanted - len(self.tables[sequence_id]) > self.num_free:
                if self.pinned_only:
                    self.give_way(wanted - len(self.tables[sequence_id]), outcome)
                    continue
                served = [row[0] for row in outcome.rows]
                left = [v for v in victims if v in self.tables and v not in served]
                victim = left[0] if left else sequence_id
                self.release(victim)
                outcome.preempted.append(victim)
            if sequence_id in self.tables:
                table = self.tables[sequence_id]
                new_blocks = [self.take_one(sequence_id) for _ in range(wanted - len(table))]
                table += new_blocks
                outcome.rows.append((sequence_id, start, count, new_blocks))
                self.check_writes(sequence_id, start, count)

    def admit(self, candidates: Sequence[Candidate], budget: int, outcome: Outcome, now: float) -> None:
        for candidate in candidates:
            if budget <= 0:
                return
            num_tokens = len(candidate.tokens)
            shared: list[int] = []
            while self.caching and (len(shared) + 1) * self.size < num_tokens:
                number = self.find(self.content_of(candidate, len(shared)))
                if number is None:
                    break
                shared.append(number)
            copy_source = None
            if self.caching and (len(shared) + 1) * self.size == num_tokens:
                copy_source = self.find(self.content_of(candidate, len(shared)))
            needed = -(-num_tokens // self.size) - len(shared) + (self.watermark if self.tables else 0)
            to_have = {*self.blank, *self.cached, *self.pinned_only} - set(shared)
            if needed > len(to_have):
                return
            for number in shared:
                if number in self.cached:
                    self.cached.remove(number)
                self.blocks[number].holders.append(candidate.id)
            for pin in self.pins:
                if set(pin.blocks) <= set(shared):
                    pin.refresh(now)
            self.give_way(needed, outcome)
            start = len(shared) * self.size
            count = min(budget, num_tokens - start)
            own = -(-(start + count) // self.size) - len(shared)
            self.tables[candidate.id] = shared + [self.take_one(candidate.id) for _ in range(own)]
            self.candidates[candidate.id] = candidate
            outcome.admitted.append(candidate.id)
            budget -= count
            outcome.rows.append((candidate.id, start, count, list(self.tables[candidate.id])))
            outcome.reused[candidate.id] = start
            outcome.copy_sources[candidate.id] = (copy_source or 0) if start + count == num_tokens else 0
            self.check_writes(candidate.id, start, count)

    def announce(self, step: int, outcome: Outcome) -> None:
        """Publish what the step's rows complete: it is found from the next grant on, and pinned once the
        step is done."""
        for sequence_id, start, count, _new_blocks in outcome.rows if self.caching else ():
            if sequence_id in self.outdated:
                continue
            candidate = self.candidates[sequence_id]
            for pin in candidate.pins:
                end = pin.num_blocks * self.size
                if end <= start + count and (end > start or sequence_id in outcome.admitted):
                    self.marks.append(Mark(step, sequence_id, candidate, pin))
            for index in range(start // self.size, (start + count) // self.size):
                if (index + 1) * self.size > len(candidate.tokens):
                    break  # not all of its tokens were known at its admission
                content = self.content_of(candidate, index)
                if self.find(content) is None:
                    number = self.tables[sequence_id][index]
                    assert self.blocks[number].content is None
                    self.blocks[number].content = content
                    self.blocks[number].pending_step = step
                    self.announcements.append(Announcement(step, sequence_id, index, number, content))

    # ------------------------------------------------------------ checks

    def check_writes(self, sequence_id: int, start: int, count: int) -> None:
        """Check that a row writes only to blocks that no other sequence holds and that cannot be found."""
        for position in range(start, start + count):
            block = self.blocks[self.tables[sequence_id][position // self.size]]
            assert block.holders == [sequence_id], "a write to a shared block is granted"
            assert block.content is None, "a write to a block that can be found is granted"
