"""Which tenant has the largest share of something bounded, so that what is forgotten is its own.

Used by the prefix tree and by the paths through it. What must always hold: the largest tenant is found in a time that
does not grow with the number of tenants, but for its logarithm.
"""

from __future__ import annotations

import heapq
from collections.abc import Container


class TenantShares:
    """What each tenant takes, in units of the caller's choice."""

    def __init__(self) -> None:
        self._taken: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []
        """Negative amounts, largest first; some entries are stale."""

    def add(self, tenant: str, amount: int) -> None:
        """Add to a tenant's share, or subtract from it."""
        taken = self._taken.get(tenant, 0) + amount
        if not taken:
            self._taken.pop(tenant, None)
            return
        self._taken[tenant] = taken
        heapq.heappush(self._heap, (-taken, tenant))
        if len(self._heap) > 2 * len(self._taken) + 1000:
            self._heap = [(-amount, tenant) for tenant, amount in self._taken.items()]
            heapq.heapify(self._heap)

    def largest(self, besides: Container[str] = ()) -> str | None:
        """Return the tenant that takes most, of those not in `besides`."""
        set_aside = list[tuple[int, str]]()
        found = None
        while self._heap and found is None:
            negative, tenant = self._heap[0]
            if self._taken.get(tenant) == -negative and tenant not in besides:
                found = tenant
                break
            entry = heapq.heappop(self._heap)
            if self._taken.get(tenant) == -negative:
                set_aside.append(entry)
        for entry in set_aside:
            heapq.heappush(self._heap, entry)
        return found
