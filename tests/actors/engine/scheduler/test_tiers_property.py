"""The engine with lower tiers under any sequence of events, including moves that are late, fail or carry wrong bytes.
Between two grants, blocks are lent to peers and taken for what is prefetched.

`TieredBench` checks at every report what is counted as loaded; the machine also checks everything that must hold
without a tier: texts, accounts, private writes, conservation of blocks, and that whatever fits alone finishes.
"""

from __future__ import annotations

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.actors.engine.scheduler.test_planning_property import PROMPTS, EngineMachine
from tests.actors.engine.tiered_bench import TieredBench

SLOT = st.integers(0, 63)


class TieredEngine(EngineMachine):
    bench_type = TieredBench
    bench: TieredBench

    @precondition(lambda self: self.bench.stores)
    @rule()
    def store(self) -> None:
        self.bench.carry(self.bench.stores)

    @precondition(lambda self: self.bench.loads)
    @rule(at=st.integers(0, 7))
    def load(self, at: int) -> None:
        self.bench.carry(self.bench.loads, at % len(self.bench.loads))

    @precondition(lambda self: self.bench.num_loads)
    @rule()
    def late(self) -> None:
        self.bench.tell_late()

    @rule(prompt=PROMPTS)
    def lend(self, prompt: list[int]) -> None:
        self.bench.lend(prompt)

    @precondition(lambda self: self.bench.lent)
    @rule(at=st.integers(0, 7))
    def end_lent(self, at: int) -> None:
        self.bench.end_lent(at % len(self.bench.lent))

    @rule(prompt=PROMPTS)
    def prefetch(self, prompt: list[int]) -> None:
        self.bench.prefetch(prompt)

    @precondition(lambda self: any(self.bench.store.headers))
    @rule(slot=SLOT, bit=st.integers(0, 255))
    def flip_bit(self, slot: int, bit: int) -> None:
        self.bench.flip_bit(slot % len(self.bench.store.headers), bit)

    @precondition(lambda self: any(self.bench.store.headers))
    @rule(slot=SLOT, other=SLOT)
    def misplace(self, slot: int, other: int) -> None:
        num_slots = len(self.bench.store.headers)
        if self.bench.store.headers[slot % num_slots] and self.bench.store.headers[other % num_slots]:
            self.bench.misplace(slot % num_slots, other % num_slots)

    @precondition(lambda self: self.bench.disk.blocks)
    @rule(at=st.integers(0, 63), bit=st.integers(0, 255), is_swapped=st.booleans())
    def spoil_disk(self, at: int, bit: int, is_swapped: bool) -> None:
        """Flip a bit of a block on the disk, or put another one with its header in its place."""
        blocks = self.bench.disk.blocks
        slots = list(blocks)
        if is_swapped:
            blocks[slots[at % len(slots)]] = blocks[slots[bit % len(slots)]]
        else:
            contents = blocks[slots[at % len(slots)]][1]
            contents[bit // 8 % len(contents)] ^= 1 << bit % 8

    @rule()
    def fail_copy(self) -> None:
        self.bench.fail_copies = 1

    @rule(prompt=PROMPTS, other=st.integers(4, 9), flips=st.booleans(), late=st.booleans())
    def ask_again_after_eviction(self, prompt: list[int], other: int, flips: bool, late: bool) -> None:
        """Have a prompt stored and evicted, perhaps flip a bit of what is on the host, and submit the prompt again."""
        self.bench.dials.max_tokens_in_memory = None
        self.bench.denied = set()
        self.bench.pump()
        prompt = self.fit(prompt * 2, 1)
        for tokens in (prompt, self.fit([other] * 60, 1)):
            self.bench.submit(tokens, 1)
            self.bench.finish()
        if flips:
            for slot in range(other % 3, len(self.bench.store.headers), 3):
                self.bench.flip_bit(slot, other)
        self.bench.submit(prompt, 3)
        if late:
            self.bench.submit(prompt, 2)
        elif self.bench.loads:
            self.bench.carry(self.bench.loads)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "bench"):
            for name, count in self.bench.counts.items():
                event(f"{name}: {'some' if count else 'none'}")


TestTieredEngine = TieredEngine.TestCase
TestTieredEngine.settings = settings(max_examples=max(110, settings.default.max_examples))
