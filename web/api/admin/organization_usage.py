"""Usage as the administration APIs of OpenAI and Anthropic define it: which report a query asks for.

    GET /v1/organization/usage/completions          OpenAI; a tenant is a project
    GET /v1/organization/usage/embeddings           the same of embeddings, scores and reranking
    GET /v1/organizations/usage_report/messages     Anthropic; a tenant is a workspace

https://platform.openai.com/docs/api-reference/usage/completions: the first bucket begins at `start_time` and the last
one ends at `end_time`, aligned or not. https://platform.claude.com/docs/en/api/admin/usage_report/retrieve_messages:
buckets are aligned to UTC, so `starting_at` is rounded down, and a bucket that ends after `ending_at` is left out.
Buckets that have not begun are left out of both.

What must always hold: a cursor is accepted only where a page of the same range could have returned it.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Callable
from typing import Final

import attrs
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.ledger.reading import Query
from quipu.actors.messages.usage_record import ServiceTier

from ...request.errors import bad_value
from ...request.request_context import current_request_context
from ..fields import missing
from ..operation import route
from ..query import Parameters
from ..whole_response import whole_response
from .report_schemas import (
    ANTHROPIC_USAGE_REPORT,
    OPENAI_EMBEDDINGS_REPORT,
    OPENAI_USAGE_REPORT,
    SAME_FILTERS,
    TIERS,
)
from .usage_buckets import DEFAULT_WIDTH, WIDTHS, BucketWidth, Range
from .usage_report import COUNTED, RETRIES, AnthropicReport, EmbeddingsReport, OpenAIReport, UsageReport
from .usage_source import UsageSource

_NO_USERS: Final = {"user_ids": "keys here belong to a tenant, not to a user; filter by `api_key_ids`"}
_NO_ACCOUNTS: Final = "keys here belong to a tenant, not to an account; filter by `api_key_ids[]`"
_NOT_ANTHROPIC: Final = {
    "account_ids": _NO_ACCOUNTS,
    "service_account_ids": _NO_ACCOUNTS,
    "context_window": "requests are not counted by context length",
}


def install_organization_usage(app: QuartTrio, source: UsageSource, unix_time: Callable[[], float] = time.time) -> None:
    """Register the routes. `web/auth/auth.py` decides who may use them."""

    @route(app, "GET /v1/organization/usage/completions", OPENAI_USAGE_REPORT)
    async def openai_usage() -> Response:
        parameters = Parameters(request.args)
        parameters.refuse(_NO_USERS)
        is_batch = parameters.flag("batch")
        tiers = () if is_batch is None else (ServiceTier.BATCH if is_batch else ServiceTier.STANDARD,)
        return await answer(openai_report(OpenAIReport, parameters, tiers))

    @route(app, "GET /v1/organization/usage/embeddings", OPENAI_EMBEDDINGS_REPORT)
    async def openai_embeddings() -> Response:
        parameters = Parameters(request.args)
        parameters.refuse(_NO_USERS)
        return await answer(openai_report(EmbeddingsReport, parameters, ()))

    def openai_report(kind: type[OpenAIReport], parameters: Parameters, tiers: tuple[ServiceTier, ...]) -> UsageReport:
        since, until = parameters.unix_time("start_time"), parameters.unix_time("end_time")
        page = _read_range(parameters, since, until, ("start_time", "end_time"), unix_time(), is_aligned=False)
        return _read_report(kind, parameters, page, "project_ids", tiers)

    @route(app, "GET /v1/organizations/usage_report/messages", ANTHROPIC_USAGE_REPORT)
    async def anthropic_usage() -> Response:
        parameters = Parameters(request.args)
        parameters.refuse(_NOT_ANTHROPIC)
        since, until = parameters.rfc3339("starting_at"), parameters.rfc3339("ending_at")
        page = _read_range(parameters, since, until, ("starting_at", "ending_at"), unix_time(), is_aligned=True)
        # All of them are read: an invalid value is an error even if another filter matches nothing.
        misses = [
            values is not None and allowed[0] not in values
            for name, allowed in SAME_FILTERS.items()
            for values in [parameters.choices(name, allowed)]
        ]
        wanted = parameters.choices("service_tiers", TIERS)
        tiers = tuple(tier for tier in ServiceTier if wanted is None or tier in wanted)
        misses.append(not tiers)
        report = _read_report(AnthropicReport, parameters, page, "workspace_ids", () if wanted is None else tiers)
        return await answer(attrs.evolve(report, matches_nothing=any(misses)))

    async def answer(report: UsageReport) -> Response:
        party = current_request_context().principal.party
        return await whole_response(iter(await source.report(report, party)))


def _read_report(
    kind: type[UsageReport], parameters: Parameters, page: Range, tenants_name: str, tiers: tuple[ServiceTier, ...]
) -> UsageReport:
    group_by = parameters.choices("group_by", kind.dimensions) or ()
    query = Query(
        tenants=parameters.texts(tenants_name) or (),
        key_ids=parameters.texts("api_key_ids") or (),
        models=parameters.texts("models") or (),
        outcomes=COUNTED,
        service_tiers=tiers,
    )
    collapse_retries = parameters.choice("retries", RETRIES, "count") == "collapse"
    return kind(page, query, False, collapse_retries, group_by)


def _read_range(
    parameters: Parameters,
    since: float | None,
    until: float | None,
    names: tuple[str, str],
    now: float,
    *,
    is_aligned: bool,
) -> Range:
    """Return the wanted page. `names`: of the parameters that `since` and `until` come from."""
    if since is None:
        raise missing(names[0])
    check_order(since, until, *names)
    width = WIDTHS[parameters.choice("bucket_width", WIDTHS, DEFAULT_WIDTH)]
    as_border = width.border if is_aligned else int
    limit = parameters.whole("limit", 1, width.max_limit) or width.default_limit
    cursor, start, begun = parameters.text("page"), as_border(since), width.next_border(now)
    if cursor is not None:
        start = start_of(cursor, width, start)
    return Range(width, start, begun if until is None else min(as_border(until), begun), limit)


def check_order(since: float, until: float | None, since_name: str, until_name: str) -> None:
    """Raise APIError for a range that ends before it begins."""
    if until is not None and since >= until:
        raise bad_value(until_name, f"must be later than `{since_name}`")


def start_of(cursor: str, width: BucketWidth, since: int) -> int:
    """Return where the page of a cursor begins. Raises APIError if no page of this range has returned it."""
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
