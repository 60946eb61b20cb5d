"""What is declared of `/v1/messages/batches`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from quipu.actors.config.declarations import Bounds

from ..body_field import INTEGER, OBJECT, STRING, BodyField, Shape, shape
from ..operation import (
    BATCHES,
    COUNT,
    FLAG,
    TEXT_VALUE,
    Named,
    Operation,
    always,
    array,
    maybe,
    one_of,
    record,
)

MAX_LISTED: Final = 1000
CUSTOM_ID_PATTERN: Final = "[a-zA-Z0-9_-]{1,64}"
_REQUEST: Final = shape(
    BodyField(name="custom_id", schema={"type": STRING, "pattern": f"^{CUSTOM_ID_PATTERN}$"}, is_required=True),
    BodyField(name="params", type=OBJECT, is_required=True, help="The body of a request to `/v1/messages`."),
)
CREATED: Final[Shape] = shape(BodyField(name="requests", items=_REQUEST, min_items=1, is_required=True))
_ID: Final = {"batch_id": "The batch's id."}
_NONE: Final = {HTTPStatus.NOT_FOUND: "The caller has none with this id."}
_BATCH: Final = Named(
    "MessageBatch",
    record(
        {
            "id": TEXT_VALUE,
            "type": always("message_batch"),
            "processing_status": one_of("in_progress", "canceling", "ended"),
            "request_counts": record(
                dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), COUNT)
            ),
            "created_at": TEXT_VALUE,
            "expires_at": TEXT_VALUE,
            "ended_at": maybe(TEXT_VALUE),
            "cancel_initiated_at": maybe(TEXT_VALUE),
            "archived_at": maybe(TEXT_VALUE),
            "results_url": maybe(TEXT_VALUE),
        }
    ),
)
CREATE: Final = Operation(
    summary="Run messages in a batch",
    tag=BATCHES,
    body=CREATED,
    answer=_BATCH,
    others={HTTPStatus.TOO_MANY_REQUESTS: "The caller has too many batches that have not ended."},
)
LIST: Final = Operation(
    summary="List the batches of messages",
    tag=BATCHES,
    query=(
        BodyField(name="after_id", type=STRING, help="The last id of the page before."),
        BodyField(name="before_id", type=STRING, help="The first id of the page after."),
        BodyField(name="limit", type=INTEGER, bounds=Bounds(minimum=1, maximum=MAX_LISTED)),
    ),
    answer=record(
        {
            "data": array(_BATCH),
            "has_more": FLAG,
            "first_id": maybe(TEXT_VALUE),
            "last_id": maybe(TEXT_VALUE),
        }
    ),
)
GET: Final = Operation(summary="Show a batch of messages", tag=BATCHES, path=_ID, answer=_BATCH, others=_NONE)
RESULTS: Final = Operation(
    summary="Download the results of a batch of messages",
    tag=BATCHES,
    path=_ID,
    content_type="application/x-jsonl",
    others={HTTPStatus.NOT_FOUND: "The caller has none with this id, or it has not ended."},
)
CANCEL: Final = Operation(summary="Cancel a batch of messages", tag=BATCHES, path=_ID, answer=_BATCH, others=_NONE)
DELETE: Final = Operation(
    summary="Delete a batch of messages",
    tag=BATCHES,
    path=_ID,
    answer=record({"id": TEXT_VALUE, "type": always("message_batch_deleted")}),
    others=_NONE,
)
