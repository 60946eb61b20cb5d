"""What is declared of `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from quipu.actors.config.declarations import Bounds

from ...batches.batch_values import DAY_S, Status
from ..body_field import INTEGER, OBJECT, STRING, BodyField, Shape, shape
from ..operation import (
    BATCHES,
    COUNT,
    FLAG,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    always,
    array,
    by_name,
    maybe,
    one_of,
    record,
)

MAX_FILES_LISTED: Final = 10_000
MAX_BATCHES_LISTED: Final = 100
MAX_METADATA: Final = 16
MAX_KEY_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512
MIN_TTL_S: Final = 3600
MAX_TTL_S: Final = 30 * DAY_S
WINDOW_PATTERN: Final = "[1-9][0-9]{0,3}[mhd]"

_EXPIRES: Final = shape(
    BodyField(name="anchor", schema=always("created_at"), is_required=True),
    BodyField(name="seconds", type=INTEGER, bounds=Bounds(minimum=MIN_TTL_S, maximum=MAX_TTL_S), is_required=True),
)
CREATED: Final[Shape] = shape(
    BodyField(name="input_file_id", type=STRING, is_required=True, help="A file with the purpose `batch`."),
    BodyField(name="endpoint", type=STRING, is_required=True, help="The `url` of each line."),
    BodyField(
        name="completion_window",
        schema={"type": STRING, "pattern": f"^{WINDOW_PATTERN}$"},
        is_required=True,
        help="How long it may take, such as 24h.",
    ),
    BodyField(
        name="metadata",
        schema={
            "type": OBJECT,
            "maxProperties": MAX_METADATA,
            "propertyNames": {"maxLength": MAX_KEY_CHARS},
            "additionalProperties": {"type": STRING, "maxLength": MAX_VALUE_CHARS},
        },
    ),
    BodyField(name="output_expires_after", inner=_EXPIRES, help="When the files of its results are deleted."),
)
_FILE_ID, _BATCH_ID = {"file_id": "The file's id."}, {"batch_id": "The batch's id."}
_NONE: Final = {HTTPStatus.NOT_FOUND: "The caller has none with this id."}
_FILE: Final = Named(
    "File",
    record(
        {
            "id": TEXT_VALUE,
            "object": always("file"),
            "bytes": COUNT,
            "created_at": WHOLE,
            "expires_at": maybe(WHOLE),
            "filename": TEXT_VALUE,
            "purpose": one_of("batch", "batch_output"),
            "status": always("processed"),
            "status_details": maybe(TEXT_VALUE),
        }
    ),
)
_ERROR: Final = record({"code": TEXT_VALUE, "message": TEXT_VALUE, "param": maybe(TEXT_VALUE), "line": maybe(COUNT)})
_TIMES: Final = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_BATCH: Final = Named(
    "Batch",
    record(
        {
            "id": TEXT_VALUE,
            "object": always("batch"),
            "endpoint": TEXT_VALUE,
            "model": maybe(TEXT_VALUE),
            "errors": maybe(record({"object": always("list"), "data": array(_ERROR)})),
            "input_file_id": TEXT_VALUE,
            "completion_window": TEXT_VALUE,
            "status": one_of(*Status),
            "output_file_id": maybe(TEXT_VALUE),
            "error_file_id": maybe(TEXT_VALUE),
            "created_at": WHOLE,
            "expires_at": WHOLE,
            **{f"{name}_at": maybe(WHOLE) for name in _TIMES},
            "request_counts": record({"total": COUNT, "completed": COUNT, "failed": COUNT}),
            "usage": record(
                {
                    "input_tokens": COUNT,
                    "input_tokens_details": record({"cached_tokens": COUNT}),
                    "output_tokens": COUNT,
                    "output_tokens_details": record({"reasoning_tokens": COUNT}),
                    "total_tokens": COUNT,
                }
            ),
            "metadata": maybe(by_name(TEXT_VALUE)),
        }
    ),
)


def _list_of(item: Named) -> Named:
    ends = {"first_id": maybe(TEXT_VALUE), "last_id": maybe(TEXT_VALUE), "has_more": FLAG}
    return Named(f"{item.name}List", record({"object": always("list"), "data": array(item), **ends}))


def _page(most: int) -> tuple[BodyField, ...]:
    return (
        BodyField(name="after", type=STRING, help="The last id of the page before."),
        BodyField(name="limit", type=INTEGER, bounds=Bounds(minimum=1, maximum=most)),
    )


UPLOAD: Final = Operation(
    summary="Upload a file of requests",
    tag=BATCHES,
    help="A form (`multipart/form-data`) with `purpose` (`batch`), `file`, and `expires_after[anchor]` with "
    "`expires_after[seconds]`.",
    answer=_FILE,
    others={HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The file is too large."},
)
LIST_FILES: Final = Operation(
    summary="List the files",
    tag=BATCHES,
    query=(
        *_page(MAX_FILES_LISTED),
        BodyField(name="order", choices=("asc", "desc")),
        BodyField(name="purpose", type=STRING),
    ),
    answer=_list_of(_FILE),
)
GET_FILE: Final = Operation(summary="Show a file", tag=BATCHES, path=_FILE_ID, answer=_FILE, others=_NONE)
GET_CONTENT: Final = Operation(
    summary="Download a file", tag=BATCHES, path=_FILE_ID, content_type="application/octet-stream", others=_NONE
)
DELETE_FILE: Final = Operation(
    summary="Delete a file",
    tag=BATCHES,
    path=_FILE_ID,
    answer=record({"id": TEXT_VALUE, "object": always("file"), "deleted": FLAG}),
    others=_NONE,
)
CREATE_BATCH: Final = Operation(
    summary="Run the requests of a file",
    tag=BATCHES,
    body=CREATED,
    answer=_BATCH,
    others={
        HTTPStatus.NOT_FOUND: "There is no such file.",
        HTTPStatus.TOO_MANY_REQUESTS: "The caller has too many batches that have not ended.",
    },
)
LIST_BATCHES: Final = Operation(
    summary="List the batches", tag=BATCHES, query=_page(MAX_BATCHES_LISTED), answer=_list_of(_BATCH)
)
GET_BATCH: Final = Operation(summary="Show a batch", tag=BATCHES, path=_BATCH_ID, answer=_BATCH, others=_NONE)
CANCEL_BATCH: Final = Operation(
    summary="Cancel a batch",
    tag=BATCHES,
    path=_BATCH_ID,
    answer=_BATCH,
    others={**_NONE, HTTPStatus.CONFLICT: "It has ended."},
)
