"""Endpoints of operators and their probes: health as the supervisor knows it, metrics, and the configuration."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import attrs
import orjson
from quart import Response
from quart_trio import QuartTrio

import quipu
from quipu.actors.messages.supervisor import EngineReady
from quipu.actors.request_desk.health import EngineState, Health
from quipu.actors.request_desk.interface import Desk, describe_pool

from ...auth.keys import KeyStore
from ...options import AppOptions
from ...request.errors import RETRY_AFTER_S, no_engines
from ...telemetry.metric_names import with_vllm_names
from ..operation import route
from .admin_schemas import HEALTH, METRICS, METRICS_CONTENT_TYPE, READY, RESET, SERVER_INFO, VERSION


def install_admin(app: QuartTrio, desk: Desk, keys: KeyStore, options: AppOptions) -> None:
    """Register the routes. `web/auth/auth.py` decides who may use them."""

    @route(app, "GET /health", HEALTH)
    @route(app, "GET /ping", HEALTH)
    @route(app, "POST /ping", HEALTH)
    async def health() -> Response:
        state = desk.health()
        return _probe(state, state.is_healthy)

    @route(app, "GET /ready", READY)
    async def ready() -> Response:
        state = desk.health()
        return _probe(state, state.is_ready)

    @route(app, "GET /metrics", METRICS)
    async def metrics() -> Response:
        text = desk.render_metrics()
        if options.shows_vllm_metrics:
            text = with_vllm_names(text)
        return Response(text, content_type=METRICS_CONTENT_TYPE)

    @route(app, "GET /server_info", SERVER_INFO)
    async def server_info() -> Response:
        info, state, engines = desk.info, desk.health(), desk.engines()
        first = next((status.ready for status in engines if status.state is EngineState.READY), None) or info.engine
        described = {
            "version": quipu.__version__,
            "model": next(iter(info.model_names), None),
            "model_names": info.model_names,
            "max_model_len": info.max_model_len,
            "vocab_size": info.vocab_size,
            "state": state.state,
            "detail": state.detail,
            "incarnation": state.incarnation,
            "kv_cache": {"num_blocks": info.num_blocks, "block_size": info.block_size, **describe_cache(info.engine)},
            "engine": describe_engine(first),
            "engines": [
                {
                    "id": status.engine_id,
                    "incarnation": status.incarnation,
                    "state": status.state,
                    "engine": describe_engine(status.ready),
                }
                for status in engines
            ],
            "upstreams": describe_upstreams(desk),
            "output": {
                "tool_call_parser": info.output.tool_call_parser,
                "reasoning_parser": info.output.reasoning_parser,
                "reason": info.output.reason,
            },
            "keys": keys.describe(),
            "settings": info.settings,
        }
        # Settings may hold paths and the like, which JSON has only as strings.
        return Response(orjson.dumps(described, default=str), content_type="application/json")

    @route(app, "POST /reset_prefix_cache", RESET)
    async def reset_prefix_cache() -> Response:
        if not desk.info.has_engines:
            raise no_engines()
        desk.reset_prefix_cache()
        return Response(b"{}", content_type="application/json")

    @route(app, "GET /version", VERSION)
    async def version() -> dict[str, Any]:
        return {"version": quipu.__version__}


def describe_upstreams(desk: Desk) -> list[dict[str, Any]]:
    """Return the servers that requests are passed on to, without their keys."""
    return [
        {
            "id": upstream.engine_id,
            "url": upstream.url,
            "state": upstream.state,
            "detail": upstream.health.detail,
            "models": tuple(upstream.models),
            "num_running": len(upstream.exchanges),
            "blocks_known": upstream.num_blocks_known,
            "failures": upstream.num_deaths,
        }
        for upstream in (() if desk.upstreams is None else desk.upstreams.pool)
    ]


def describe_cache(engine: EngineReady | None) -> dict[str, Any]:
    """Return the size of the KV cache, once an engine has reported it."""
    return {} if engine is None else {"num_bytes": engine.kv_cache_bytes, **describe_pool(engine)}


def describe_engine(engine: EngineReady | None) -> dict[str, Any] | None:
    """Return an engine's backend and its properties; None while it loads."""
    if engine is None:
        return None
    return {
        "backend": engine.backend,
        "library": engine.library,
        "instruction_set": engine.instruction_set,
        "dtype": engine.dtype,
        "weights": engine.weights,
        "activations": engine.activations,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "determinism": engine.determinism,
        "num_threads": engine.num_threads,
        "weights_bytes": engine.weights_bytes,
        "workspace_bytes": engine.workspace_bytes,
        "draft_model": None if engine.draft_model is None else attrs.asdict(engine.draft_model),
        "numerics": engine.numerics,
    }


def _probe(state: Health, is_fine: bool) -> Response:
    answer = {
        "status": "ok" if is_fine else "unavailable",
        "state": state.state,
        "incarnation": state.incarnation,
        "detail": state.detail,
        "actor_restarts": state.actor_restarts,
    }
    response = Response(orjson.dumps(answer), content_type="application/json")
    if not is_fine:
        response.status_code = HTTPStatus.SERVICE_UNAVAILABLE
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
