"""`GET /v1/organizations/usage_report/messages`, as Anthropic's administration API defines it; a tenant is a workspace.

https://platform.claude.com/docs/en/api/admin/usage_report/retrieve_messages. Buckets are aligned to UTC: `starting_at`
is rounded down to the start of its bucket, and a bucket that ends after `ending_at`, or has not begun, is left out.

    uncached_input_tokens + cache_read_input_tokens + cache_creation.* = prompt tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from quart import request
from quart_trio import QuartTrio

from quipu.actors.ledger.reading import Sum

from ..fields import missing
from .usage_buckets import DEFAULT_WIDTH, WIDTHS, Page, check_order, lay_out, start_of
from .usage_params import Parameters, rfc3339
from .usage_report import Column, Dimension, Filled, Same, fill, filters_of, labels
from .usage_source import UsageSource

DIMENSIONS: Final[Mapping[str, Dimension]] = {
    "account_id": Same(None),
    "api_key_id": Column("key_id"),
    "context_window": Same(None),
    "inference_geo": Same("not_available"),
    "model": Column("model"),
    "service_account_id": Same(None),
    "service_tier": Same("standard"),
    "speed": Same("standard"),
    "workspace_id": Column("tenant"),
}
_SAME_FILTERS: Final = {
    "inference_geos": ("not_available", "global", "us"),
    "service_tiers": ("standard", "batch", "priority", "priority_on_demand", "flex", "flex_discount"),
    "speeds": ("standard", "fast"),
}
"""Every request to this server has the first of these values."""
REFUSED: Final = {
    "account_ids": "keys here belong to a tenant, not to an account; filter by `api_key_ids[]`",
    "service_account_ids": "keys here belong to a tenant, not to an account; filter by `api_key_ids[]`",
    "context_window": "requests are not counted by context length",
}


def install_anthropic_usage(app: QuartTrio, source: UsageSource, unix_time: Callable[[], float] = time.time) -> None:
    """Register the route. `web/auth/auth.py` decides who may use it."""

    @app.get("/v1/organizations/usage_report/messages")
    async def messages_usage_report() -> dict[str, Any]:
        parameters = Parameters(request.args)
        parameters.refuse(REFUSED)
        page = _page(parameters, unix_time())
        group_by = parameters.choices("group_by", DIMENSIONS) or ()
        # All of them are read: an invalid value is an error even if another filter matches nothing.
        misses = [
            values is not None and allowed[0] not in values
            for name, allowed in _SAME_FILTERS.items()
            for values in [parameters.choices(name, allowed)]
        ]
        filters = filters_of(parameters, "workspace_ids", matches_nothing=any(misses))
        filled = await fill(source, page, filters, DIMENSIONS, group_by)
        return {
            "data": [_bucket(one, group_by) for one in filled],
            "has_more": page.next_start is not None,
            "next_page": page.cursor,
        }


def _page(parameters: Parameters, now: float) -> Page:
    since, until = parameters.rfc3339("starting_at"), parameters.rfc3339("ending_at")
    if since is None:
        raise missing("starting_at")
    if wrong := check_order(since, until, "starting_at", "ending_at"):
        raise wrong
    width = WIDTHS[parameters.choice("bucket_width", WIDTHS, DEFAULT_WIDTH)]
    limit = parameters.whole("limit", 1, width.max_limit) or width.default_limit
    cursor = parameters.text("page")
    start = width.border(since) if cursor is None else start_of(cursor, width, width.border(since))
    begun = width.next_border(now)
    return lay_out(width, start, begun if until is None else min(width.border(until), begun), limit)


def _bucket(filled: Filled, group_by: Sequence[str]) -> dict[str, Any]:
    return {
        "starting_at": rfc3339(filled.bucket.start),
        "ending_at": rfc3339(filled.bucket.end),
        "results": [_result(one, group_by) for one in filled.sums],
    }


def _result(one: Sum, group_by: Sequence[str]) -> dict[str, Any]:
    created = one.created_5m_tokens + one.created_1h_tokens
    return {
        "uncached_input_tokens": one.prompt_tokens - one.cached_tokens - created,
        "cache_read_input_tokens": one.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": one.created_5m_tokens,
            "ephemeral_1h_input_tokens": one.created_1h_tokens,
        },
        "output_tokens": one.completion_tokens,
        "server_tool_use": {"web_search_requests": 0},
        **labels(one, DIMENSIONS, group_by),
    }
