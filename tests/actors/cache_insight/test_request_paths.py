"""The paths of requests through the prefix tree, which stay right however its branches are split afterwards."""

from __future__ import annotations

import gc
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.cache_insight import prefix_tree
from quipu.actors.cache_insight.prefix_tree import Passage, PrefixTree
from quipu.actors.cache_insight.request_paths import PATHS_EACH, RequestPaths
from tests.actors.cache_insight.test_prefix_tree import chain


@given(st.integers(0, 1 << 32))
def test_path_is_the_prompt(seed: int) -> None:
    """Whatever comes later, a path leads through the blocks of its prompt; only its last branch may continue beyond."""
    rng = random.Random(seed)
    tree, paths, sent = PrefixTree(), RequestPaths(), dict[str, list[bytes]]()
    for number in range(20):
        keys = chain(*(rng.randrange(2) for _ in range(rng.randrange(7))))
        passage = Passage(f"req-{number}")
        sent[passage.request_id] = keys
        paths.note(passage, tree.begin("a", [number], keys, 0.0, passage), len(keys))
        if rng.random() < 0.5:
            tree.fill(number, chain(7, number)[-1], 0.0)
        if rng.random() < 0.2:
            tree.pin(number, rng.randrange(1, 5), 60)
    for request_id, keys in sent.items():
        (path,) = paths.of(request_id, "a") or ()
        branches = path.branches()
        found = [key for branch in branches for key in branch.keys]
        assert found[: len(keys)] == keys
        assert sum(len(branch.keys) for branch in branches[:-1]) < len(keys) or not keys
        assert all(branch.made_by.request_id for branch in branches)
    assert paths.of("req-0", "b") is None and paths.of("req-0", None) is not None


def test_last_prompt_of_a_branch() -> None:
    """A branch knows which prompt made it and which was the last to contain all of it, even after it was split."""
    tree = PrefixTree()
    first, second = Passage("1"), Passage("2")
    tree.begin("a", [1], chain(1, 2, 3), 0.0, first)
    tree.begin("a", [2], chain(1, 2, 9), 0.0, second)
    tree.fill(1, chain(1, 2, 3, 4)[-1], 0.0)
    (top,) = tree.roots["a"].children.values()
    names = {len(branch.keys): (branch.made_by, branch.last) for branch in (top, *top.children.values())}
    assert names[2][:1] == (first,) and top.last is second
    assert [(branch.made_by, branch.last) for branch in top.children.values()] == [(first, first), (second, second)]


def test_dropped_branches_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path does not keep branches alive that the tree has dropped: it is empty then."""
    monkeypatch.setattr(prefix_tree, "MAX_BRANCHES", 2)
    tree, paths = PrefixTree(), RequestPaths()
    for number in range(3):
        passage = Passage(str(number))
        paths.note(passage, tree.begin("a", [number], chain(number), 0.0, passage), 1)
        tree.end(number, 0.0)
    gc.collect()
    first, last = ((*(paths.of(name, "a") or ()),) for name in ("0", "2"))
    assert [path.branches() for path in first] == [[]] and len(last[0].branches()) == 1


def test_bounds() -> None:
    """Only the last requests are remembered, with a bounded number of prompts; with a limit of 0, none are."""
    tree = PrefixTree()
    tip = tree.begin("a", [], chain(1), 0.0)
    paths = RequestPaths(3)
    for number in range(5):
        paths.note(Passage(str(number)), tip, 1)
    assert [str(number) in paths for number in range(5)] == [False, False, True, True, True]
    for index in range(3 * PATHS_EACH - 1):
        paths.note(Passage("many", index), tip, 1)
    assert "many" in paths and "2" not in paths and "4" in paths
    tips = {tenant: tree.begin(tenant, [], chain(1, of=tenant), 0.0) for tenant in ("b", "c")}
    paths.note(Passage("of-c"), tips["c"], 1)
    for number in range(9):
        paths.note(Passage(f"of-b-{number}"), tips["b"], 1)
    assert "of-c" in paths and "of-b-7" in paths and "of-b-6" not in paths, (
        "a tenant's requests must displace only its own"
    )
    none = RequestPaths(0)
    none.note(Passage("1"), tip, 1)
    assert "1" not in none and none.of("1", None) is None
