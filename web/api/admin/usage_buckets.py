"""Time in usage reports: buckets of a minute, an hour or a day, and pages of them.

    boundary    boundary    boundary    boundary        boundaries are those of UTC
      |--- since ===|===========|=== until --|          the range cuts off its first and last bucket

Pure arithmetic on whole Unix seconds. What must always hold: the buckets of a range are contiguous, and so are its
pages, so that every moment of the range is in exactly one bucket of one page, even if nothing happened in it.
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
    width: BucketWidth
    buckets: tuple[Bucket, ...]
    next_start: int | None
    """Start of the next page's first bucket. None: this is the last page."""

    @property
    def cursor(self) -> str | None:
        if self.next_start is None:
            return None
        return "page_" + base64.urlsafe_b64encode(str(self.next_start).encode()).decode().rstrip("=")


def lay_out(width: BucketWidth, since: int, until: int, limit: int) -> Page:
    """Return the first `limit` buckets of a range, which may be empty."""
    buckets: list[Bucket] = []
    start = since
    while start < until and len(buckets) < limit:
        end = min(width.next_border(start), until)
        buckets.append(Bucket(start, end))
        start = end
    return Page(width, tuple(buckets), start if start < until else None)


@attrs.frozen
class Range:
    """A page before it is laid out."""

    width: BucketWidth
    since: int
    until: int
    limit: int

    def lay_out(self) -> Page:
        return lay_out(self.width, self.since, self.until, self.limit)


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
