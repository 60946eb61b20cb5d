"""Which records of refused requests are written: of each tenant so many an hour.

A refusal costs its client nothing, no tokens are in its record, and no report counts it; so nobody may fill the disk
with them. The journal asks before it writes one. What is not written is counted in the metrics as every request is, and
here (`quipu:usage_records_suppressed_total`), and said on the log now and then. Pure, but for the log.

What must always hold: a tenant's budget is nobody else's; what is kept here is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import attrs
import structlog

log = structlog.get_logger("quipu.ledger")

PERIOD_S: Final = 3600.0
LOG_EVERY_S: Final = 600.0
"""Between two lines about one tenant."""
MAX_TENANTS: Final = 10_000
"""Whose budgets are remembered: tenants are an operator's. Beyond it, whoever was refused longest ago begins anew."""


@attrs.define
class _Bucket:
    """A token bucket, as full as it was at `at`."""

    level: float
    at: float
    num_suppressed: int = 0
    """Since the log was last told."""
    logged_at: float | None = None


class RefusalBudget:
    def __init__(self, max_records: int) -> None:
        """Of each tenant at once, and after that as many an hour, one by one."""
        self._max_records = max_records
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        """Whoever was refused longest ago first."""
        self.num_suppressed = 0

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, tenant: str, now: float) -> bool:
        """Whether the record of a request that was refused at `now` (Unix seconds) may be written."""
        bucket = self._bucket(tenant, now)
        elapsed_s = max(0.0, now - bucket.at)  # the clock may have been set back
        bucket.level = min(self._max_records, bucket.level + elapsed_s * self._max_records / PERIOD_S)
        bucket.at = now
        if bucket.level >= 1.0:
            bucket.level -= 1.0
            return True
        self.num_suppressed += 1
        bucket.num_suppressed += 1
        self._say(tenant, bucket, now)
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

    def _say(self, tenant: str, bucket: _Bucket, now: float) -> None:
        if bucket.logged_at is not None and bucket.logged_at <= now < bucket.logged_at + LOG_EVERY_S:
            return
        log.warning(
            "ledger.refusals_suppressed",
            tenant=tenant,
            num_records=bucket.num_suppressed,
            help="refused requests beyond --max-refusal-records are counted, but have no record",
        )
        bucket.num_suppressed = 0
        bucket.logged_at = now
