"""A Hypothesis state machine that plays the scheduler: everything that can happen to a block manager, as rules.

A rule may propose any rows, chunks, victims, candidates and marks that a scheduler could; results, failures, resets and
ends come in any order, at any time. The machines of `test_reservation_property.py` add what must hold after a grant
(`check_grant`) or at any moment.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import attrs
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from quipu.actors.engine.block_manager.block_pool import BlockPool
from quipu.actors.engine.block_manager.pools import Pool
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.prompts import Pin
from quipu.actors.messages.scheduler import Granted
from quipu.actors.shared.native import IS_COMPILED
from tests.actors.engine.block_manager.block_oracle import Content
from tests.actors.engine.block_manager.pool_kinds import POOLS
from tests.actors.engine.block_manager.proposals import Candidate, Filled, keys_of, reserve, root_of

MAX_IN_FLIGHT = 3
MAX_OUTPUTS = 7

TRUNK = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1]
PROMPTS = st.builds(
    lambda shared, own: TRUNK[:shared] + own, st.integers(0, len(TRUNK)), st.lists(st.integers(0, 1), max_size=3)
).filter(bool)
"""Prompts that often share a prefix."""
SHORT_S, LONG_S = 5, 60
MARKS = st.lists(st.tuples(st.integers(0, 15), st.sampled_from([SHORT_S, LONG_S])), max_size=3)
"""Positions, unordered, with a time to live for the prefix before each."""


@attrs.define(eq=False)
class Sequence:
    id: int
    domain: str
    tokens: list[int]
    num_prompt_tokens: int
    pins: tuple[Pin, ...] = ()
    running: bool = False
    computed: int = 0
    pending: int = 0
    num_keyed: int = 0
    """Blocks whose keys the manager was given."""
    epoch: int = 0
    """Incremented whenever it loses its blocks; rows of an earlier epoch are void."""

    @property
    def remaining(self) -> int:
        return len(self.tokens) + self.pending - self.computed

    def lose_blocks(self) -> None:
        self.running = False
        self.computed = self.pending = 0
        self.epoch += 1


@attrs.frozen
class Row:
    sequence: Sequence
    epoch: int
    start: int
    end: int
    samples: bool
    first: bool


class ReservationRules(RuleBasedStateMachine):
    """One block manager, and the sequences that it serves."""

    is_copied = False
    """Whether the machine copies its manager, which is impossible with a pool or a table in C."""

    @initialize(
        make_pool=st.sampled_from(POOLS),
        size=st.integers(1, 4),
        usable=st.integers(2, 12),
        caching=st.sampled_from([True] * 5 + [False]),
        watermark=st.integers(0, 2),
        pinned_share=st.sampled_from([0.0, 0.5, 0.5, 1.0]),
        prompts=st.lists(PROMPTS, min_size=2, max_size=5),
    )
    def start(
        self,
        make_pool: Callable[[int], Pool],
        size: int,
        usable: int,
        caching: bool,
        watermark: int,
        pinned_share: float,
        prompts: list[list[int]],
    ) -> None:
        self.size, self.usable, self.caching, self.watermark = size, usable, caching, watermark
        self.max_pinned = int(usable * pinned_share)
        in_c = IS_COMPILED and not self.is_copied
        with patch("quipu.actors.shared.key_table.IS_COMPILED", in_c):
            self.manager = BlockManager(
                usable + 1,
                size,
                enable_prefix_caching=caching,
                watermark_blocks=watermark,
                max_pinned_share=pinned_share,
                make_pool=BlockPool if self.is_copied else make_pool,
            )
        self.now = 0.0
        self.sequences: dict[int, Sequence] = {}
        self.num_prompt_tokens: dict[int, int] = {}
        self.in_flight: list[tuple[int, list[Row]]] = []
        self.step = 1
        self.next_id = 1
        self.seen: dict[Content, bytes] = {}
        self.forget_updates()
        self.begin()
        for tokens in prompts:
            self.submit("a", tokens, [])

    def begin(self) -> None:
        """Called once the manager exists, before anything has happened."""

    def check_grant(self, proposal: Reserve, granted: Granted, offered: list[Candidate]) -> None:
        """Called after each grant."""

    def forget_updates(self) -> None:
        self.failed: list[int] = []
        self.committed: list[int] = []
        self.filled: list[tuple[int, int, Content]] = []
        self.frees: list[int] = []
        self.reset = False

    @property
    def running(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if s.running]

    @property
    def waiting(self) -> list[Sequence]:
        return [s for s in self.sequences.values() if not s.running]

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.waiting) < 6)
    @rule(domain=st.sampled_from("aab"), tokens=PROMPTS, marks=MARKS)
    def submit(self, domain: str, tokens: list[int], marks: list[tuple[int, int]]) -> None:
        tokens = tokens[: self.usable * self.size]
        pins = {min(at, len(tokens)) // self.size: ttl_s for at, ttl_s in marks}
        wanted = tuple(Pin(num_blocks, pins[num_blocks]) for num_blocks in sorted(pins) if num_blocks)
        self.sequences[self.next_id] = Sequence(self.next_id, domain, tokens, len(tokens), wanted)
        self.num_prompt_tokens[self.next_id] = len(tokens)
        self.next_id += 1

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), marks=MARKS)
    def submit_seen_tokens(self, data: st.DataObject, marks: list[tuple[int, int]]) -> None:
        """Submit a prompt that repeats another sequence's tokens, including outputs, and continues."""
        other = data.draw(st.sampled_from(list(self.sequences.values())), "like")
        self.submit(other.domain, other.tokens + data.draw(st.lists(st.integers(0, 1), max_size=3), "more"), marks)

    @rule(seconds=st.sampled_from([1, SHORT_S - 1, SHORT_S, LONG_S - SHORT_S, LONG_S]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def reset_prefix_cache(self) -> None:
        """Reset the cache with the next grant, before anything else."""
        self.reset = True

    @precondition(lambda self: len(self.in_flight) < MAX_IN_FLIGHT)
    @rule(data=st.data())
    def propose(self, data: st.DataObject) -> None:
        capacity = self.usable * self.size
        able = [s for s in self.running if s.remaining and s.computed < capacity]
        chosen = data.draw(st.permutations(able), "rows")[: data.draw(st.integers(0, len(able)), "of them")]
        rows = [
            (s.id, s.computed, data.draw(st.integers(1, min(s.remaining, capacity - s.computed)), "count"))
            for s in chosen
        ]
        victims = data.draw(st.permutations([s.id for s in self.running]), "victims")
        candidates = self.waiting[: data.draw(st.integers(0, 4), "candidates")]
        self.grant(rows, victims, candidates, data.draw(st.integers(0, 24), "budget"))

    @precondition(lambda self: len(self.in_flight) < MAX_IN_FLIGHT)
    @rule()
    def propose_everything(self) -> None:
        """Propose what the real scheduler would: every running sequence advances, then the waiting ones follow."""
        capacity = self.usable * self.size
        able = [s for s in self.running if s.remaining and s.computed < capacity]
        rows = [(s.id, s.computed, s.remaining) for s in able if s.computed + s.remaining <= capacity]
        self.grant(rows, [s.id for s in reversed(self.running)], self.waiting, 32)

    @rule(bits=st.integers(0, 2**16 - 1), num_steps=st.integers(1, 8), overlap=st.integers(0, 2))
    def generate(self, bits: int, num_steps: int, overlap: int) -> None:
        """Run several steps, `overlap` of them in flight at each grant; tokens are drawn from `bits`."""
        for _ in range(num_steps):
            while len(self.in_flight) > overlap:
                bits = self.finish(bits)
            self.propose_everything()

    @precondition(lambda self: self.failed or self.committed or self.filled or self.frees or self.reset)
    @rule()
    def send_empty_reserve(self) -> None:
        """Send a Reserve without rows or candidates, which only reports on earlier steps."""
        self.grant([], [], [], 0)

    @precondition(lambda self: self.in_flight)
    @rule(bits=st.integers(0, 15))
    def finish_step(self, bits: int) -> None:
        self.finish(bits)

    def finish(self, bits: int) -> int:
        """Finish the oldest step, sampling the lowest of `bits`. Returns the bits that are left."""
        step, rows = self.in_flight.pop(0)
        self.committed.append(step)
        for row in rows:
            sequence = row.sequence
            if row.epoch != sequence.epoch or not sequence.running:
                continue
            if row.samples:
                sequence.tokens.append(bits & 1)
                bits >>= 1
                sequence.pending -= 1
            for index in range(sequence.num_keyed, row.end // self.size):
                content = (sequence.domain, tuple(sequence.tokens[: (index + 1) * self.size]))
                self.filled.append((sequence.id, index, content))
                sequence.num_keyed = index + 1
            num_outputs = len(sequence.tokens) - sequence.num_prompt_tokens
            if num_outputs == MAX_OUTPUTS or len(sequence.tokens) > self.usable * self.size:
                self.end(sequence)
        return bits

    @precondition(lambda self: self.in_flight)
    @rule()
    def fail_step(self) -> None:
        """Make the oldest step raise; those after it are dropped."""
        broken, self.in_flight = self.in_flight, []
        for step, rows in reversed(broken):
            self.failed.append(step)
            for row in reversed(rows):
                sequence = row.sequence
                if row.epoch != sequence.epoch or not sequence.running:
                    continue
                if step == broken[0][0]:
                    self.end(sequence)
                elif row.first:
                    self.frees.append(sequence.id)
                    sequence.lose_blocks()
                else:
                    sequence.computed = row.start
                    sequence.pending -= row.samples

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.running), "sequence"))

    def end(self, sequence: Sequence) -> None:
        self.frees.append(sequence.id)
        sequence.lose_blocks()
        del self.sequences[sequence.id]

    # ------------------------------------------------------------ a grant

    def grant(
        self, rows: list[tuple[int, int, int]], victims: list[int], candidates: list[Sequence], budget: int
    ) -> None:
        offered = [Candidate(s.id, list(s.tokens), s.num_prompt_tokens, s.domain, s.pins) for s in candidates]
        proposal = reserve(
            self.step,
            self.size,
            failed=self.failed,
            committed=self.committed,
            filled=[self.fill(*filled) for filled in self.filled],
            reset=self.reset,
            free=self.frees,
            rows=rows,
            victims=victims,
            candidates=offered,
            budget=budget,
        )
        granted = self.manager.grant(proposal, self.now)
        self.check_grant(proposal, granted, offered)
        self.forget_updates()
        self.follow(granted)

    def follow(self, granted: Granted) -> None:
        """Advance the sequences according to a grant."""
        for sequence_id in granted.preempted_ids:
            self.sequences[sequence_id].lose_blocks()
        sent = []
        for sequence_id, start, count in zip(granted.sequence_ids, granted.starts, granted.counts, strict=True):
            sequence = self.sequences[sequence_id]
            first = sequence_id in granted.admitted_ids
            if first:
                sequence.running = True
                sequence.num_keyed = len(sequence.tokens) // self.size
            sequence.computed = start + count
            samples = sequence.remaining == 0
            sequence.pending += samples
            sent.append(Row(sequence, sequence.epoch, start, start + count, samples, first))
        if sent:
            self.in_flight.append((self.step, sent))
            self.step += 1

    def fill(self, sequence_id: int, index: int, content: Content) -> Filled:
        domain, tokens = content
        start = index * self.size
        parent = self.key((domain, tokens[:start])) if index else root_of(domain, self.size)
        return Filled(sequence_id, index, self.key(content), parent, list(tokens[start:]))

    def key(self, content: Content) -> bytes:
        if content not in self.seen:
            domain, tokens = content
            self.seen[content] = keys_of(domain, tokens, self.size)[-1]
        return self.seen[content]
