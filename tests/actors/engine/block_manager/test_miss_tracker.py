"""The miss tracker explains misses as if it kept everything, but keeps the tokens of each stored block once."""

from __future__ import annotations

import tracemalloc
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.block_manager import misses
from quipu.actors.engine.block_manager.misses import MAX_RUN_BLOCKS, MissTracker, StoredRun
from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.shared.block_keys import chain_keys

SIZE = 2
ROOTS = (b"r" * 32, b"s" * 32)


class Cache:
    """A cache without a limit, and the oracle: every block's tokens by its key, and whatever was ever evicted."""

    def __init__(self) -> None:
        self.stored: dict[bytes, tuple[bytes, list[int]]] = {}
        self.evicted: set[bytes] = set()
        self.tracker = MissTracker(1000, SIZE, self.stored.__contains__)

    def store(self, root: bytes, token_ids: list[int]) -> None:
        """Store all full blocks of a request; those that are new are stored in runs."""
        keys = chain_keys(root, token_ids, SIZE)
        first = next((index for index, key in enumerate(keys) if key not in self.stored), len(keys))
        if first == len(keys):
            return
        for index, key in enumerate(keys[first:], first):
            parent = keys[index - 1] if index else root
            self.stored[key] = (parent, token_ids[index * SIZE : (index + 1) * SIZE])
            self.evicted.discard(key)
        parent = keys[first - 1] if first else root
        self.tracker.on_stored(keys[first:], parent, token_ids, first * SIZE, first)

    def evict(self, root: bytes, token_ids: list[int], num_left: int) -> None:
        """Evict the end of a chain first, with everything that continues it."""
        going = [key for key in chain_keys(root, token_ids, SIZE)[num_left:] if key in self.stored]
        parents = set(going)
        while more := {key for key, (parent, _) in self.stored.items() if parent in parents} - parents:
            parents |= more
        going = sorted(parents, key=self._depth, reverse=True)
        for key in going:
            del self.stored[key]
            self.evicted.add(key)
        self.tracker.on_removed(going)

    def _depth(self, key: bytes) -> int:
        depth = 0
        while key in self.stored:
            key, depth = self.stored[key][0], depth + 1
        return depth

    def explain(self, root: bytes, token_ids: list[int]) -> CacheMiss:
        keys = chain_keys(root, token_ids, SIZE)
        limit = (len(token_ids) - 1) // SIZE
        matched = next((index for index, key in enumerate(keys) if key not in self.stored), len(keys))
        matched = min(matched, limit)
        answer = self.tracker.explain(root, keys, token_ids, matched, limit)
        if limit <= 0:
            assert answer == CacheMiss(MissReason.TOO_SHORT, 0)
        elif matched < limit and keys[matched] not in self.evicted:
            beginnings = [tokens for parent, tokens in self.stored.values() if parent in ROOTS]
            last = keys[matched - 1] if matched else root
            after = [tokens for parent, tokens in self.stored.values() if parent == last]
            shared = max((_num_common(tokens, token_ids[matched * SIZE :]) for tokens in after), default=0)
            is_elsewhere = matched == 0 and token_ids[:SIZE] in beginnings
            reason = MissReason.OTHER_DOMAIN if is_elsewhere else MissReason.DIVERGED
            assert answer == CacheMiss(reason, matched * SIZE + shared)
        else:
            reason = MissReason.NONE if matched >= limit else MissReason.EVICTED
            assert answer == CacheMiss(reason, matched * SIZE)
        return answer


def _num_common(a: list[int], b: list[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


TOKENS = st.lists(st.integers(0, 1), max_size=14)
ACTS = st.lists(st.tuples(st.sampled_from(["store", "store", "evict"]), st.sampled_from(ROOTS), TOKENS), max_size=12)


@given(ACTS, st.lists(st.tuples(st.sampled_from(ROOTS), TOKENS), min_size=1, max_size=6), st.sampled_from([1, 2, 64]))
def test_explanations_match_oracle(
    acts: list[tuple[str, bytes, list[int]]], prompts: list[tuple[bytes, list[int]]], max_run_blocks: int
) -> None:
    """Whatever was stored and evicted, in runs and parts of any length, explanations match those of the oracle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(misses, "MAX_RUN_BLOCKS", max_run_blocks)
        cache = Cache()
        for act, root, token_ids in acts:
            if act == "store":
                cache.store(root, token_ids)
            else:
                cache.evict(root, token_ids, len(token_ids) // 4)
        for root, token_ids in prompts:
            cache.explain(root, token_ids)


def test_growing_chat_is_kept_once() -> None:
    """The memory for a chat of 32,768 tokens that grew by one block per turn is proportional to its blocks, not to its
    blocks times its turns."""
    size, num_turns = 16, 2048
    keys: list[bytes] = []
    fresh = (index.to_bytes(32, "big") for index in count())
    tracker = MissTracker(num_turns, size, lambda key: True)
    tokens: list[int] = []
    tracemalloc.start()
    try:
        for turn in range(num_turns):
            tokens = [*tokens, *range(turn * size, (turn + 1) * size)]  # each turn's request has its own list
            keys.append(next(fresh))
            tracker.on_stored(keys[-1:], keys[-2] if turn else b"root", tokens, turn * size, turn)
        del tokens
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # complete lists would take 2048 * 2049 / 2 * 16 * 8 bytes, 268 MB, without the numbers in them
    assert num_bytes < 1000 * num_turns


def test_only_the_sequence_of_a_run_continues_it() -> None:
    """A block that another sequence appends to a run is attributed to that sequence."""
    keys = [name * 32 for name in (b"a", b"b", b"c")]
    tracker = MissTracker(9, SIZE, keys.__contains__)
    tracker.on_stored(keys[:1], b"root", [1, 2], 0, 0, sequence_id=1)
    tracker.on_stored(keys[1:2], keys[0], [3, 4], 0, 1, sequence_id=2)
    tracker.on_stored(keys[2:], keys[1], [5, 6], 0, 2, sequence_id=2)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    for num_matched in (1, 2):
        asked = [*keys[:num_matched], b"n" * 32, b"m" * 32]
        miss = tracker.explain(b"root", asked, [*prompt[: 2 * num_matched + 1], 9, 9], num_matched, 3)
        assert miss.token == 2 * num_matched + 1
        assert miss.detail is not None and miss.detail.sequence_id == 2


def test_nothing_is_kept_of_what_was_evicted() -> None:
    """Runs that grew block by block are forgotten with their first block."""
    tracker = MissTracker(9, SIZE, lambda key: True)
    keys = [index.to_bytes(32, "big") for index in range(3)]
    for index, key in enumerate(keys):
        tracker.on_stored([key], keys[index - 1] if index else b"root", [index, index], 0, index, sequence_id=7)
    tracker.on_removed(keys[::-1])
    assert not tracker._by_first_key and not tracker._by_last_key  # noqa: SLF001 (what is kept is not public)
    assert not tracker._runs_after  # noqa: SLF001


def test_tokens_of_evicted_blocks_are_dropped() -> None:
    """A chain's evicted blocks are not kept because its first block is still cached."""
    tracker = MissTracker(1, SIZE, lambda key: True)
    num_blocks = 10 * MAX_RUN_BLOCKS
    keys = [index.to_bytes(32, "big") for index in range(num_blocks)]
    tracker.on_stored(keys, b"root", list(range(num_blocks * SIZE)), 0, 0)
    tracker.on_removed(keys[:0:-1])
    (run,) = tracker._by_first_key.take(keys[:1])  # noqa: SLF001 (what is kept is not public)
    assert run is not None and not tracker._by_first_key  # noqa: SLF001 (nor is that nothing else is)
    assert len(run.keys) == MAX_RUN_BLOCKS and len(run.token_ids) == MAX_RUN_BLOCKS * SIZE


@pytest.mark.parametrize("order", [1, -1])
def test_evicting_one_of_many_runs_does_not_scan_the_others(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    """Prompts of one block that follow the same key can be evicted in any order, each without a linear search."""
    num_runs, num_compared = 1000, 0

    def count_comparisons(one: StoredRun, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return one is other

    monkeypatch.setattr(StoredRun, "__eq__", count_comparisons)
    tracker = MissTracker(num_runs, SIZE, lambda key: True)
    keys = [index.to_bytes(32, "big") for index in range(num_runs)]
    for index, key in enumerate(keys):
        tracker.on_stored([key], b"root", [index, index], 0, 0, index + 1)
    going = keys[::order]
    for first in range(0, num_runs - 2, 2):
        tracker.on_removed(going[first : first + 2])
    assert num_compared < num_runs
    last = going[-1]
    miss = tracker.explain(b"root", [b"n" * 32], [keys.index(last), 5000], 0, 1)
    assert miss.detail is not None and miss.detail.sequence_id == keys.index(last) + 1
