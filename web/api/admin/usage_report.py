"""What the usage reports of both administration APIs share: from filters and a page to sums by bucket and group.

The APIs use different names (a tenant is a project in one and a workspace in the other); a `Dimension` maps a name to
the ledger. Both count every request, whichever API it used: each report alone is the whole bill.

What must always hold: every request that was not rejected is in each report, retries included unless they are to be
collapsed; a request that the server itself failed counts no tokens; an estimate is in no sum, so tokens that are only
estimated to be cached count as uncached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import attrs

from quipu.actors.ledger.reading import GroupColumn, Query, Sum
from quipu.actors.messages.outcomes import Outcome

from .reports import Ledger
from .usage_buckets import Bucket, Page

RETRIES: Final = ("count", "collapse")
"""Values of `retries`. `collapse`: a request and its retries count once."""
COUNTED: Final = tuple(outcome for outcome in Outcome if outcome is not Outcome.REJECTED)


@attrs.frozen
class Column:
    """A column by which the ledger can be grouped."""

    name: GroupColumn


@attrs.frozen
class Same:
    """A value that all requests to this server share. None: unknown."""

    value: str | bool | None


Dimension = Column | Same


@attrs.frozen
class Filters:
    tenants: tuple[str, ...] | None = None
    """None: all tenants."""
    key_ids: tuple[str, ...] | None = None
    models: tuple[str, ...] | None = None
    matches_nothing: bool = False
    """A filter is set that no request can match."""
    collapse_retries: bool = False


@attrs.frozen
class Filled:
    bucket: Bucket
    sums: tuple[Sum, ...]
    """One per group; none if nothing happened."""


def fill(
    ledger: Ledger, page: Page, filters: Filters, dimensions: Mapping[str, Dimension], group_by: Sequence[str]
) -> list[Filled]:
    """Return the page's buckets with their sums."""
    if not page.buckets or filters.matches_nothing:
        return [Filled(bucket, ()) for bucket in page.buckets]
    query = Query(
        since=page.buckets[0].start,
        until=page.buckets[-1].end,
        tenants=filters.tenants or (),
        key_ids=filters.key_ids or (),
        models=filters.models or (),
        outcomes=COUNTED,
    )
    found: dict[float, list[Sum]] = {}
    requested = [dimensions[name] for name in group_by]
    columns = [dimension.name for dimension in requested if isinstance(dimension, Column)]
    sums = ledger.sums(query, group_by=columns, bucket_s=page.width.width_s, collapse_retries=filters.collapse_retries)
    for one in sums:
        assert one.bucket is not None
        found.setdefault(one.bucket, []).append(one)
    return [Filled(bucket, tuple(found.get(page.width.border(bucket.start), ()))) for bucket in page.buckets]


def labels(one: Sum, dimensions: Mapping[str, Dimension], group_by: Sequence[str]) -> dict[str, str | bool | None]:
    """Return every dimension's value in a group, None for those that were not requested."""

    def value(name: str, dimension: Dimension) -> str | bool | None:
        if name not in group_by:
            return None
        return one.group[dimension.name] if isinstance(dimension, Column) else dimension.value

    return {name: value(name, dimension) for name, dimension in dimensions.items()}
