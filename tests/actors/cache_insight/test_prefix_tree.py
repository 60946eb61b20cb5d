"""The prefix tree: how prompts make and split branches, in whatever order, within bounds on memory."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.cache_insight import prefix_tree
from quipu.actors.cache_insight.prefix_tree import MAX_PATH, Branch, PrefixTree


def check(tree: PrefixTree) -> None:
    """Raise AssertionError unless every invariant holds."""
    branches, pending = [], list(tree.roots.values())
    while pending:
        branch = pending.pop()
        for first, child in branch.children.items():
            assert child.parent is branch and child.keys[0] == first
            assert child.depth == branch.depth + len(branch.keys) and child.tenant == branch.tenant
            assert tree._by_id[child.id] is child
            is_free = not child.children and not child.num_open
            assert (child in tree._leaves[child.tenant]) == is_free
            branches.append(child)
        pending += branch.children.values()
    assert len(branches) == len(tree._by_id)
    assert sum(len(branch.keys) for branch in branches) == tree.num_blocks
    for branch in branches:
        own = sum(tip is branch for tip in tree._tips.values())
        assert branch.num_open == own + sum(child.num_open > 0 for child in branch.children.values())


def chain(*numbers: int, of: str = "a") -> list[bytes]:
    """Return chained keys of blocks with these contents."""
    key, keys = of.encode(), []
    for number in numbers:
        key = hashlib.sha256(key + number.to_bytes(4, "little")).digest()
        keys.append(key)
    return keys


def shape(tree: PrefixTree, tenant: str = "a") -> Any:
    """Return nested tuples of each branch: blocks, requests, and its children in order of size."""

    def of(branch: Branch) -> Any:
        below = sorted(map(of, branch.children.values()), key=str)
        return (len(branch.keys), branch.num_requests, *below)

    return of(tree.roots[tenant])


def test_prompts_split_branches() -> None:
    """Each prompt follows the branches that it shares, and a branch is split where a prompt diverges or ends."""
    tree = PrefixTree()
    tree.begin("a", [1], chain(1, 2, 3, 4), 0.0)
    assert shape(tree) == (0, 0, (4, 1))
    tree.begin("a", [2], chain(1, 2, 5), 1.0)
    assert shape(tree) == (0, 0, (2, 2, (1, 1), (2, 1)))
    tree.begin("a", [3], chain(1), 2.0)
    assert shape(tree) == (0, 0, (1, 3, (1, 2, (1, 1), (2, 1))))
    tree.begin("a", [4], chain(9), 3.0)
    tree.begin("b", [5], chain(1, of="b"), 3.0)
    assert shape(tree) == (0, 0, (1, 1), (1, 3, (1, 2, (1, 1), (2, 1))))
    check(tree)


def test_filled_blocks_continue_their_sequence() -> None:
    """Blocks that decoding fills continue the prompt's branch, separately for each sequence; the next turn shares
    them."""
    tree = PrefixTree()
    prompt = chain(1, 2)
    tree.begin("a", [1, 2], prompt, 0.0)
    for sequence_id, numbers in ((1, (1, 2, 3, 4)), (2, (1, 2, 7))):
        for key in chain(*numbers)[2:]:
            tree.fill(sequence_id, key, 1.0)
    assert shape(tree) == (0, 0, (2, 1, (1, 1), (2, 1)))
    tree.begin("a", [3], chain(1, 2, 3, 4, 5), 2.0)
    assert shape(tree) == (0, 0, (2, 2, (1, 1), (2, 2, (1, 1))))
    tree.fill(9, prompt[0], 2.0)
    check(tree)


def test_ends_of_sequences() -> None:
    """A branch is held by the open sequences that use it, even after it was split, and knows its last release."""
    tree = PrefixTree()
    tree.begin("a", [1], chain(1, 2, 3), 0.0)
    tree.begin("a", [2], chain(1, 2, 4), 1.0)
    (top,) = tree.roots["a"].children.values()
    first, second = top.children.values()
    assert (top.num_open, first.num_open, second.num_open) == (2, 1, 1)
    tree.end(2, 5.0)
    tree.end(2, 9.0)
    assert (top.num_open, first.num_open, second.num_open) == (1, 1, 0)
    assert (top.used_at, first.used_at, second.used_at) == (5.0, 0.0, 5.0)
    tree.end(1, 6.0)
    assert top.last_release == first.last_release > second.last_release
    check(tree)


def test_pinned_part_is_a_branch() -> None:
    """A branch is split where the pinned prefix ends."""
    tree = PrefixTree()
    tree.begin("a", [1], chain(1, 2, 3, 4), 0.0)
    tree.pin(1, 3, 300)
    (top,) = tree.roots["a"].children.values()
    (rest,) = top.children.values()
    assert (len(top.keys), top.pin_ttl_s, len(rest.keys), rest.pin_ttl_s) == (3, 300, 1, 0)
    tree.begin("a", [2], chain(1), 1.0)
    (top,) = tree.roots["a"].children.values()
    assert (len(top.keys), top.pin_ttl_s) == (1, 300)
    check(tree)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used leaves are dropped, but not those of open sequences."""
    monkeypatch.setattr(prefix_tree, "MAX_BLOCKS", 10)
    monkeypatch.setattr(prefix_tree, "MAX_BRANCHES", 4)
    tree = PrefixTree()
    tree.begin("open", [0], chain(1, 2, of="open"), 0.0)
    for number in range(1, 40):
        tree.begin("a", [number], chain(1, number), 0.0)
        tree.end(number, 0.0)
        check(tree)
    assert tree.num_blocks <= 10 and tree.num_branches <= 4 and "open" in tree.roots
    tree.begin("b", [99], chain(*range(30), of="b"), 0.0)
    assert "a" not in tree.roots and shape(tree, "b") == (0, 0, (30, 1)), "an open sequence's branch must stay"
    tree.end(99, 0.0)
    tree.begin("c", [100], chain(1, of="c"), 0.0)
    assert set(tree.roots) == {"open", "c"}
    check(tree)


def test_tenants_keep_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant that keeps sending displaces only its own branches, whether they are many or long."""
    monkeypatch.setattr(prefix_tree, "MAX_BLOCKS", 200)
    monkeypatch.setattr(prefix_tree, "MAX_BRANCHES", 40)
    tree = PrefixTree()
    for tenant in ("b", "c"):
        for number in range(5):
            tree.begin(tenant, [], chain(number, of=tenant), 0.0)
    before = [shape(tree, tenant) for tenant in ("b", "c")]
    for number in range(100):
        tree.begin("a", [], chain(number), 1.0)
        tree.begin("a", [], chain(number, *range(30)), 1.0)
        check(tree)
    assert [shape(tree, tenant) for tenant in ("b", "c")] == before
    assert tree.num_branches <= 40 and tree.num_blocks <= 200 and len(tree.roots["a"].children) >= 3
    for number in range(40):
        tree.begin(f"t{number}", [], chain(1, of=f"t{number}"), 2.0)
    check(tree)
    assert tree.num_branches <= 40 and "t39" in tree.roots, "there is no room for all tenants"


def num_lines(call: Callable[[], object]) -> int:
    """Return how many lines of the tree's module a call executes."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != prefix_tree.__file__:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_deep_paths_cost_little() -> None:
    """A prompt passes a bounded number of branches; however many sequences begin or end, the branches that they share
    are visited only once."""
    tree, keys = PrefixTree(), chain(*range(2000))
    for length in range(2000, 0, -1):
        tree.begin("a", [], keys[:length], 0.0)
    begun = num_lines(lambda: tree.begin("a", range(500), keys, 1.0))
    assert begun < 20 * MAX_PATH + 500 * 20
    for sequence_id in range(500, 1000):
        tree.begin("a", [sequence_id], keys[: 2 * sequence_id], 1.0)

    def end_all() -> None:
        for sequence_id in range(1000):
            tree.end(sequence_id, 2.0)

    ended = num_lines(end_all)
    assert ended < 20 * MAX_PATH + 1000 * 20
    assert all(not branch.num_open for branch in tree.roots["a"].children.values())


def test_prompt_beyond_the_longest_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond the longest path are not in the tree, and neither are those that decoding fills after them."""
    monkeypatch.setattr(prefix_tree, "MAX_PATH", 3)
    tree, keys = PrefixTree(), chain(*range(9))
    for length in range(1, 8):
        tip = tree.begin("a", [length], keys[:length], 0.0)
        assert tip.depth + len(tip.keys) == min(length, 3)
        tree.fill(length, chain(*range(length), 99)[-1], 0.0)
        check(tree)
    assert shape(tree) == (0, 0, (1, 7, (1, 1), (1, 6, (1, 1), (1, 5, (1, 1)))))


@given(st.integers(0, 1 << 32))
def test_any_order(seed: int) -> None:
    """After any prompts, each block that was used is in the tree once, with the number of prompts that contained it."""
    rng = random.Random(seed)
    tree, uses = PrefixTree(), dict[bytes, int]()
    open_ids: list[int] = []
    for sequence_id in range(30):
        keys = chain(*(rng.randrange(2) for _ in range(rng.randrange(1, 7))))
        tree.begin("a", [sequence_id], keys, 0.0)
        open_ids.append(sequence_id)
        for key in keys:
            uses[key] = uses.get(key, 0) + 1
        if rng.random() < 0.2:
            tree.pin(rng.choice(open_ids), rng.randrange(1, 5), 60)
        if rng.random() < 0.4:
            tree.end(open_ids.pop(rng.randrange(len(open_ids))), 1.0)
        check(tree)
    found: dict[bytes, int] = {}
    pending = list(tree.roots["a"].children.values())
    while pending:
        branch = pending.pop()
        found |= dict.fromkeys(branch.keys, branch.num_requests)
        pending += branch.children.values()
    assert found == uses
