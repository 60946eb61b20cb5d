"""`GET /v1/cache/stats`: how the prefix cache was used within `--stats-window`, and what others would have found.

By tenant and model name, the last used ones first. A tenant's key is shown its own, an admin key all and the sums.

What must always hold: a tenant sees nothing that others have caused, evictions apart; other tasks run between two
tenants' figures.
"""

from __future__ import annotations

from typing import Any

import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.cache_insight.cache_figures import CacheFigures, Evictions, HitRate, Reuse
from quipu.actors.request_desk.interface import Desk

from ...request.request_context import current_request_context
from ..operation import route
from ..query import Parameters
from .cache_schemas import DEFAULT_LIMIT, MAX_LIMIT, STATS


def install_cache_stats(app: QuartTrio, desk: Desk) -> None:
    """Register the route."""

    @route(app, "GET /v1/cache/stats", STATS)
    async def cache_stats() -> Response:
        principal, parameters = current_request_context().principal, Parameters(request.args)
        tenant, model = parameters.text("tenant"), parameters.text("model")
        limit = parameters.whole("limit", 1, MAX_LIMIT) or DEFAULT_LIMIT
        view = desk.cache
        described: dict[str, Any] = {"object": "cache.stats", "window_s": view.window_s, "block_size": view.block_size}
        if principal.is_admin:
            engines, pinned = desk.engines(), view.pinned()
            described["all"] = describe(view.overall())
            described["blocks"] = {
                "total": sum(status.blocks_total for status in engines),
                "used": sum(status.blocks_used for status in engines),
            }
            described["pinned"] = {"blocks": pinned.num_blocks, "yielded": pinned.num_yielded}
        is_theirs = principal.is_admin or tenant in (None, principal.tenant)
        data: list[orjson.Fragment] = []
        has_more = False
        for figures in view.figures(tenant if principal.is_admin else principal.tenant, model) if is_theirs else ():
            has_more = len(data) == limit
            if has_more:
                break
            parent = desk.info.model_names[0] if figures.model in desk.info.adapters else None
            row = {"tenant": figures.tenant, "model": figures.model, "parent": parent, **describe(figures)}
            data.append(orjson.Fragment(orjson.dumps(row)))
            await trio.lowlevel.checkpoint()
        described |= {"data": data, "has_more": has_more}
        return Response(orjson.dumps(described), content_type="application/json")


def describe(figures: CacheFigures) -> dict[str, Any]:
    return {
        "requests": figures.num_requests,
        "hit_requests": figures.num_hits,
        "prompt_tokens": figures.prompt_tokens,
        "cached_tokens": figures.cached_tokens,
        "hit_rate": None if figures.hit_rate is None else round(figures.hit_rate, 4),
        "series": [_slice(one) for one in figures.series],
        "infinite_cache": None if figures.reuse is None else _reuse(figures.reuse),
        "evictions": None if figures.evictions is None else _evictions(figures.evictions),
        "pins": {"prompts": figures.pins.num_prompts, "tokens": figures.pins.num_tokens},
    }


def _slice(one: HitRate) -> dict[str, Any]:
    return {
        "start": round(one.start_s, 3),
        "end": round(one.end_s, 3),
        "requests": one.num_requests,
        "prompt_tokens": one.prompt_tokens,
        "cached_tokens": one.cached_tokens,
        "hit_rate": round(one.cached_tokens / max(1, one.prompt_tokens), 4),
    }


def _reuse(reuse: Reuse) -> dict[str, Any]:
    return {
        "query_blocks": reuse.query_blocks,
        "hit_blocks": reuse.hit_blocks,
        "hit_rate": round(reuse.hit_rate, 4),
        "blocks_for_hits": {str(share): blocks for share, blocks in reuse.blocks.items()},
        "sampled_share": reuse.sampled_share,
    }


def _evictions(evictions: Evictions) -> dict[str, Any]:
    return {
        "sampled": evictions.num_sampled,
        "idle_s": {str(share): idle_s for share, idle_s in evictions.idle_s.items()},
    }
