"""The prefix tree of what prompts have put into the cache: branches of blocks, and knots where prompts part or end.

Part of the cache watch, so that it outlives the accountant; fed with each admitted prompt, with the blocks that
decoding fills and with the ends of sequences; read by `tree_view.py`. It says what was cached once: whether a block
still is, the router knows (`router/held_blocks.py`).

    root of a tenant ── branch: 12 blocks, 40 requests ─┬─ branch: 3 blocks, 30 requests
                                                        └─ branch: 8 blocks, 9 requests (one ended at the knot)

Keys are chained, so that two chains with the same key at a place are the same up to there: a prompt finds its way by
bisection, in a time that grows with the branches it passes and not with its blocks.

What must always hold: siblings begin with different keys; at most `MAX_BLOCKS` blocks in `MAX_BRANCHES` branches are
kept, those of open sequences aside.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import attrs

from ..shared.block_keys import KEY_PREFIX_BYTES

MAX_BLOCKS = 400_000
"""About 75 bytes each, with the key."""
MAX_BRANCHES = 50_000


@attrs.frozen(eq=False)
class Passage:
    """A prompt that goes through the tree. One for all branches on its way."""

    request_id: str
    prompt_index: int = 0


NOBODY = Passage("")


@attrs.define(eq=False)
class Branch:
    parent: Branch | None
    """None: a tenant's root, or a branch that was dropped."""
    keys: list[bytes]
    """Never changed in place, but for blocks appended by the only sequence that uses them."""
    depth: int
    """Blocks before it."""
    made_at: float
    used_at: float
    num_requests: int = 0
    """Prompts that contain all of it, or have filled it."""
    num_open: int = 0
    """Sequences that hold it."""
    last_release: int = 0
    """Number of the last release of a sequence that held it."""
    pin_ttl_s: float = 0.0
    """For how long after its last use it is pinned. 0: it is not."""
    made_by: Passage = NOBODY
    """The prompt that put it into the tree, and..."""
    last: Passage = NOBODY
    """...the last one that contains all of it or has filled it."""
    children: dict[bytes, Branch] = attrs.field(factory=dict)
    """By their first key."""
    tenant: str = ""

    @property
    def id(self) -> bytes:
        """The beginning of its first key."""
        return self.keys[0][:KEY_PREFIX_BYTES]

    def path(self) -> Iterator[Branch]:
        """Yield this branch and those above it, without the root."""
        branch: Branch | None = self
        while branch is not None and branch.keys:
            yield branch
            branch = branch.parent


class PrefixTree:
    def __init__(self) -> None:
        self.roots: dict[str, Branch] = {}
        """By tenant, in the order of their first prompts."""
        self.num_blocks = 0
        self._by_id: dict[bytes, Branch] = {}
        self._leaves: OrderedDict[Branch, None] = OrderedDict()
        """The last used ones last."""
        self._tips: dict[int, Branch] = {}
        """By open sequence, the last branch that it uses."""
        self._passages: dict[int, Passage] = {}
        """By open sequence, its prompt."""
        self._num_releases = 0

    @property
    def num_branches(self) -> int:
        return len(self._by_id)

    def find(self, branch_id: bytes) -> Branch | None:
        """Return a branch by its id."""
        return self._by_id.get(branch_id)

    # ------------------------------------------------------------ what happens

    def begin(
        self, tenant: str, sequence_ids: Iterable[int], keys: Sequence[bytes], now: float, passage: Passage = NOBODY
    ) -> Branch:
        """Note an admitted prompt, and that these sequences hold its blocks until `end`; return its last branch."""
        root = self.roots.get(tenant)
        if root is None:
            root = self.roots[tenant] = Branch(None, [], 0, now, now, tenant=tenant)
        tip = self._descend(root, keys, now, passage)
        for branch in tip.path():
            branch.num_requests += 1
            branch.last = passage
        for sequence_id in sequence_ids:
            self.end(sequence_id, now)
            self._tips[sequence_id], self._passages[sequence_id] = tip, passage
            for branch in tip.path():
                branch.num_open += 1
        self._make_room()
        return tip

    def fill(self, sequence_id: int, key: bytes, now: float) -> None:
        """Note a block that decoding has filled, after all others of its sequence."""
        tip = self._tips.get(sequence_id)
        if tip is None or not tip.keys or key in tip.children:
            return
        if tip.num_open == tip.num_requests == 1 and not tip.children and not tip.pin_ttl_s:
            tip.keys.append(key)
            self.num_blocks += 1
        else:
            self._tips[sequence_id] = leaf = self._add(tip, [key], now, self._passages[sequence_id])
            leaf.num_open = leaf.num_requests = 1

    def pin(self, sequence_id: int, num_blocks: int, ttl_s: float) -> None:
        """Note that the first blocks of an open sequence are pinned."""
        tip = self._tips.get(sequence_id)
        for branch in () if tip is None else tip.path():
            if branch.depth < num_blocks:
                length = num_blocks - branch.depth
                upper = self._split(branch, length) if length < len(branch.keys) else branch
                upper.pin_ttl_s = max(upper.pin_ttl_s, ttl_s)

    def end(self, sequence_id: int, now: float) -> None:
        """Note that a sequence holds its blocks no more. Does nothing if that is known."""
        tip = self._tips.pop(sequence_id, None)
        if tip is None:
            return
        del self._passages[sequence_id]
        self._num_releases += 1
        for branch in tip.path():
            branch.num_open -= 1
            branch.last_release = self._num_releases
            branch.used_at = now
        self._touch(tip)

    # ------------------------------------------------------------ branches

    def _descend(self, root: Branch, keys: Sequence[bytes], now: float, passage: Passage) -> Branch:
        """Return the branch with which a prompt ends, after making what is missing of its path."""
        branch, at = root, 0
        while at < len(keys):
            child = branch.children.get(keys[at])
            if child is None:
                return self._add(branch, list(keys[at:]), now, passage)
            length = _num_common(child.keys, keys, at)
            branch = self._split(child, length) if length < len(child.keys) else child
            branch.used_at = now
            at += length
        self._touch(branch)
        return branch

    def _add(self, parent: Branch, keys: list[bytes], now: float, passage: Passage) -> Branch:
        depth = parent.depth + len(parent.keys)
        leaf = Branch(parent, keys, depth, now, now, tenant=parent.tenant, made_by=passage, last=passage)
        parent.children[keys[0]] = self._by_id[leaf.id] = leaf
        self._leaves.pop(parent, None)
        self._leaves[leaf] = None
        self.num_blocks += len(keys)
        return leaf

    def _split(self, lower: Branch, length: int) -> Branch:
        """Cut a branch after `length` blocks; return the new upper part. Open sequences keep the lower one."""
        parent = lower.parent
        assert parent is not None
        upper = attrs.evolve(lower, keys=lower.keys[:length], children={})
        lower.keys, lower.depth, lower.parent = lower.keys[length:], lower.depth + length, upper
        upper.children[lower.keys[0]] = self._by_id[lower.id] = lower
        parent.children[upper.keys[0]] = self._by_id[upper.id] = upper
        return upper

    def _touch(self, branch: Branch) -> None:
        if branch in self._leaves:
            self._leaves.move_to_end(branch)

    def _make_room(self) -> None:
        """Drop leaves, those used longest ago first, until the tree is within its bounds."""
        num_kept = 0
        while self.num_blocks > MAX_BLOCKS or len(self._by_id) > MAX_BRANCHES:
            if num_kept == len(self._leaves):
                return  # all are open
            leaf = next(iter(self._leaves))
            if leaf.num_open:
                self._touch(leaf)
                num_kept += 1
                continue
            parent = leaf.parent
            assert parent is not None
            del self._leaves[leaf], self._by_id[leaf.id], parent.children[leaf.keys[0]]
            leaf.parent = None
            self.num_blocks -= len(leaf.keys)
            if not parent.children:
                if not parent.keys:
                    del self.roots[parent.tenant]
                    continue
                self._leaves[parent] = None
                following = next(iter(self._leaves))
                self._leaves.move_to_end(parent, last=parent.used_at > following.used_at)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds."""
        branches, pending = [], list(self.roots.values())
        while pending:
            branch = pending.pop()
            for first, child in branch.children.items():
                assert child.parent is branch and child.keys[0] == first
                assert child.depth == branch.depth + len(branch.keys) and child.tenant == branch.tenant
                assert self._by_id[child.id] is child
                assert (child in self._leaves) == (not child.children)
                assert not branch.keys or branch.num_open >= child.num_open
                branches.append(child)
            pending += branch.children.values()
        assert len(branches) == len(self._by_id)
        assert sum(len(branch.keys) for branch in branches) == self.num_blocks
        for branch in branches:
            assert branch.num_open == sum(branch in tip.path() for tip in self._tips.values())


def _num_common(ours: Sequence[bytes], keys: Sequence[bytes], at: int) -> int:
    """Return how many of `ours` the chain `keys` has from `at` on. The first is known to be the same."""
    low, high = 1, min(len(ours), len(keys) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
