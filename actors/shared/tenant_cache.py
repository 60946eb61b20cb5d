"""A bounded cache in which one tenant's use neither pushes out another's nor tells it anything.

Used for the results of checked grammars and for the processes that follow them. An entry is found only by the tenant
that put it there: otherwise the time that a request takes would tell what others have asked for.

What must always hold: there are never more entries than the limit; what is pushed out is the least recently used entry
of the tenant that has most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class TenantCache(Generic[K, V]):
    """Entries by tenant and key, least recently used first."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._tenants: dict[str, OrderedDict[K, V]] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def get(self, tenant: str, key: K) -> V | None:
        """Return an entry and mark it as most recently used."""
        its = self._tenants.get(tenant)
        if its is None or key not in its:
            return None
        its.move_to_end(key)
        return its[key]

    def put(self, tenant: str, key: K, value: V) -> V | None:
        """Store an entry and return the one that was evicted for it."""
        its = self._tenants.setdefault(tenant, OrderedDict())
        self._num_entries += key not in its
        its[key] = value
        its.move_to_end(key)
        if self._num_entries <= self._max_entries:
            return None
        largest = max(self._tenants, key=lambda name: len(self._tenants[name]))
        return self.pop(largest, next(iter(self._tenants[largest])))

    def pop(self, tenant: str, key: K) -> V | None:
        """Remove an entry, and return it."""
        its = self._tenants.get(tenant)
        if its is None or key not in its:
            return None
        value = its.pop(key)
        self._num_entries -= 1
        if not its:
            del self._tenants[tenant]
        return value
