"""What the query parameters of usage reports have in common: ranges, pages and filters. Reads them for the routes.

What must always hold: a cursor is accepted only where a page of the same range could have returned it.
"""

from __future__ import annotations

import base64
import binascii
import re

from ...request.errors import APIError, bad_value
from ..query import Parameters
from .usage_buckets import BucketWidth
from .usage_report import RETRIES, Filters


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


def filters_of(parameters: Parameters, tenants_name: str, *, matches_nothing: bool) -> Filters:
    """Return the filters that both APIs have. Raises APIError."""
    return Filters(
        tenants=parameters.texts(tenants_name),
        key_ids=parameters.texts("api_key_ids"),
        models=parameters.texts("models"),
        matches_nothing=matches_nothing,
        collapse_retries=parameters.choice("retries", RETRIES, "count") == "collapse",
    )
