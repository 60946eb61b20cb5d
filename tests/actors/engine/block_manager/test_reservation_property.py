"""Properties of the block manager under any messages, marks, results, failures, resets and ends.

One class per property, all with the rules of `reservation_rules.py`:

    free + held + pinned only + null = total                 Conservation
    reference 0 <=> in the free list                         FreeList
    a pinned prefix is complete and can be found             Pins
    pins deny no sequence blocks, and stay within the limit  Pins
    never write a shared or committed block                  Writes
    cached, and everything else, equals the oracle's         Oracle
    cached is whole blocks, and less than the prompt         CachedLength
    cached grows when a prompt is extended                   Extension
    distinct domains never share                             Domains
    a failed step leaves no pending key reachable            FailedSteps
    who applies the reported keys has the committed ones     ReportedKeys

Two state machines check them, each all of its properties in every run: `TestBlocks`, and `TestLookups` for those that
have rules of their own and copy the manager.
"""

from __future__ import annotations

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.scheduler import Granted
from tests.actors.engine.block_manager.block_checks import cached_blocks, check_manager, is_free, pending_step
from tests.actors.engine.block_manager.block_oracle import NaiveManager, Outcome
from tests.actors.engine.block_manager.proposals import (
    Candidate,
    copy_sources_of,
    pinned_of,
    reserve,
    reused_of,
    written_of,
)
from tests.actors.engine.block_manager.reservation_rules import LONG_S, PROMPTS, ReservationRules
from tests.actors.key_reader import KeyReader, committed_in
from tests.actors.properties import check_writes_are_private


class Conservation(ReservationRules):
    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def block_states_sum_to_total(self) -> None:
        """However many sequences hold it and pins cover it, each block is counted once."""
        pool = self.manager.pool
        held = {block for allocation in self.manager.allocations.values() for block in allocation.table}
        pinned = {block for blocks in self.manager.pins.blocks() for block in blocks}
        assert pool.num_pinned_only == len(pinned - held)
        assert pool.num_free + len(held) + pool.num_pinned_only + 1 == pool.num_blocks == self.usable + 1
        assert 0 not in held | pinned, "the null block is held"


class FreeList(ReservationRules):
    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def unreferenced_blocks_are_in_the_free_list(self) -> None:
        """Each free block is listed once; references are the tables that contain a block, plus one if it is pinned."""
        pool = self.manager.pool
        state, free = pool.state(), [*pool.state().blank, *cached_blocks(pool)]
        tables = [allocation.table for allocation in self.manager.allocations.values()]
        pinned = {block for blocks in self.manager.pins.blocks() for block in blocks}
        for block in range(1, pool.num_blocks):
            num_holders = sum(block in table for table in tables) + (block in pinned)
            assert state.references[block] == num_holders
            assert free.count(block) == (num_holders == 0)
            assert is_free(pool, block) == (num_holders == 0)
        assert 0 not in free, "the null block is free"
        check_manager(self.manager)


class Pins(ReservationRules):
    """Follows the chains that have been offered, by their last keys."""

    def begin(self) -> None:
        super().begin()
        self.chains: dict[bytes, list[bytes]] = {}

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        """Check that no candidate waits only because of pins, and that those that must wait would not fit without them
        either."""
        super().check_grant(proposal, granted, offered)
        self.chains |= {key: keys[: i + 1] for keys in proposal.candidate_keys for i, key in enumerate(keys)}
        pool = self.manager.pool
        refused = [c for c in offered if c.id not in granted.admitted_ids]
        left = proposal.token_budget - sum(
            count for i, count in zip(granted.sequence_ids, granted.counts, strict=True) if i in granted.admitted_ids
        )
        if refused and left > 0 and not granted.preempted_ids:
            num_needed = -(-len(refused[0].tokens) // self.size) + self.watermark
            assert self.manager.allocations, "a candidate waits that would fit if it were alone"
            assert pool.num_free + granted.num_pinned_blocks < num_needed
        if granted.num_pins_yielded:
            assert granted.sequence_ids or granted.preempted_ids, "pins have yielded in vain"

    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def pinned_prefixes_are_complete_and_found(self) -> None:
        """From its first block on, it can be found, and none of its blocks is free or still to be written."""
        pool, pins = self.manager.pool, self.manager.pins
        for pin in pins.prefixes():
            chain = self.chains[pin.key]
            assert pool.match(chain, len(chain)) == pin.blocks
        pinned = {block for blocks in pins.blocks() for block in blocks}
        assert len(pinned) == pool.num_pinned <= self.max_pinned
        assert self.caching or not pinned
        assert not any(is_free(pool, block) or pending_step(pool, block) for block in pinned)

    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def no_pin_outlives_its_ttl(self) -> None:
        """As of the last grant, everything pinned was used within the longest ttl requested for it."""
        for pin in self.manager.pins.prefixes():
            assert pin.expires_at <= self.now + pin.ttl_s <= self.now + LONG_S


class Writes(ReservationRules):
    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        super().check_grant(proposal, granted, offered)
        check_writes_are_private(self.manager, granted)


class CachedLength(ReservationRules):
    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        """`cached` is whole blocks; one token at least is computed; without caching it is 0."""
        super().check_grant(proposal, granted, offered)
        for sequence_id, cached in reused_of(granted).items():
            assert cached % self.size == 0
            assert 0 <= cached <= len(self.sequences[sequence_id].tokens) - 1
            assert self.caching or cached == 0


class Extension(ReservationRules):
    is_copied = True

    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def cached_grows_when_a_prompt_is_extended(self, data: st.DataObject, more: list[int]) -> None:
        """With the same cache, an extended prompt finds no less than the original."""
        known = st.sampled_from([s.tokens for s in self.sequences.values()]) if self.sequences else PROMPTS
        prompt = data.draw(known | PROMPTS, "prompt")
        prompt = prompt[: self.usable * self.size - 1]
        found = cached_of(self, prompt, "a")
        assert cached_of(self, (prompt + more)[: self.usable * self.size], "a") >= found


def cached_of(machine: ReservationRules, tokens: list[int], domain: str) -> int:
    """Return what a prompt would be granted now if it were alone, without changing anything."""
    manager = deepcopy(machine.manager)
    updates = reserve(machine.step, machine.size, free=list(manager.allocations))
    manager.grant(updates)
    candidate = Candidate(machine.next_id, tokens, len(tokens), domain)
    granted = manager.grant(reserve(machine.step, machine.size, candidates=[candidate]))
    return reused_of(granted)[candidate.id]


class Domains(ReservationRules):
    """Follows whose tokens each block holds."""

    is_copied = True

    def begin(self) -> None:
        super().begin()
        self.writers: dict[int, str] = {}
        self.domains: dict[int, str] = {}

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        super().check_grant(proposal, granted, offered)
        self.domains |= {candidate.id: candidate.domain for candidate in offered}
        for sequence_id, start in zip(granted.sequence_ids, granted.starts, strict=True):
            table = self.manager.allocations[sequence_id].table
            if sequence_id in granted.admitted_ids:
                read = {self.writers[block] for block in table[: start // self.size]}
                read |= {self.writers[block] for block in [copy_sources_of(granted)[sequence_id]] if block}
                assert read <= {self.domains[sequence_id]}, "a block of another domain is granted"
        for sequence_id, start, count in zip(granted.sequence_ids, granted.starts, granted.counts, strict=True):
            table = self.manager.allocations[sequence_id].table
            for block in table[start // self.size : -(-(start + count) // self.size)]:
                self.writers[block] = self.domains[sequence_id]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def distinct_domains_never_share(self, data: st.DataObject) -> None:
        """A domain that has sent nothing finds nothing, whatever it looks up."""
        like = data.draw(st.sampled_from(list(self.sequences.values())), "like")
        tokens = [*like.tokens, 0][: self.usable * self.size]
        assert cached_of(self, tokens, "nobody") == 0


class FailedSteps(ReservationRules):
    """Follows which step was the last to write to each block."""

    def begin(self) -> None:
        super().begin()
        self.last_step: dict[int, int] = {}
        self.failed_steps: set[int] = set()

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        super().check_grant(proposal, granted, offered)
        self.failed_steps.update(proposal.failed_steps)
        for sequence_id, start, count in zip(granted.sequence_ids, granted.starts, granted.counts, strict=True):
            table = self.manager.allocations[sequence_id].table
            for block in table[start // self.size : -(-(start + count) // self.size)]:
                self.last_step[block] = proposal.step
        self.failed_steps_leave_no_reachable_keys()

    def failed_steps_leave_no_reachable_keys(self) -> None:
        """Everything that can be found, or was granted as cached, was written by a step that did not fail."""
        state = self.manager.pool.state()
        for block in (block for block, key in enumerate(state.keys) if key is not None):
            assert self.last_step[block] not in self.failed_steps, "a block can be found that a failed step wrote"
            assert state.pending.get(block) not in self.failed_steps


class ReportedKeys(ReservationRules):
    def begin(self) -> None:
        super().begin()
        self.reader = KeyReader()

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        """Whoever applies the change of each grant in order has exactly the committed keys; without caching, none."""
        super().check_grant(proposal, granted, offered)
        self.reader.apply(granted)
        assert self.reader.keys == (committed_in(self.manager.pool) if self.caching else set())


class Oracle(ReservationRules):
    """The manager beside a naive implementation; the properties above are thereby checked in a second way."""

    def begin(self) -> None:
        super().begin()
        self.oracle = NaiveManager(
            self.usable + 1,
            self.size,
            caching=self.caching,
            watermark=self.watermark,
            max_pinned=self.max_pinned,
        )

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        super().check_grant(proposal, granted, offered)
        rows = list(zip(proposal.row_ids, proposal.row_starts, proposal.row_counts, strict=True))
        expected = self.grant_by_oracle(rows, proposal.victim_ids, offered, proposal.token_budget)
        assert reused_of(granted) == expected.reused, "cached differs from what the oracle finds"
        assert copy_sources_of(granted) == expected.copy_sources
        assert (
            list(zip(granted.sequence_ids, granted.starts, granted.counts, granted.new_blocks, strict=True))
            == expected.rows
        )
        assert granted.preempted_ids == expected.preempted
        blocks = [
            (sequence_id, position // self.size)
            for sequence_id, start, end in written_of(granted)
            for position in range(start, end, self.size)
        ]
        assert blocks == expected.written
        assert granted.num_free_blocks == self.oracle.num_free
        assert granted.num_cached_blocks == len(self.oracle.cached)
        assert pinned_of(granted) == expected.pinned
        assert granted.num_pinned_blocks == len(self.oracle.pinned_only)
        assert granted.num_pins_yielded == expected.num_yielded

    def grant_by_oracle(
        self, rows: list[tuple[int, int, int]], victims: list[int], candidates: list[Candidate], budget: int
    ) -> Outcome:
        oracle, outcome = self.oracle, Outcome()
        oracle.expire(self.now)
        if self.reset:
            oracle.reset()
        for step in self.failed:
            oracle.take_back(step)
        for step in self.committed:
            oracle.commit(step, outcome, self.num_prompt_tokens)
        for step in self.committed:
            oracle.pin_marked(step, self.now, outcome)
        for sequence_id, index, content in self.filled:
            oracle.fill(sequence_id, index, content)
        for sequence_id in self.frees:
            oracle.release(sequence_id)
        oracle.grant_rows(rows, victims, outcome)
        if not outcome.preempted:
            oracle.admit(candidates, budget, outcome, self.now)
        oracle.announce(self.step, outcome)
        return outcome

    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def tables_equal_the_oracles(self) -> None:
        assert {i: h.table for i, h in self.manager.allocations.items()} == self.oracle.tables

    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def pins_equal_the_oracles(self) -> None:
        """The same blocks are pinned until the same time."""
        pins = [(pin.blocks, pin.expires_at) for pin in self.manager.pins.prefixes()]
        assert pins == [(pin.blocks, pin.expires_at) for pin in self.oracle.pins]

    @precondition(lambda self: hasattr(self, "manager"))
    @invariant()
    def lookups_equal_the_oracles(self) -> None:
        """Everything ever published leads to the oracle's block, or to none if the oracle has lost it."""
        for block in self.oracle.blocks:
            if block.content is not None:
                self.key(block.content)
        for content, key in self.seen.items():
            number = self.oracle.find(content)
            assert self.manager.pool.match([key], 1) == ([] if number is None else [number])


class Blocks(Conservation, FreeList, Pins, Writes, CachedLength, FailedSteps, ReportedKeys, Oracle):
    """The properties that follow what the manager does."""


class Lookups(Extension, Domains):
    """The properties that look something up in a copy."""


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=max(140, settings.default.max_examples))
TestLookups = Lookups.TestCase
TestLookups.settings = settings(max_examples=max(80, settings.default.max_examples))
