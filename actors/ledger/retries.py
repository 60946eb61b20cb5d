"""Which admitted request was the first under its idempotency digest.

The journal asks and tells. Rebuilt at a start: from the write-ahead file entry by entry, from the database as whole
`TenantKeys`, which a worker thread has made. Pure.

What must always hold: of the first admitted requests that are known the earliest within the window wins, whoever asks;
a tenant's keys are bounded by the window and by number, its oldest are forgotten first, and never another tenant's. A
key that was forgotten links nothing, which changes no bill.
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
    """Unix seconds of its admission."""


class TenantKeys:
    """First requests of one tenant by their digests, in the order in which they were put in: nearly that of time."""

    def __init__(self) -> None:
        self._firsts: dict[bytes, FirstRequest] = {}
        self._order: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._firsts)

    def get(self, digest: str) -> FirstRequest | None:
        return self._firsts.get(_short(digest))

    def put(self, digest: str, first: FirstRequest, window_s: float) -> None:
        """Unless an earlier one within the window is known."""
        key = _short(digest)
        known = self._firsts.get(key)
        if known is None:
            self._order.append(key)
        elif known.at <= first.at <= known.at + window_s:
            return
        self._firsts[key] = first

    @property
    def oldest_at(self) -> float:
        """Infinite where there is none."""
        return self._firsts[self._order[0]].at if self._order else float("inf")

    def forget_oldest(self) -> None:
        del self._firsts[self._order.popleft()]

    def forget_those_in(self, others: TenantKeys) -> None:
        """Keys of which the others know the same request, or an earlier one."""
        theirs = others._firsts
        for key in [key for key, first in self._firsts.items() if key in theirs and theirs[key].at <= first.at]:
            del self._firsts[key]
        self._order = deque(key for key in self._order if key in self._firsts)


@attrs.frozen(eq=False)
class _Tenant:
    learned: TenantKeys = attrs.field(factory=TenantKeys)
    """From the write-ahead file, and since."""
    adopted: TenantKeys = attrs.field(factory=TenantKeys)
    """From the database: kept apart, since merging the two would hold up the loop."""

    def __len__(self) -> int:
        return len(self.learned) + len(self.adopted)

    def get(self, digest: str) -> Iterator[FirstRequest]:
        for keys in (self.learned, self.adopted):
            if (first := keys.get(digest)) is not None:
                yield first

    def trim(self, before: float, max_keys: int) -> None:
        """Forget what is older than that, and the oldest beyond so many."""
        learned, adopted = self.learned, self.adopted
        while True:
            oldest = adopted if len(adopted) and adopted.oldest_at <= learned.oldest_at else learned
            is_fine = oldest.oldest_at >= before and len(learned) + len(adopted) <= max_keys
            if is_fine or not len(oldest):
                return
            oldest.forget_oldest()


class RetryIndex:
    def __init__(self, window_s: float, max_keys: int) -> None:
        """`max_keys` of each tenant."""
        self._window_s = window_s
        self._max_keys = max_keys
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Whoever was looked at longest ago first."""

    def __len__(self) -> int:
        return sum(map(len, self._tenants.values()))

    def first_of(self, record: UsageRecord) -> str | None:
        """The request whose work this one does again; None: nobody's, or nobody's that is known."""
        tenant = self._tenants.get(record.tenant)
        if record.idempotency_digest is None or tenant is None:
            return None
        known = [f for f in tenant.get(record.idempotency_digest) if f.at >= record.received_at - self._window_s]
        first = min(known, key=lambda first: first.at, default=None)
        return None if first is None or first.request_id == record.request_id else first.request_id

    def admit(self, record: UsageRecord) -> None:
        """A request is admitted, here or in an earlier life; in any order."""
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
        self._look_at_next(before)

    def adopt(self, name: str, keys: TenantKeys) -> None:
        """Take over what the database knows of a tenant, at most `max_keys`: a few milliseconds for 10,000."""
        learned = self._tenants[name].learned if name in self._tenants else TenantKeys()
        if len(learned):
            keys.forget_those_in(learned)
        tenant = self._tenants[name] = _Tenant(learned, keys)
        tenant.trim(float("-inf"), self._max_keys)

    def _look_at_next(self, before: float) -> None:
        """Forget what is too old of one tenant after the other: whoever sends no keys any more keeps none."""
        name = next(iter(self._tenants))
        tenant = self._tenants[name]
        tenant.trim(before, self._max_keys)
        if len(tenant):
            self._tenants.move_to_end(name)
        else:
            del self._tenants[name]


def _short(digest: str) -> bytes:
    """A digest of the digest, less than half its size in memory."""
    return hashlib.blake2b(digest.encode("utf-8", "replace"), digest_size=_KEY_BYTES).digest()
