"""`/v1/batches`: many requests in one file, answered when there is room. `web/batches/` runs them.

    POST /v1/batches               `input_file_id`, `endpoint`, `completion_window`, `metadata`, `output_expires_after`
    GET  /v1/batches               `after`, `limit`
    GET  /v1/batches/{id}
    POST /v1/batches/{id}/cancel

What must always hold: a tenant sees its own batches alone.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any, Final

from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.config.declarations import CHAT, COMPLETIONS, RESPONSES

from ...batches.batch_refusals import check_room
from ...batches.batch_service import BatchService
from ...batches.batch_values import DAY_S, Api, Batch, new_id
from ...request.error_handlers import methods_of
from ...request.errors import APIError, bad_value, not_found, quoted
from ...request.request_context import current_request_context
from ..fields import Fields, wrong_type
from ..operation import route
from ..query import Parameters, no_such_item
from ..small_body import read_small_body
from ..stored_files import json_response
from .file_schemas import (
    CANCEL_BATCH,
    CREATE_BATCH,
    CREATED,
    GET_BATCH,
    LIST_BATCHES,
    MAX_BATCHES_LISTED,
    MAX_KEY_CHARS,
    MAX_METADATA,
    MAX_VALUE_CHARS,
    WINDOW_PATTERN,
)
from .files import check_ttl, find_file

PATH: Final = "/v1/batches"
ENDPOINTS: Final = (CHAT, COMPLETIONS, RESPONSES, "/v1/embeddings")
"""Those of them that this server has."""
DEFAULT_LISTED: Final = 20
MAX_WINDOW_S: Final = 30 * DAY_S
_WINDOW = re.compile(WINDOW_PATTERN)
_UNITS: Final = {"m": 60, "h": 3600, "d": DAY_S}


def install_batches(app: QuartTrio, service: BatchService) -> None:
    """Register the routes."""

    @route(app, f"POST {PATH}", CREATE_BATCH)
    async def create_batch() -> Response:
        fields = await read_small_body(CREATED)
        endpoint, window = fields.text("endpoint"), fields.text("completion_window")
        served = [name for name in ENDPOINTS if methods_of(app.url_map, name)]
        if endpoint not in served:
            raise bad_value("endpoint", f"must be one of {', '.join(served)}")
        window_s, metadata, ttl_s = _window(window), _metadata(fields), _ttl(fields)
        principal = current_request_context().principal
        file = await find_file(service, fields.text("input_file_id"))
        if file.purpose != "batch":
            raise bad_value("input_file_id", "must be a file with the purpose `batch`")
        await service.call(check_room, service.store, service.limits, principal.tenant)
        now = service.now
        batch = Batch(
            id=new_id("batch_"),
            api=Api.OPENAI,
            tenant=principal.tenant,
            key_id=principal.key_id,
            endpoint=endpoint,
            input_file_id=file.id,
            completion_window=window,
            metadata=metadata,
            created_at=now,
            expires_at=now + window_s,
            output_ttl_s=ttl_s,
        )
        shown = describe_batch(batch)
        await service.add(batch)
        return json_response(shown)

    @route(app, f"GET {PATH}", LIST_BATCHES)
    async def list_batches() -> Response:
        tenant, parameters = current_request_context().principal.tenant, Parameters(request.args)
        limit, after = parameters.whole("limit", 1, MAX_BATCHES_LISTED) or DEFAULT_LISTED, parameters.text("after")
        if after is not None and await service.call(service.store.batch, tenant, Api.OPENAI, after) is None:
            raise no_such_item("after")
        found = await service.call(service.store.batches, tenant, Api.OPENAI, after, None, limit + 1)
        shown = [describe_batch(service.current(batch)) for batch in found[:limit]]
        return json_response(
            {
                "object": "list",
                "data": shown,
                "first_id": shown[0]["id"] if shown else None,
                "last_id": shown[-1]["id"] if shown else None,
                "has_more": len(found) > limit,
            }
        )

    @route(app, f"GET {PATH}/<batch_id>", GET_BATCH)
    async def get_batch(batch_id: str) -> Response:
        return json_response(describe_batch(await find(batch_id)))

    @route(app, f"POST {PATH}/<batch_id>/cancel", CANCEL_BATCH)
    async def cancel_batch(batch_id: str) -> Response:
        batch = await find(batch_id)
        if batch.has_ended and batch.cancelled_at is None:
            message = f"Cannot cancel a batch with status '{batch.status}'."
            raise APIError(HTTPStatus.CONFLICT, message, "invalid_request_error", code="batch_has_ended")
        return json_response(describe_batch(await service.cancel(batch)))

    async def find(batch_id: str) -> Batch:
        tenant = current_request_context().principal.tenant
        found = await service.call(service.store.batch, tenant, Api.OPENAI, batch_id)
        if found is None:
            raise not_found(f"No batch found with id '{quoted(batch_id)[1:-1]}'.", "id")
        return service.current(found)


def describe_batch(batch: Batch) -> dict[str, Any]:
    usage, errors = batch.usage, None
    if batch.errors:
        data = [
            {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
            for error in batch.errors
        ]
        errors = {"object": "list", "data": data}
    times = ("in_progress", "expires", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        **{f"{name}_at": getattr(batch, f"{name}_at") for name in times},
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.num_succeeded,
            "failed": batch.num_errored + batch.num_canceled + batch.num_expired,
        },
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": batch.metadata,
    }


def _window(text: str) -> int:
    """Return the seconds of a `completion_window`. Raises APIError."""
    found = _WINDOW.fullmatch(text)
    window_s = int(text[:-1]) * _UNITS[text[-1]] if found else 0
    if not 0 < window_s <= MAX_WINDOW_S:
        raise bad_value("completion_window", "must be a time such as 24h, of at most 30d")
    return window_s


def _metadata(fields: Fields) -> dict[str, str] | None:
    """Return `metadata`. Raises APIError."""
    given = fields.fields("metadata").values if fields.get("metadata") is not None else None
    if given is None:
        return None
    if len(given) > MAX_METADATA:
        raise bad_value("metadata", f"must have at most {MAX_METADATA} keys")
    for key, value in given.items():
        if type(value) is not str:
            raise wrong_type("metadata", "an object of strings")
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            problem = f"keys may have {MAX_KEY_CHARS} characters, and values {MAX_VALUE_CHARS}"
            raise bad_value("metadata", problem)
    return given


def _ttl(fields: Fields) -> int | None:
    if fields.get("output_expires_after") is None:
        return None
    expires = fields.fields("output_expires_after")
    return check_ttl(expires.text("anchor"), expires.integer("seconds"), "output_expires_after")
