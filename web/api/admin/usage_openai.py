"""`GET /v1/organization/usage/completions`, as OpenAI's administration API defines it; a tenant is a project.

    OpenAI(admin_api_key=..., base_url="http://HOST:PORT/v1").admin.organization.usage.completions(start_time=...)

https://platform.openai.com/docs/api-reference/usage/completions. As there, the first bucket begins at `start_time` and
the last one ends at `end_time`, aligned or not; buckets that have not begun are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from quart import request
from quart_trio import QuartTrio

from quipu.actors.ledger.reading import Sum

from .usage_buckets import DEFAULT_WIDTH, WIDTHS, Page, check_order, lay_out, start_of
from .usage_params import Parameters
from .usage_report import Column, Dimension, Filled, Same, fill, filters_of, labels
from .usage_source import UsageSource

DIMENSIONS: Final[Mapping[str, Dimension]] = {
    "project_id": Column("tenant"),
    "user_id": Same(None),
    "api_key_id": Column("key_id"),
    "model": Column("model"),
    "batch": Same(False),
    "service_tier": Same("default"),
    "api_source": Same("unlabeled"),
}
REFUSED: Final = {"user_ids": "keys here belong to a tenant, not to a user; filter by `api_key_ids`"}


def install_openai_usage(app: QuartTrio, source: UsageSource, unix_time: Callable[[], float] = time.time) -> None:
    """Register the route. `web/auth/auth.py` decides who may use it."""

    @app.get("/v1/organization/usage/completions")
    async def organization_usage() -> dict[str, Any]:
        parameters = Parameters(request.args)
        parameters.refuse(REFUSED)
        page = _page(parameters, unix_time())
        group_by = parameters.choices("group_by", DIMENSIONS) or ()
        filters = filters_of(parameters, "project_ids", matches_nothing=parameters.flag("batch") is True)
        filled = await fill(source, page, filters, DIMENSIONS, group_by)
        return {
            "object": "page",
            "data": [_bucket(one, group_by) for one in filled],
            "has_more": page.next_start is not None,
            "next_page": page.cursor,
        }


def _page(parameters: Parameters, now: float) -> Page:
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
    return lay_out(width, start, begun if until is None else min(until, begun), limit)


def _bucket(filled: Filled, group_by: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": filled.bucket.start,
        "end_time": filled.bucket.end,
        "results": [_result(one, group_by) for one in filled.sums],
    }


def _result(one: Sum, group_by: Sequence[str]) -> dict[str, Any]:
    uncached = one.prompt_tokens - one.cached_tokens - one.cache_write_tokens
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": one.prompt_tokens,
        "input_uncached_tokens": uncached,
        "input_cached_tokens": one.cached_tokens,
        "input_cache_write_tokens": one.cache_write_tokens,
        "input_text_tokens": uncached,
        "input_cached_text_tokens": one.cached_tokens,
        "input_audio_tokens": 0,
        "input_cached_audio_tokens": 0,
        "output_tokens": one.completion_tokens,
        "output_text_tokens": one.completion_tokens,
        "output_audio_tokens": 0,
        "num_model_requests": one.num_requests,
        **labels(one, DIMENSIONS, group_by),
    }
