"""Reads the prefix tree for the web layer, branch by branch, while it goes on changing. Used by `cache_watch.py`.

What must always hold: between two branches any number of others may be made, cut or dropped; a branch that was cut
meanwhile is told from its top; none that no engine has is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge

from ..request_desk.cache_figures import TreeNode, UnknownBranch
from .prefix_tree import Branch, PrefixTree

CHUNK = 1000
"""Children that are sorted at a time."""


def tops_of(tree: PrefixTree, tenant: str | None, branch_id: str | None) -> list[Branch]:
    """Return what the nodes are to be below: tenants' roots, or one branch. Raises UnknownBranch."""
    if branch_id is None:
        roots = tree.roots
        return list(roots.values()) if tenant is None else [roots[tenant]] if tenant in roots else []
    try:
        found = tree.find(bytes.fromhex(branch_id))
    except ValueError:
        found = None
    if found is None or tenant not in (None, found.tenant):
        raise UnknownBranch(branch_id)
    return [found]


def nodes_of(
    tops: Iterable[Branch],
    depth: int,
    held_by: Callable[[Sequence[bytes]], Mapping[int, int]],
    *,
    block_size: int,
    now: float,
    unix_s: float,
) -> Iterator[TreeNode | None]:
    """Yield the cached branches below `tops`, level by level, the children of one by their requests, most first.

    Yields None after some work that has found none, so that the caller can let others run.
    """
    pending = deque((top, depth) for top in tops)
    while pending:
        parent, levels = pending.popleft()
        chunks: list[list[Branch]] = []
        children = list(parent.children.values())
        for start in range(0, len(children), CHUNK):
            chunks.append(sorted(children[start : start + CHUNK], key=_by_requests))
            yield None
        for child in merge(*chunks, key=_by_requests):
            branch = _below(child, parent)
            engines = {} if branch is None else held_by(branch.keys)
            if branch is None or not engines:
                yield None
                continue
            if levels > 1 and branch.children:
                pending.append((branch, levels - 1))
            pinned_until = branch.used_at + branch.pin_ttl_s if branch.pin_ttl_s else 0.0
            yield TreeNode(
                branch_id=branch.id.hex(),
                parent_id=parent.id.hex() if parent.keys else None,
                tenant=branch.tenant,
                start=branch.depth * block_size,
                num_tokens=len(branch.keys) * block_size,
                engines={engine_id: num_blocks * block_size for engine_id, num_blocks in engines.items()},
                num_requests=branch.num_requests,
                num_children=len(branch.children),
                made_s=unix_s + branch.made_at - now,
                used_s=unix_s + branch.used_at - now,
                pinned_until_s=unix_s + pinned_until - now if pinned_until > now else None,
                is_held=branch.num_open > 0,
                last_release=branch.last_release,
            )


def _below(branch: Branch, parent: Branch) -> Branch | None:
    """Return what is next below a parent on the way to what was its child; None if that was dropped."""
    current: Branch | None = branch
    while current is not None and current.parent is not parent:
        current = current.parent
    return current


def _by_requests(branch: Branch) -> int:
    return -branch.num_requests
