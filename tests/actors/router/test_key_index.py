"""The index of keys: it has the keys that engines have reported, and finds the longest prefix of each at once."""

from __future__ import annotations

import gc
import sys
from types import FrameType

from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quipu.actors.router.key_index import DIGEST_BYTES, NUM_SHARDS, KeyIndex
from tests.actors.router.chains import chain

MAX_DEPTH = 40


def digests(keys: list[bytes]) -> set[bytes]:
    return {key[:DIGEST_BYTES] for key in keys}


class IndexMachine(RuleBasedStateMachine):
    """Engines come, store, evict and go; the index has the same keys as a set for each."""

    def __init__(self) -> None:
        super().__init__()
        self.index = KeyIndex()
        self.held: dict[int, set[bytes]] = {}
        self.ever: set[int] = set()

    @rule()
    def come(self) -> None:
        slot = self.index.take_slot()
        assert slot not in self.held
        self.held[slot] = set()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), path=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def store(self, data: st.DataObject, path: list[int]) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.index.store(slot, chain(path))
        self.held[slot] |= digests(chain(path))

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(slot for slot, keys in self.held.items() if keys)))
        key = data.draw(st.sampled_from(sorted(self.held[slot])))
        self.index.remove(slot, [key])
        self.held[slot].discard(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.index.release_slot(slot)
        del self.held[slot]

    @rule(times=st.sampled_from([1, NUM_SHARDS // 2, NUM_SHARDS]))
    def sweep(self, times: int) -> None:
        for _ in range(times):
            self.index.sweep()

    @invariant()
    def same_keys(self) -> None:
        for slot, keys in self.held.items():
            assert self.index.keys_of(slot) == keys

    def teardown(self) -> None:
        for slot in self.held:
            self.index.release_slot(slot)
        for _ in range(NUM_SHARDS):
            self.index.sweep()
        assert self.index.num_keys == 0


TestIndex = IndexMachine.TestCase


@given(
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_DEPTH),
    depths=st.lists(st.integers(0, MAX_DEPTH), min_size=1, max_size=70),
)
@example(prompt=[0] * MAX_DEPTH, depths=list(range(MAX_DEPTH)))
def test_match_finds_each_engine_s_longest_prefix(prompt: list[int], depths: list[int]) -> None:
    """Every engine is found with the number of blocks that it holds, even if there are more than 64 engines."""
    index, keys = KeyIndex(), chain(prompt)
    for depth in depths:
        index.store(index.take_slot(), keys[:depth])
    found = {
        slot: match.num_blocks for match in index.match(keys) for slot in range(len(depths)) if match.slots >> slot & 1
    }
    assert found == {slot: min(depth, len(keys)) for slot, depth in enumerate(depths) if depth}
    assert index.match([]) == []


def test_engine_that_is_gone_is_not_found() -> None:
    """A released slot is not matched, and not taken again before its keys are removed."""
    index, keys = KeyIndex(), chain([0, 1, 1])
    slot = index.take_slot()
    index.store(slot, keys)
    index.release_slot(slot)
    assert index.match(keys) == [] and index.num_keys == 3
    assert index.take_slot() != slot
    for _ in range(NUM_SHARDS):
        index.sweep()
    assert index.num_keys == 0
    assert index.take_slot() == slot


def calls_to_sweep(num_gone: int) -> int:
    """Return how many calls one sweep takes after `num_gone` engines have gone, one every two sweeps."""
    index, calls = KeyIndex(), 0
    for _ in range(num_gone):
        index.release_slot(index.take_slot())
        index.sweep()
        index.sweep()

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    before = sys.getprofile()
    gc.disable()  # finalizers would be counted, too
    sys.setprofile(count)
    try:
        index.sweep()
    finally:
        sys.setprofile(before)
        gc.enable()
    return calls


def test_engines_that_are_gone_are_swept_together() -> None:
    """A sweep visits one shard, however many engines have gone, for example if one clears its cache again and again."""
    assert calls_to_sweep(100) == calls_to_sweep(1)
