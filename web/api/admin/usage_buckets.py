"""Time in usage reports: buckets of a minute, an hour or a day, and pages of them.

    boundary    boundary    boundary    boundary        boundaries are those of UTC
      |--- since ===|===========|=== until --|          the range cuts off its first and last bucket

Pure arithmetic on whole Unix seconds. What must always hold: the buckets of a range are contiguous, and so are its
pages, so that every moment of the range is in exactly one bucket of one page, even if nothing happened in it.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Mapping
from typing import Final

import attrs

from ...request.errors import APIError, bad_value


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


def start_of(cursor: str, width: BucketWidth, since: int) -> int:
    """Return where the page of a cursor begins. Raises APIError for a cursor that no page of this range has
    returned."""
    encoded = cursor.removeprefix("page_")
    try:
        text = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        text = b""
    if cursor.startswith("page_") and re.fullmatch(rb"[0-9]{1,12}", text):
        start = int(text)
        if start > since and start == width.border(start):
            return start
    raise bad_value("page", "must be the `next_page` of a response to the same query")


def check_order(since: float, until: float | None, since_name: str, until_name: str) -> APIError | None:
    """Return the error of an invalid range, None if it is valid."""
    if until is None or since < until:
        return None
    return bad_value(until_name, f"must be later than `{since_name}`")
