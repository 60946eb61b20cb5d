"""The block manager, written the slow way: an oracle that is right because it can be checked by reading.

No keys, no index, no reference counts: a block knows who holds it and which tokens it stands for, all of them from
position 0 on, and is found by looking at every block in turn. Which block is reused next is the order of two lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
from proposals import Candidate

Content = tuple[str, tuple[int, ...]]
"""Who may share it, and every token from position 0 to the block's end."""


@attrs.define
class Block:
    holders: list[int] = attrs.field(factory=list)
    content: Content | None = None
    """What it can be found by, once announced."""
    pending_step: int | None = None
    """The step that writes it, until that is done."""


@attrs.frozen
class Announcement:
    step: int
    sequence_id: int
    index: int
    block: int
    content: Content


@attrs.define
class Outcome:
    """What one walk came to."""

    rows: list[tuple[int, int, int, list[int]]] = attrs.field(factory=list)
    """(sequence, start, count, new blocks)"""
    reused: dict[int, int] = attrs.field(factory=dict)
    preempted: list[int] = attrs.field(factory=list)
    written: list[tuple[int, int]] = attrs.field(factory=list)
    """(sequence, block index): prompt blocks that it was the first to commit."""


class NaiveManager:
    def __init__(self, num_blocks: int, block_size: int, *, caching: bool, watermark: int) -> None:
        self.size = block_size
        self.caching = caching
        self.watermark = watermark
        self.blocks = [Block() for _ in range(num_blocks)]
        self.blank = list(range(1, num_blocks))
        """Free, without contents; the next to be taken comes first."""
        self.cached: list[int] = []
        """Free, with contents; the next to be evicted comes first."""
        self.tables: dict[int, list[int]] = {}
        self.candidates: dict[int, Candidate] = {}
        """As each holder was when it was admitted."""
        self.announcements: list[Announcement] = []

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
            if not block.holders:
                if block.content is None:
                    self.blank.insert(0, number)
                else:
                    self.cached.append(number)
        del self.candidates[sequence_id]

    @property
    def num_free(self) -> int:
        return len(self.blank) + len(self.cached)

    # ------------------------------------------------------------ one walk

    def take_back(self, step: int) -> None:
        """The step failed: nothing that it announced may be found."""
        for said in [a for a in reversed(self.announcements) if a.step == step]:
            self.announcements.remove(said)
            block = self.blocks[said.block]
            if block.content == said.content and block.pending_step == step:
                block.content = block.pending_step = None
                if not block.holders:
                    self.cached.remove(said.block)
                    self.blank.insert(0, said.block)

    def commit(self, step: int, outcome: Outcome, num_prompt_tokens: dict[int, int]) -> None:
        for said in [a for a in self.announcements if a.step == step]:
            self.announcements.remove(said)
            block = self.blocks[said.block]
            if block.content == said.content and block.pending_step == step:
                block.pending_step = None
                if (said.index + 1) * self.size <= num_prompt_tokens[said.sequence_id]:
                    outcome.written.append((said.sequence_id, said.index))

    def fill(self, sequence_id: int, index: int, content: Content) -> None:
        """Decoding has completed a block."""
        number = self.tables[sequence_id][index]
        if self.caching and self.find(content) is None:
            assert self.blocks[number].content is None
            self.blocks[number].content = content

    def grant_rows(self, rows: Sequence[tuple[int, int, int]], victims: Sequence[int], outcome: Outcome) -> None:
        for sequence_id, start, count in rows:
            if sequence_id not in self.tables:
                continue  # preempted for a row before it
            wanted = -(-(start + count) // self.size)
            while sequence_id in self.tables and wanted - len(self.tables[sequence_id]) > self.num_free:
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

    def admit(self, candidates: Sequence[Candidate], budget: int, outcome: Outcome) -> None:
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
            num_held_by_nobody = len([b for b in shared if not self.blocks[b].holders])
            needed = -(-num_tokens // self.size) - len(shared) + num_held_by_nobody
            if needed + (self.watermark if self.tables else 0) > self.num_free:
                return
            for number in shared:
                if not self.blocks[number].holders:
                    self.cached.remove(number)
                self.blocks[number].holders.append(candidate.id)
            start = len(shared) * self.size
            count = min(budget, num_tokens - start)
            own = -(-(start + count) // self.size) - len(shared)
            self.tables[candidate.id] = shared + [self.take_one(candidate.id) for _ in range(own)]
            self.candidates[candidate.id] = candidate
            budget -= count
            outcome.rows.append((candidate.id, start, count, list(self.tables[candidate.id])))
            outcome.reused[candidate.id] = start
            self.check_writes(candidate.id, start, count)

    def announce(self, step: int, outcome: Outcome) -> None:
        """What the step's rows complete can be found from the next walk on."""
        for sequence_id, start, count, _new_blocks in outcome.rows if self.caching else ():
            candidate = self.candidates[sequence_id]
            for index in range(start // self.size, (start + count) // self.size):
                if (index + 1) * self.size > len(candidate.tokens):
                    break  # its tokens were not all known at the admission
                content = self.content_of(candidate, index)
                if self.find(content) is None:
                    number = self.tables[sequence_id][index]
                    assert self.blocks[number].content is None
                    self.blocks[number].content = content
                    self.blocks[number].pending_step = step
                    self.announcements.append(Announcement(step, sequence_id, index, number, content))

    # ------------------------------------------------------------ what must hold

    def check_writes(self, sequence_id: int, start: int, count: int) -> None:
        """A row writes only to blocks that nobody else holds and nobody can find."""
        for position in range(start, start + count):
            block = self.blocks[self.tables[sequence_id][position // self.size]]
            assert block.holders == [sequence_id], "a write is granted into a shared block"
            assert block.content is None, "a write is granted into a block that can be found"
