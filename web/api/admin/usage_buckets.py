"""Time in usage reports: buckets of a minute, an hour or a day, and pages of them.

    boundary    boundary    boundary    boundary        boundaries are those of UTC
      |--- since ===|===========|=== until --|          the range cuts off its first and last bucket

What must always hold: every moment of a range is in exactly one bucket of one page, even if nothing happened in it.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import attrs


@attrs.frozen
class BucketWidth:
    width_s: int
    default_limit: int
    """Buckets of a page without `limit`."""
    max_limit: int

    def border(self, seconds: float) -> int:
        """Return the last bucket boundary at or before `seconds`."""
        return math.floor(seconds / self.width_s) * self.width_s

    def next_border(self, seconds: float) -> int:
        return self.border(seconds) + self.width_s


WIDTHS: Final[Mapping[str, BucketWidth]] = {
    "1m": BucketWidth(60, 60, 1440),
    "1h": BucketWidth(3600, 24, 168),
    "1d": BucketWidth(86_400, 7, 31),
}
DEFAULT_WIDTH: Final = "1d"


@attrs.frozen
class Bucket:
    start: int
    end: int
    """Exclusive."""


@attrs.frozen
class Page:
    buckets: tuple[Bucket, ...]
    next_start: int | None
    """Start of the next page's first bucket. None: this is the last page."""

    @property
    def cursor(self) -> str | None:
        if self.next_start is None:
            return None
        return "page_" + base64.urlsafe_b64encode(str(self.next_start).encode()).decode().rstrip("=")


@attrs.frozen
class Range:
    """A page before it is laid out."""

    width: BucketWidth
    since: int
    until: int
    limit: int

    def lay_out(self) -> Page:
        """Return the first `limit` buckets of the range, which may be empty."""
        buckets: list[Bucket] = []
        start = self.since
        while start < self.until and len(buckets) < self.limit:
            end = min(self.width.next_border(start), self.until)
            buckets.append(Bucket(start, end))
            start = end
        return Page(tuple(buckets), start if start < self.until else None)


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
