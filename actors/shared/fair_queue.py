"""A queue that is fair among tenants: they take turns, and one tenant's items are served in order of arrival.

Used by what encodes, renders and checks in `text_workers/`, and by what compiles grammars in the engine.

What must always hold: no item is served before an earlier one of its tenant; the queue is bounded in items and in
bytes, and one tenant can fill at most half of it, so that a tenant that sends too much is refused alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


class QueueFull(Exception):
    """Too much is waiting. The client may retry (503 with Retry-After)."""


@attrs.define(eq=False)
class _Waiting(Generic[T]):
    item: T
    num_bytes: int


@attrs.define(eq=False)
class _Tenant(Generic[T]):
    waiting: deque[_Waiting[T]] = attrs.field(factory=deque)
    num_bytes: int = 0
    num_active: int = 0
    """Items that were taken and are not done."""


class FairQueue(Generic[T]):
    """Waiting items by tenant. Items are compared by identity."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        """`max_items` and `max_bytes` may wait, half of that for one tenant. An empty queue accepts any item."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()  # the first is served next
        self.num_waiting = 0
        self.num_waiting_bytes = 0

    @property
    def num_tenants(self) -> int:
        """Tenants with waiting or active items."""
        return len(self._tenants)

    def put(self, tenant: str, item: T, num_bytes: int) -> None:
        """Add an item. Raises QueueFull."""
        its = self._tenants.setdefault(tenant, _Tenant())
        if not self._has_room(its, num_bytes):
            self._remove_if_unused(tenant, its)
            raise QueueFull
        its.waiting.append(_Waiting(item, num_bytes))
        self._count(its, 1, num_bytes)

    def put_back(self, tenant: str, item: T) -> None:
        """Return an active item to the front of its tenant's items; the tenant goes to the back of the queue."""
        its = self._tenants[tenant]
        its.num_active -= 1
        its.waiting.appendleft(_Waiting(item, 0))
        self._tenants.move_to_end(tenant)
        self._count(its, 1, 0)

    def take(self, max_active: int) -> T | None:
        """Return the next item of the next tenant with fewer than `max_active` active items, or None."""
        for tenant, its in self._tenants.items():
            if its.waiting and its.num_active < max_active:
                taken = its.waiting.popleft()
                self._count(its, -1, -taken.num_bytes)
                its.num_active += 1
                self._tenants.move_to_end(tenant)
                return taken.item
        return None

    def others_wait(self, tenant: str, max_active: int) -> bool:
        """Return whether another tenant could be served if this one gave up a place."""
        return any(
            name != tenant and its.waiting and its.num_active < max_active for name, its in self._tenants.items()
        )

    def drop(self, tenant: str, item: T) -> None:
        """Remove a waiting item."""
        its = self._tenants[tenant]
        at = next(at for at, waiting in enumerate(its.waiting) if waiting.item is item)
        dropped = its.waiting[at]
        del its.waiting[at]
        self._count(its, -1, -dropped.num_bytes)
        self._remove_if_unused(tenant, its)

    def done(self, tenant: str) -> None:
        """Record that an active item is done."""
        its = self._tenants[tenant]
        its.num_active -= 1
        self._remove_if_unused(tenant, its)

    def _has_room(self, its: _Tenant[T], num_bytes: int) -> bool:
        if self.num_waiting >= self._max_items or (its.waiting and len(its.waiting) >= self._max_items // 2):
            return False
        if self.num_waiting and self.num_waiting_bytes + num_bytes > self._max_bytes:
            return False
        return not its.waiting or its.num_bytes + num_bytes <= self._max_bytes // 2

    def _count(self, its: _Tenant[T], num_items: int, num_bytes: int) -> None:
        self.num_waiting += num_items
        self.num_waiting_bytes += num_bytes
        its.num_bytes += num_bytes

    def _remove_if_unused(self, tenant: str, its: _Tenant[T]) -> None:
        if not its.waiting and not its.num_active:
            del self._tenants[tenant]
