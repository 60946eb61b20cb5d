"""Who of those that wait is served next: the tenants in turns, and those of one tenant in the order of their coming.

Used by the tokenizer's lanes and by the pool that renders chats. What must always hold: nothing is served before an
earlier item of its tenant; what waits is bounded in number and in bytes, and one tenant can fill half of that at most,
so that it is refused alone.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

import attrs

T = TypeVar("T")


class Crowded(Exception):
    """Too much waits already. Answer 503 with Retry-After."""


@attrs.define(eq=False)
class _Waiting(Generic[T]):
    item: T
    num_bytes: int


@attrs.define(eq=False)
class _Tenant(Generic[T]):
    waiting: deque[_Waiting[T]] = attrs.field(factory=deque)
    num_bytes: int = 0
    num_held: int = 0
    """Items of it that were taken and are not done."""


class FairQueue(Generic[T]):
    """What waits, by tenant. Items are told apart by identity."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        """`max_items`, `max_bytes`: that may wait, half of it of one tenant. Where nothing waits, any item may."""
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, _Tenant[T]] = OrderedDict()  # who is first is next
        self.num_waiting = 0
        self.num_waiting_bytes = 0

    @property
    def num_tenants(self) -> int:
        """Of whom something waits or is held."""
        return len(self._tenants)

    def put(self, tenant: str, item: T, num_bytes: int) -> None:
        """Have an item wait. Raises Crowded."""
        its = self._tenants.setdefault(tenant, _Tenant())
        if not self._has_room(its, num_bytes):
            self._forget(tenant, its)
            raise Crowded
        its.waiting.append(_Waiting(item, num_bytes))
        self._count(its, 1, num_bytes)

    def put_back(self, tenant: str, item: T) -> None:
        """Have an item that was taken wait again: before all others of its tenant, which has had its turn."""
        its = self._tenants[tenant]
        its.num_held -= 1
        its.waiting.appendleft(_Waiting(item, 0))
        self._tenants.move_to_end(tenant)
        self._count(its, 1, 0)

    def take(self, most_of_one: int) -> T | None:
        """The next item of the next tenant that holds fewer than `most_of_one`; None: there is none."""
        for tenant, its in self._tenants.items():
            if its.waiting and its.num_held < most_of_one:
                taken = its.waiting.popleft()
                self._count(its, -1, -taken.num_bytes)
                its.num_held += 1
                self._tenants.move_to_end(tenant)
                return taken.item
        return None

    def others_wait(self, tenant: str, most_of_one: int) -> bool:
        """Whether another tenant could be served, were this one to give a place back."""
        return any(name != tenant and its.waiting and its.num_held < most_of_one for name, its in self._tenants.items())

    def drop(self, tenant: str, item: T) -> None:
        """Forget an item that waits."""
        its = self._tenants[tenant]
        at = next(at for at, waiting in enumerate(its.waiting) if waiting.item is item)
        dropped = its.waiting[at]
        del its.waiting[at]
        self._count(its, -1, -dropped.num_bytes)
        self._forget(tenant, its)

    def done(self, tenant: str) -> None:
        """An item that was taken is done."""
        its = self._tenants[tenant]
        its.num_held -= 1
        self._forget(tenant, its)

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

    def _forget(self, tenant: str, its: _Tenant[T]) -> None:
        """Keep no place for a tenant that has nothing here."""
        if not its.waiting and not its.num_held:
            del self._tenants[tenant]
