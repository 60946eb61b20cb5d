"""`/v1/messages/batches`: many messages in one request, answered when there is room. `web/batches/` runs them.

    POST   /v1/messages/batches                `requests`, each with a `custom_id` and `params`
    GET    /v1/messages/batches                `after_id`, `before_id`, `limit`
    GET    /v1/messages/batches/{id}
    GET    /v1/messages/batches/{id}/results   a line for each request, once the batch has ended
    POST   /v1/messages/batches/{id}/cancel
    DELETE /v1/messages/batches/{id}           once it has ended

The requests are stored as the lines of an input file that nobody sees. What must always hold: a tenant sees its own
batches alone.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import trio
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.config.declarations import MESSAGES

from ...batches.batch_refusals import check_room
from ...batches.batch_service import BatchService
from ...batches.batch_values import DAY_S, Api, Batch, Status, new_id
from ...batches.file_uploads import MESSAGE_BATCH, Uploads, new_file
from ...request.errors import bad_value, invalid, not_found, quoted
from ...request.request_context import current_request_context
from ..operation import route
from ..query import Parameters, no_such_item
from ..stored_files import content_of, json_response
from .batch_requests import write_requests
from .message_batch_schemas import CANCEL, CREATE, DELETE, GET, LIST, MAX_LISTED, RESULTS

PATH: Final = "/v1/messages/batches"
DEFAULT_LISTED: Final = 20
WINDOW_S: Final = DAY_S


def install_message_batches(app: QuartTrio, service: BatchService) -> None:
    """Register the routes."""
    uploads = Uploads(service)

    @route(app, f"POST {PATH}", CREATE)
    async def create_message_batch() -> Response:
        principal = current_request_context().principal
        await service.call(check_room, service.store, service.limits, principal.tenant)
        async with uploads.begin(principal.tenant, MESSAGE_BATCH) as upload:
            num_requests = await write_requests(upload.write, service.limits)
            now, batch_id = service.now, new_id("msgbatch_")
            file = new_file(
                principal.tenant,
                f"{batch_id}_input.jsonl",
                "batch",
                now,
                service.limits.file_ttl_s + WINDOW_S,
                is_hidden=True,
            )
            file = await upload.keep(file)
        batch = Batch(
            id=batch_id,
            api=Api.ANTHROPIC,
            tenant=principal.tenant,
            key_id=principal.key_id,
            endpoint=MESSAGES,
            input_file_id=file.id,
            created_at=now,
            expires_at=now + WINDOW_S,
            num_lines=num_requests,
        )
        shown = _describe(batch)
        try:
            await service.add(batch)
        except BaseException:
            with trio.CancelScope(shield=True):  # its client has no name for it
                await service.call(service.store.delete_files, [file.id])
            raise
        return json_response(shown)

    @route(app, f"GET {PATH}", LIST)
    async def list_message_batches() -> Response:
        tenant, parameters = current_request_context().principal.tenant, Parameters(request.args)
        limit = parameters.whole("limit", 1, MAX_LISTED) or DEFAULT_LISTED
        after, before = parameters.text("after_id"), parameters.text("before_id")
        if after is not None and before is not None:
            raise bad_value("before_id", "not allowed together with `after_id`")
        for name, cursor in (("after_id", after), ("before_id", before)):
            if cursor is not None and await service.call(service.store.batch, tenant, Api.ANTHROPIC, cursor) is None:
                raise no_such_item(name)
        found = await service.call(service.store.batches, tenant, Api.ANTHROPIC, after, before, limit + 1)
        batches = found[-limit:] if before is not None else found[:limit]
        shown = [_describe(service.current(batch)) for batch in batches]
        ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
        return json_response({"data": shown, "has_more": len(found) > limit, **ends})

    @route(app, f"GET {PATH}/<batch_id>", GET)
    async def get_message_batch(batch_id: str) -> Response:
        return json_response(_describe(await find(batch_id)))

    @route(app, f"GET {PATH}/<batch_id>/results", RESULTS)
    async def get_results(batch_id: str) -> Response:
        batch = await find(batch_id)
        if not batch.has_ended:
            raise not_found(f"The results of {batch.id} do not exist yet: it has not ended.")
        file_id = batch.output_file_id or ""
        file = await service.call(service.store.file, batch.tenant, file_id)
        if file is None:
            raise not_found(f"The results of {batch.id} do not exist any more.")
        return await content_of(service, file, "application/x-jsonl")

    @route(app, f"POST {PATH}/<batch_id>/cancel", CANCEL)
    async def cancel_message_batch(batch_id: str) -> Response:
        return json_response(_describe(await service.cancel(await find(batch_id))))

    @route(app, f"DELETE {PATH}/<batch_id>", DELETE)
    async def delete_message_batch(batch_id: str) -> Response:
        batch = await find(batch_id)
        if not batch.has_ended:
            raise invalid("Only a batch that has ended can be deleted. Cancel it first.")
        await service.call(service.store.delete_batch, batch)
        return json_response({"id": batch.id, "type": "message_batch_deleted"})

    async def find(batch_id: str) -> Batch:
        tenant = current_request_context().principal.tenant
        found = await service.call(service.store.batch, tenant, Api.ANTHROPIC, batch_id)
        if found is None:
            raise not_found(f"Batch {quoted(batch_id)[1:-1]} not found.")
        return service.current(found)


def _describe(batch: Batch) -> dict[str, Any]:
    running = "canceling" if batch.status is Status.CANCELLING else "in_progress"
    counts = {
        "succeeded": batch.num_succeeded,
        "errored": batch.num_errored,
        "canceled": batch.num_canceled,
        "expired": batch.num_expired,
    }
    processing = 0 if batch.has_ended else batch.num_lines - sum(counts.values())
    results_url = f"{request.host_url.rstrip('/')}{PATH}/{batch.id}/results"
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.has_ended else running,
        "request_counts": {"processing": processing, **counts},
        "created_at": _rfc3339(batch.created_at),
        "expires_at": _rfc3339(batch.expires_at),
        "ended_at": _rfc3339(batch.ended_at),
        "cancel_initiated_at": _rfc3339(batch.cancelling_at),
        "archived_at": None,
        "results_url": results_url if batch.output_file_id is not None else None,
    }


def _rfc3339(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
