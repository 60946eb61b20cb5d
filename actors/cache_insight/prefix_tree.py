"""The prefix tree of what prompts have put into the cache: branches of blocks, and knots where prompts part or end.

Part of the cache watch, which feeds it with each admitted prompt, the blocks that decoding fills and the ends of
sequences; read by `tree_view.py`. Whether a block is still cached, the router knows (`router/route_store.py`).

    root of a tenant ── branch: 12 blocks, 40 requests ─┬─ branch: 3 blocks, 30 requests
                                                        └─ branch: 8 blocks, 9 requests (one ended at the knot)

Keys are chained, so two chains with the same key at a place are the same up to there: a prompt finds its way by
bisection, in a time that grows with the branches it passes and not with its blocks.

What must always hold: siblings begin with different keys; at most `MAX_BLOCKS` blocks in `MAX_BRANCHES` branches are
kept, those of open sequences aside, and what is dropped is of the tenant that takes most; a prompt passes `MAX_PATH`
branches at most, and sequences that end together walk up what they share once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import attrs

from ..shared.block_keys import KEY_PREFIX_BYTES
from .tenant_shares import TenantShares

MAX_BLOCKS = 400_000
"""About 75 bytes each, with the key."""
MAX_BRANCHES = 50_000
MAX_PATH = 512
"""Branches that a prompt passes. What of it comes after them is not in the tree."""
_BRANCH_SHARE = 8
"""How many blocks a branch counts as, in a tenant's share."""


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
    """Time of the last prompt through it, or of the last release that reached it (`end`)."""
    num_requests: int = 0
    """Prompts that contain all of it, or have filled it."""
    num_open: int = 0
    """Open sequences that end with it, and children that are open. It is held if there is any."""
    last_release: int = 0
    """Number of the release that left it unheld; meaningless while it is held."""
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
        self._leaves: dict[str, OrderedDict[Branch, None]] = {}
        """By tenant, the leaves that are not open, the last used ones last."""
        self._shares = TenantShares()
        self._tips: dict[int, Branch] = {}
        """By open sequence, the last branch that it uses."""
        self._passages: dict[int, Passage] = {}
        """By open sequence, its prompt, if all of that is in the tree."""
        self._num_releases = 0

    @property
    def num_branches(self) -> int:
        return len(self._by_id)

    def find(self, branch_id: bytes) -> Branch | None:
        return self._by_id.get(branch_id)

    def begin(
        self, tenant: str, sequence_ids: Iterable[int], keys: Sequence[bytes], now: float, passage: Passage = NOBODY
    ) -> Branch:
        """Note an admitted prompt, and that these sequences hold its blocks until `end`; return its last branch."""
        root = self.roots.get(tenant)
        if root is None:
            root = self.roots[tenant] = Branch(None, [], 0, now, now, tenant=tenant)
            self._leaves[tenant] = OrderedDict()
        tip = self._descend(root, keys, now, passage)
        for branch in tip.path():
            branch.num_requests += 1
            branch.last = passage
        for sequence_id in sequence_ids:
            self.end(sequence_id, now)
            self._tips[sequence_id] = tip
            if tip.depth + len(tip.keys) == len(keys):
                self._passages[sequence_id] = passage
            self._hold(tip)
        self._make_room()
        return tip

    def fill(self, sequence_id: int, key: bytes, now: float) -> None:
        """Note a block that decoding has filled, after all others of its sequence."""
        tip, passage = self._tips.get(sequence_id), self._passages.get(sequence_id)
        if tip is None or passage is None or not tip.keys or key in tip.children:
            return
        if tip.num_open == tip.num_requests == 1 and not tip.children and not tip.pin_ttl_s:
            tip.keys.append(key)
            self._grow(tip.tenant, num_blocks=1)
        else:
            self._tips[sequence_id] = leaf = self._add(tip, [key], now, passage)
            leaf.num_requests = 1
            self._hold(leaf)
            tip.num_open -= 1

    def pin(self, sequence_id: int, num_blocks: int, ttl_s: float) -> None:
        """Note that the first blocks of an open sequence are pinned."""
        tip = self._tips.get(sequence_id)
        for branch in () if tip is None else tip.path():
            if branch.depth < num_blocks:
                length = num_blocks - branch.depth
                upper = self._split(branch, length) if length < len(branch.keys) else branch
                if upper.pin_ttl_s >= ttl_s:
                    return  # and so is all above it
                upper.pin_ttl_s = ttl_s

    def end(self, sequence_id: int, now: float) -> None:
        """Note that a sequence holds its blocks no more. Does nothing if that is known."""
        branch = self._tips.pop(sequence_id, None)
        if branch is None:
            return
        self._passages.pop(sequence_id, None)
        self._num_releases += 1
        while True:
            branch.num_open -= 1
            branch.last_release = self._num_releases
            branch.used_at = now
            if branch.num_open or branch.parent is None:
                return
            if not branch.children:
                self._leaves[branch.tenant][branch] = None
            branch = branch.parent

    def _hold(self, branch: Branch) -> None:
        """Note that an open sequence ends with a branch."""
        branch.num_open += 1
        while branch.num_open == 1 and branch.parent is not None:
            self._leaves[branch.tenant].pop(branch, None)
            branch = branch.parent
            branch.num_open += 1

    def _descend(self, root: Branch, keys: Sequence[bytes], now: float, passage: Passage) -> Branch:
        """Return the branch with which a prompt ends, after making what is missing of its path."""
        branch, at = root, 0
        for _ in range(MAX_PATH):
            if at == len(keys):
                break
            child = branch.children.get(keys[at])
            if child is None:
                return self._add(branch, list(keys[at:]), now, passage)
            length = _num_common(child.keys, keys, at)
            branch = self._split(child, length) if length < len(child.keys) else child
            branch.used_at = now
            at += length
        if branch in self._leaves[branch.tenant]:
            self._leaves[branch.tenant].move_to_end(branch)
        return branch

    def _add(self, parent: Branch, keys: list[bytes], now: float, passage: Passage) -> Branch:
        depth = parent.depth + len(parent.keys)
        leaf = Branch(parent, keys, depth, now, now, tenant=parent.tenant, made_by=passage, last=passage)
        parent.children[keys[0]] = self._by_id[leaf.id] = leaf
        leaves = self._leaves[parent.tenant]
        leaves.pop(parent, None)
        leaves[leaf] = None
        self._grow(parent.tenant, num_blocks=len(keys), num_branches=1)
        return leaf

    def _grow(self, tenant: str, num_blocks: int = 0, num_branches: int = 0) -> None:
        self.num_blocks += num_blocks
        self._shares.add(tenant, num_blocks + _BRANCH_SHARE * num_branches)

    def _split(self, lower: Branch, length: int) -> Branch:
        """Split a branch after `length` blocks; return the new upper part. Open sequences keep the lower one."""
        parent = lower.parent
        assert parent is not None
        upper = attrs.evolve(lower, keys=lower.keys[:length], children={}, num_open=int(lower.num_open > 0))
        lower.keys, lower.depth, lower.parent = lower.keys[length:], lower.depth + length, upper
        upper.children[lower.keys[0]] = self._by_id[lower.id] = lower
        parent.children[upper.keys[0]] = self._by_id[upper.id] = upper
        self._grow(lower.tenant, num_branches=1)
        return upper

    def _make_room(self) -> None:
        """Drop leaves of the largest tenant, those used longest ago first, until the tree is within its bounds."""
        all_open = set[str]()
        while self.num_blocks > MAX_BLOCKS or len(self._by_id) > MAX_BRANCHES:
            tenant = self._shares.largest(besides=all_open)
            if tenant is None:
                return
            if self._leaves[tenant]:
                self._drop(next(iter(self._leaves[tenant])))
            else:
                all_open.add(tenant)

    def _drop(self, leaf: Branch) -> None:
        parent, leaves = leaf.parent, self._leaves[leaf.tenant]
        assert parent is not None
        del leaves[leaf], self._by_id[leaf.id], parent.children[leaf.keys[0]]
        leaf.parent = None
        self._grow(leaf.tenant, num_blocks=-len(leaf.keys), num_branches=-1)
        if parent.children:
            return
        if not parent.keys:
            del self.roots[parent.tenant], self._leaves[parent.tenant]
        elif not parent.num_open:
            leaves[parent] = None
            following = next(iter(leaves))
            leaves.move_to_end(parent, last=parent.used_at > following.used_at)


def _num_common(ours: Sequence[bytes], keys: Sequence[bytes], at: int) -> int:
    """Return the length of the common prefix of `ours` and `keys[at:]`, at least 1."""
    low, high = 1, min(len(ours), len(keys) - at)
    while low < high:
        middle = (low + high + 1) // 2
        if ours[middle - 1] == keys[at + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
