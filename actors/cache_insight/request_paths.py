"""The paths of the last requests through the prefix tree. Part of the cache watch; read by `tree_view.py`.

A path is kept as the branch with which the prompt ended. A branch that is split stays the lower part, so that it leads
up through all that was split off it since.

What must always hold: at most `max_requests` requests are remembered, and `PATHS_EACH` prompts of each on average; the
oldest request of the tenant with the most is forgotten first; a branch that the tree has dropped is not kept alive; the
tenant of a request is compared before anything about it is returned.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator

import msgspec

from .prefix_tree import Branch, Passage
from .tenant_shares import TenantShares

PATHS_EACH = 4


class PromptPath(msgspec.Struct, frozen=True, gc=False):
    """A prompt's known path. Weak references close no cycles that a collector would have to find."""

    num_blocks: int
    """Whole blocks of the prompt. The last branch may have more."""
    _tip: weakref.ref[Branch]

    def branches(self) -> list[Branch]:
        """Return the branches on it, top first. Empty: the tree has dropped the last one."""
        tip = self._tip()
        found = [] if tip is None else [branch for branch in tip.path() if branch.depth < self.num_blocks]
        found.reverse()
        return found


class RequestPaths:
    def __init__(self, max_requests: int = 10_000) -> None:
        """Remember `max_requests` at most; 0 remembers none."""
        self._max_requests = max_requests
        self._requests: dict[str, tuple[str, list[PromptPath]]] = {}
        """By id: tenant and paths."""
        self._by_tenant: dict[str, OrderedDict[str, None]] = {}
        """Ids of its requests, the last ones last."""
        self._shares = TenantShares()
        self._num_paths = 0

    def note(self, passage: Passage, tip: Branch, num_blocks: int) -> None:
        """Remember a prompt that ends with `tip`."""
        request_id = passage.request_id
        if not self._max_requests or not request_id:
            return
        tenant, paths = self._requests.setdefault(request_id, (tip.tenant, []))
        self._by_tenant.setdefault(tenant, OrderedDict())[request_id] = None
        paths.append(PromptPath(num_blocks, weakref.ref(tip)))
        self._num_paths += 1
        self._shares.add(tenant, 1)
        while len(self._requests) > self._max_requests or self._num_paths > PATHS_EACH * self._max_requests:
            self._forget_one()

    def _forget_one(self) -> None:
        """Forget the oldest request of the tenant with the most paths."""
        tenant = self._shares.largest()
        assert tenant is not None
        requests = self._by_tenant[tenant]
        oldest, _ = requests.popitem(last=False)
        if not requests:
            del self._by_tenant[tenant]
        _, paths = self._requests.pop(oldest)
        self._num_paths -= len(paths)
        self._shares.add(tenant, -len(paths))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def of(self, request_id: str, tenant: str | None) -> Iterator[PromptPath] | None:
        """Return the paths of a request of this tenant (None: of any tenant); None if they are unknown."""
        its_tenant, paths = self._requests.get(request_id, (None, None))
        return iter(tuple(paths)) if paths is not None and tenant in (None, its_tenant) else None
