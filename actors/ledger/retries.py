"""Finds the first admitted request with the same idempotency digest, of which a request is a retry.

Used by the journal. Rebuilt at start-up: from the write-ahead file entry by entry, and from the database as whole
`TenantKeys`, made in a worker thread. Pure.

What must always hold: of the known first requests the earliest within the window is returned; a tenant's keys are
bounded by the window and by number, and its oldest are forgotten first, never another tenant's. Retries of a forgotten
key are not recognized, which changes no bill.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterator

import attrs

from ..messages.usage_record import UsageRecord

_KEY_BYTES = 16


@attrs.frozen
class FirstRequest:
    request_id: str
    at: float
    """When it was admitted, in Unix seconds."""


class TenantKeys:
    """One tenant's first requests by digest, in order of insertion, which is nearly that of admission."""

    def __init__(self) -> None:
        self._firsts: dict[bytes, FirstRequest] = {}
        self._order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._firsts)

    def get(self, digest: str) -> FirstRequest | None:
        return self._firsts.get(_short(digest))

    def put(self, digest: str, first: FirstRequest, window_s: float) -> None:
        """Add a first request, unless an earlier one within the window is known."""
        key = _short(digest)
        known = self._firsts.get(key)
        if known is None:
            self._order.append(key)
        elif known.at <= first.at <= known.at + window_s:
            return
        self._firsts[key] = first

    @property
    def oldest_at(self) -> float:
        """Admission time of the oldest request; infinite if there is none."""
        return self._firsts[self._order[0]].at if self._order else float("inf")

    def forget_oldest(self) -> None:
        del self._firsts[self._order.popleft()]

    def remove_known_to(self, others: TenantKeys) -> None:
        """Remove the keys for which `others` has the same request or an earlier one."""
        theirs = others._firsts
        for key in [key for key, first in self._firsts.items() if key in theirs and theirs[key].at <= first.at]:
            del self._firsts[key]
        self._order = deque(key for key in self._order if key in self._firsts)


@attrs.frozen(eq=False)
class _Tenant:
    learned: TenantKeys = attrs.field(factory=TenantKeys)
    """From the write-ahead file, and since start-up."""
    adopted: TenantKeys = attrs.field(factory=TenantKeys)
    """From the database. Kept separately, since merging the two would block the event loop."""

    def __len__(self) -> int:
        return len(self.learned) + len(self.adopted)

    def get(self, digest: str) -> Iterator[FirstRequest]:
        for keys in (self.learned, self.adopted):
            if (first := keys.get(digest)) is not None:
                yield first

    def trim(self, before: float, max_keys: int) -> None:
        """Forget keys older than `before`, and the oldest beyond `max_keys`."""
        learned, adopted = self.learned, self.adopted
        while True:
            oldest = adopted if len(adopted) and adopted.oldest_at <= learned.oldest_at else learned
            within_limits = oldest.oldest_at >= before and len(learned) + len(adopted) <= max_keys
            if within_limits or not len(oldest):
                return
            oldest.forget_oldest()


class RetryIndex:
    def __init__(self, window_s: float, max_keys: int) -> None:
        """`max_keys`: per tenant."""
        self._window_s = window_s
        self._max_keys = max_keys
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Ordered by when each was last trimmed, oldest first."""

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def first_of(self, record: UsageRecord) -> str | None:
        """Return the request that this one retries. None: it is not a retry, or the first is not known."""
        tenant = self._tenants.get(record.tenant)
        if record.idempotency_digest is None or tenant is None:
            return None
        known = [f for f in tenant.get(record.idempotency_digest) if f.at >= record.received_at - self._window_s]
        first = min(known, key=lambda first: first.at, default=None)
        return None if first is None or first.request_id == record.request_id else first.request_id

    def admit(self, record: UsageRecord) -> None:
        """Add a request that was admitted, by this server or an earlier one. In any order."""
        if record.idempotency_digest is None or record.retry_of is not None or record.admitted_at is None:
            return
        before = record.admitted_at - self._window_s
        tenant = self._tenants.get(record.tenant)
        if tenant is None:
            tenant = self._tenants[record.tenant] = _Tenant()
        tenant.learned.put(
            record.idempotency_digest, FirstRequest(record.request_id, record.admitted_at), self._window_s
        )
        tenant.trim(before, self._max_keys)
        self._trim_next(before)

    def adopt(self, name: str, keys: TenantKeys) -> None:
        """Take over a tenant's keys from the database, at most `max_keys`. Takes a few milliseconds for 10,000."""
        learned = self._tenants[name].learned if name in self._tenants else TenantKeys()
        if len(learned):
            keys.remove_known_to(learned)
        tenant = self._tenants[name] = _Tenant(learned, keys)
        tenant.trim(float("-inf"), self._max_keys)

    def _trim_next(self, before: float) -> None:
        """Trim one tenant after the other, so that those that send no more keys do not keep any."""
        name = next(iter(self._tenants))
        tenant = self._tenants[name]
        tenant.trim(before, self._max_keys)
        if len(tenant):
            self._tenants.move_to_end(name)
        else:
            del self._tenants[name]


def _short(digest: str) -> bytes:
    """Return a digest of the digest, which takes less than half of its memory."""
    return hashlib.blake2b(digest.encode("utf-8", "replace"), digest_size=_KEY_BYTES).digest()
