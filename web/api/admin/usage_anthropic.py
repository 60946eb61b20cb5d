"""`GET /v1/organizations/usage_report/messages`, as Anthropic's administration API defines it; a tenant is a workspace.

https://platform.claude.com/docs/en/api/admin/usage_report/retrieve_messages. Buckets are aligned to UTC: `starting_at`
is rounded down to the start of its bucket, and a bucket that ends after `ending_at`, or has not begun, is left out.

    uncached_input_tokens + cache_read_input_tokens + cache_creation.* = prompt tokens
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from ...request.request_context import current_request_context
from ..answer import whole_response
from ..fields import missing
from ..query import Parameters
from .anthropic_report import DIMENSIONS, AnthropicReport
from .usage_buckets import DEFAULT_WIDTH, WIDTHS, Range
from .usage_pages import check_order, filters_of, start_of
from .usage_source import UsageSource

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
    async def messages_usage_report() -> Response:
        parameters = Parameters(request.args)
        parameters.refuse(REFUSED)
        page = _range(parameters, unix_time())
        group_by = parameters.choices("group_by", DIMENSIONS) or ()
        # All of them are read: an invalid value is an error even if another filter matches nothing.
        misses = [
            values is not None and allowed[0] not in values
            for name, allowed in _SAME_FILTERS.items()
            for values in [parameters.choices(name, allowed)]
        ]
        filters = filters_of(parameters, "workspace_ids", matches_nothing=any(misses))
        party = current_request_context().principal.party
        return await whole_response(iter(await source.report(AnthropicReport(page, filters, group_by), party)))


def _range(parameters: Parameters, now: float) -> Range:
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
    return Range(width, start, begun if until is None else min(width.border(until), begun), limit)
