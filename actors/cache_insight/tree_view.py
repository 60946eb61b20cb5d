"""Reads the prefix tree for the web layer, branch by branch, while it changes. Used by `cache_watch.py`.

What must always hold: between two branches any number of others may be made, cut or dropped; a branch that was cut
meanwhile is told from its top; an engine has a block only if it has all before it, without which no prompt finds it;
none that no engine has is told, but for those on the path of a request that was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge

import attrs

from ..messages.block_manager import MissReason
from ..messages.explanations import ExplainedPrompt, PromptOutline
from .cache_figures import Divergence, HeldBlocks, TreeNode, UnknownBranch, UnknownRequest
from .prefix_tree import Branch, Passage, PrefixTree
from .request_paths import PromptPath, RequestPaths

CHUNK = 1000
"""Children that are sorted at a time."""
Holders = set[int] | None
"""Engines that have all blocks down to some branch. None: down to the root, which has none, so all."""
_DIVERGED = (MissReason.DIVERGED, MissReason.OTHER_DOMAIN)


@attrs.frozen
class TreeView:
    """Reads the tree as of one moment."""

    _tree: PrefixTree
    _paths: RequestPaths
    _held_by: Callable[[Sequence[bytes]], Mapping[int, HeldBlocks]]
    _explained: Callable[[str, int], ExplainedPrompt | None]
    _block_size: int = attrs.field(kw_only=True)
    _now: float = attrs.field(kw_only=True)
    _unix_s: float = attrs.field(kw_only=True)

    def nodes(
        self, tenant: str | None, branch_id: str | None, depth: int, request_id: str | None
    ) -> Iterator[TreeNode | None]:
        """Return the nodes below a branch, or those of a tenant. Raises UnknownBranch and UnknownRequest."""
        tops = self._tops(tenant, branch_id)
        paths: Iterable[PromptPath] = ()
        if request_id is not None:
            found = self._paths.of(request_id, tenant)
            if found is None:
                raise UnknownRequest(request_id)
            paths = found
        return self._generate(tops, depth, paths, None if branch_id is None else tops[0])

    def _tops(self, tenant: str | None, branch_id: str | None) -> list[Branch]:
        """Return the tenants' roots, or the one branch, below which the nodes are."""
        if branch_id is None:
            roots = self._tree.roots
            return list(roots.values()) if tenant is None else [roots[tenant]] if tenant in roots else []
        try:
            found = self._tree.find(bytes.fromhex(branch_id))
        except ValueError:
            found = None
        if found is None or tenant not in (None, found.tenant):
            raise UnknownBranch(branch_id)
        return [found]

    def _generate(
        self, tops: Iterable[Branch], depth: int, paths: Iterable[PromptPath], below: Branch | None
    ) -> Iterator[TreeNode | None]:
        """Yield the branches on `paths`, then the other ones level by level, those of most requests first.

        Yields None after some work that has found none, so that the caller can let others run.
        """
        told: set[bytes] = set()
        for path in paths:
            yield None
            branches = path.branches()
            if below is not None:
                branches = branches[branches.index(below) + 1 :] if below in branches else []
            holders = self._holders(below)
            for branch in branches:
                if not branch.keys or branch.parent is None:
                    yield None
                    continue
                engines = self._held_below(holders, branch)
                holders = _whole(engines, branch)
                if branch.id in told:
                    yield None
                    continue
                told.add(branch.id)
                num_blocks = min(len(branch.keys), path.num_blocks - branch.depth)
                yield self._node(branch, engines, num_blocks)
        pending = deque((top, depth, self._holders(top)) for top in tops)
        while pending:
            parent, levels, holders = pending.popleft()
            chunks: list[list[Branch]] = []
            children = list(parent.children.values())
            for start in range(0, len(children), CHUNK):
                chunks.append(sorted(children[start : start + CHUNK], key=_by_requests))
                yield None
            for child in merge(*chunks, key=_by_requests):
                found = _below(child, parent)
                engines = {} if found is None else self._held_below(holders, found)
                if found is None or not engines:
                    yield None
                    continue
                if levels > 1 and found.children:
                    pending.append((found, levels - 1, _whole(engines, found)))
                yield None if found.id in told else self._node(found, engines)

    def _holders(self, branch: Branch | None) -> Holders:
        """Return the engines that have all of a branch and of those above it."""
        holders: Holders = None
        for part in () if branch is None else branch.path():
            holders = _whole(self._held_below(holders, part), part)
        return holders

    def _held_below(self, holders: Holders, branch: Branch) -> Mapping[int, HeldBlocks]:
        """Return what engines have of a branch, of those that have all above it."""
        engines = self._held_by(branch.keys)
        return engines if holders is None else {engine: held for engine, held in engines.items() if engine in holders}

    def _node(self, branch: Branch, engines: Mapping[int, HeldBlocks], num_path_blocks: int = 0) -> TreeNode:
        size, offset_s = self._block_size, self._unix_s - self._now
        pinned_until = branch.used_at + branch.pin_ttl_s if branch.pin_ttl_s else 0.0
        parent = branch.parent
        last = branch.last.request_id
        return TreeNode(
            branch_id=branch.id.hex(),
            parent_id=parent.id.hex() if parent is not None and parent.keys else None,
            tenant=branch.tenant,
            start=branch.depth * size,
            num_tokens=len(branch.keys) * size,
            engines={engine_id: _in_tokens(held, size) for engine_id, held in engines.items()},
            num_requests=branch.num_requests,
            num_children=len(branch.children),
            made_s=offset_s + branch.made_at,
            used_s=offset_s + branch.used_at,
            pinned_until_s=offset_s + pinned_until if pinned_until > self._now else None,
            is_held=branch.num_open > 0,
            last_release=branch.last_release,
            last_request_id=last if last in self._paths else None,
            diverged=self._divergence(branch),
            path_tokens=num_path_blocks * size,
        )

    def _divergence(self, branch: Branch) -> Divergence | None:
        """Return where a branch diverges: as the engine reported for its first prompt, else its first token."""
        start = branch.depth * self._block_size
        first, last = self._prompt(branch.made_by), self._prompt(branch.last)
        ended = None if first is None else first.ended
        if first is not None and ended is not None and ended.miss.reason in _DIVERGED:
            token = ended.miss.token
            if start <= token < start + self._block_size:
                return _divergence(token, first.outline, is_exact=True)
        known = first if last is None else last
        return None if known is None else _divergence(start, known.outline, is_exact=False)

    def _prompt(self, passage: Passage) -> ExplainedPrompt | None:
        return self._explained(passage.request_id, passage.prompt_index)


def _divergence(token: int, outline: PromptOutline, *, is_exact: bool) -> Divergence:
    part = outline.part_at(token)
    if part is not None:
        return Divergence(token, is_exact, part.role, part.message, part.part)
    # what follows the prompt of a chat is its answer
    return Divergence(token, is_exact, "assistant" if len(outline) else None, None, None)


def _in_tokens(held: HeldBlocks, block_size: int) -> HeldBlocks:
    return HeldBlocks(held.num * block_size, {tier: num * block_size for tier, num in held.lowered.items()})


def _whole(engines: Mapping[int, HeldBlocks], branch: Branch) -> Holders:
    """Return the engines that have all blocks of a branch."""
    return {engine for engine, held in engines.items() if held.num == len(branch.keys)}


def _below(branch: Branch, parent: Branch) -> Branch | None:
    """Return the child of `parent` that now leads to `branch`; None if that was dropped."""
    current: Branch | None = branch
    while current is not None and current.parent is not parent:
        current = current.parent
    return current


def _by_requests(branch: Branch) -> int:
    return -branch.num_requests
