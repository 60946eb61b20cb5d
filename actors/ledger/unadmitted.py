"""Limits how many records of requests that were never admitted are written for each tenant and hour.

A request that is rejected, or that its client leaves while it waits, costs that client nothing, so it must not be
possible to fill the disk with records of them. The journal asks before it writes one. The others are still counted in
the metrics, and here (`quipu:usage_records_suppressed_total`), and logged now and then.

What must always hold: one tenant cannot use another's budget; the number of remembered tenants is bounded.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Final

import attrs
import structlog

from ..messages.outcomes import Outcome

log = structlog.get_logger("quipu.ledger")

LIMITED: Final = (Outcome.REJECTED, Outcome.CANCELLED)
"""How a client can have any number of requests end without an admission. Failures are the server's own."""
PERIOD_S: Final = 3600.0
LOG_EVERY_S: Final = 600.0
"""Between two log lines about one tenant."""
MAX_TENANTS: Final = 10_000
"""Budgets to remember. Beyond it, the tenant whose last such request is the oldest starts with a full budget again."""


@attrs.define
class _Bucket:
    """A token bucket that had `level` tokens at `at`."""

    level: float
    at: float
    num_suppressed: int = 0
    """Since the last log line."""
    logged_at: float | None = None


class UnadmittedBudget:
    def __init__(self, max_records: int) -> None:
        """`max_records`: per tenant, as a burst and per hour."""
        self._max_records = max_records
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        """By tenant, the one whose last such request is the oldest first."""
        self.num_suppressed: Counter[Outcome] = Counter()

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, outcome: Outcome, now: float) -> bool:
        """Take one record from a tenant's budget at `now` (Unix seconds); return False if it is used up."""
        if outcome not in LIMITED:
            return True
        bucket = self._bucket(tenant, now)
        elapsed_s = max(0.0, now - bucket.at)  # the clock may have been set back
        bucket.level = min(self._max_records, bucket.level + elapsed_s * self._max_records / PERIOD_S)
        bucket.at = now
        if bucket.level >= 1.0:
            bucket.level -= 1.0
            return True
        self.num_suppressed[outcome] += 1
        bucket.num_suppressed += 1
        self._log(tenant, bucket, now)
        return False

    def _bucket(self, tenant: str, now: float) -> _Bucket:
        bucket = self._buckets.get(tenant)
        if bucket is None:
            if len(self._buckets) == MAX_TENANTS:
                self._buckets.popitem(last=False)
            bucket = self._buckets[tenant] = _Bucket(self._max_records, now)
        else:
            self._buckets.move_to_end(tenant)
        return bucket

    def _log(self, tenant: str, bucket: _Bucket, now: float) -> None:
        if bucket.logged_at is not None and bucket.logged_at <= now < bucket.logged_at + LOG_EVERY_S:
            return
        log.warning(
            "ledger.records_suppressed",
            tenant=tenant,
            num_records=bucket.num_suppressed,
            help="requests that were never admitted are counted beyond --max-refusal-records, but have no record",
        )
        bucket.num_suppressed = 0
        bucket.logged_at = now
