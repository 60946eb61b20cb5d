"""`GET /v1/organization/usage/completions`, as OpenAI's administration API defines it; a tenant is a project.

    OpenAI(admin_api_key=..., base_url="http://HOST:PORT/v1").admin.organization.usage.completions(start_time=...)

https://platform.openai.com/docs/api-reference/usage/completions. As there, the first bucket begins at `start_time` and
the last one ends at `end_time`, aligned or not; buckets that have not begun are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from quart import Response, request
from quart_trio import QuartTrio

from ...request.request_context import current_request_context
from ..answer import whole_response
from ..query import Parameters
from .openai_report import DIMENSIONS, OpenAIReport
from .usage_buckets import DEFAULT_WIDTH, WIDTHS, Range
from .usage_pages import check_order, filters_of, start_of
from .usage_source import UsageSource

REFUSED: Final = {"user_ids": "keys here belong to a tenant, not to a user; filter by `api_key_ids`"}


def install_openai_usage(app: QuartTrio, source: UsageSource, unix_time: Callable[[], float] = time.time) -> None:
    """Register the route. `web/auth/auth.py` decides who may use it."""

    @app.get("/v1/organization/usage/completions")
    async def organization_usage() -> Response:
        parameters = Parameters(request.args)
        parameters.refuse(REFUSED)
        page = _range(parameters, unix_time())
        group_by = parameters.choices("group_by", DIMENSIONS) or ()
        filters = filters_of(parameters, "project_ids", matches_nothing=parameters.flag("batch") is True)
        party = current_request_context().principal.party
        return await whole_response(iter(await source.report(OpenAIReport(page, filters, group_by), party)))


def _range(parameters: Parameters, now: float) -> Range:
    parameters.required("start_time")
    since = parameters.unix_time("start_time") or 0
    until = parameters.unix_time("end_time")
    if wrong := check_order(since, until, "start_time", "end_time"):
        raise wrong
    width = WIDTHS[parameters.choice("bucket_width", WIDTHS, DEFAULT_WIDTH)]
    limit = parameters.whole("limit", 1, width.max_limit) or width.default_limit
    cursor = parameters.text("page")
    start = since if cursor is None else start_of(cursor, width, since)
    begun = width.next_border(now)
    return Range(width, start, begun if until is None else min(until, begun), limit)
