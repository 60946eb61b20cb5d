"""`/v1/files`: input files and results of batches. `web/batches/` stores them.

    POST   /v1/files                     a form: `purpose` (`batch`), `file`, `expires_after[anchor]`, `[seconds]`
    GET    /v1/files                     `purpose`, `limit`, `order`, `after`
    GET    /v1/files/{id}                its name, size and dates
    GET    /v1/files/{id}/content        its bytes
    DELETE /v1/files/{id}

What must always hold: a tenant sees its own files alone; no file is in memory as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson
from quart import Response, request
from quart_trio import QuartTrio

from ...batches.batch_service import BatchService
from ...batches.batch_values import StoredFile
from ...batches.file_uploads import FILE, Uploads, new_file
from ...request.errors import bad_value, invalid, not_found, quoted
from ...request.request_context import current_request_context
from ..fields import missing
from ..operation import route
from ..query import Parameters, no_such_item
from ..stored_files import content_of, json_response
from ..upload_forms import read_form
from ..whole_response import whole_response
from .file_schemas import (
    DELETE_FILE,
    GET_CONTENT,
    GET_FILE,
    LIST_FILES,
    MAX_FILES_LISTED,
    MAX_TTL_S,
    MIN_TTL_S,
    UPLOAD,
)

PATH: Final = "/v1/files"
MAX_FILENAME_CHARS: Final = 512
_WHOLE = re.compile(r"[0-9]{1,10}")


def install_files(app: QuartTrio, service: BatchService) -> None:
    """Register the routes."""
    uploads = Uploads(service)

    @route(app, f"POST {PATH}", UPLOAD)
    async def create_file() -> Response:
        tenant = current_request_context().principal.tenant
        async with uploads.begin(tenant, FILE) as upload:
            form = await read_form("file", upload.write)
            purpose = form.fields.get("purpose")
            if purpose is None:
                raise missing("purpose")
            if purpose != "batch":
                raise bad_value("purpose", "must be `batch`")
            ttl_s = _form_ttl(form.fields)
            if not upload.num_bytes:
                raise invalid("The file is empty.", "file", "empty_file")
            filename = re.sub(r"[^\x20-\U0010ffff]", "_", form.filename or "")[:MAX_FILENAME_CHARS]
            file = new_file(tenant, filename, purpose, service.now, service.limits.file_ttl_s)
            if ttl_s is not None:
                file.expires_at = file.created_at + min(ttl_s, service.limits.file_ttl_s)
            return json_response(describe_file(await upload.keep(file)))

    @route(app, f"GET {PATH}", LIST_FILES)
    async def list_files() -> Response:
        tenant, parameters = current_request_context().principal.tenant, Parameters(request.args)
        limit = parameters.whole("limit", 1, MAX_FILES_LISTED) or MAX_FILES_LISTED
        newest_first = parameters.choice("order", ("asc", "desc"), "desc") == "desc"
        purpose, after = parameters.text("purpose"), parameters.text("after")
        if after is not None:
            cursor = await service.call(service.store.file, tenant, after)
            if cursor is None or cursor.is_hidden:
                raise no_such_item("after")
        found = await service.call(service.store.files, tenant, purpose, after, limit + 1, newest_first)
        return await whole_response(_listed(found, limit))

    @route(app, f"GET {PATH}/<file_id>", GET_FILE)
    async def get_file(file_id: str) -> Response:
        return json_response(describe_file(await find_file(service, file_id)))

    @route(app, f"GET {PATH}/<file_id>/content", GET_CONTENT)
    async def get_content(file_id: str) -> Response:
        file = await find_file(service, file_id)
        return await content_of(service, file, "application/octet-stream")

    @route(app, f"DELETE {PATH}/<file_id>", DELETE_FILE)
    async def delete_file(file_id: str) -> Response:
        file = await find_file(service, file_id)
        if not await service.call(service.store.delete_unless_needed, file.id, file.tenant):
            raise invalid("A batch that has not ended reads this file. Cancel it first.", "id", "file_in_use")
        return json_response({"id": file.id, "object": "file", "deleted": True})


async def find_file(service: BatchService, file_id: str) -> StoredFile:
    """Return a file of the current request's tenant. Raises APIError."""
    found = await service.call(service.store.file, current_request_context().principal.tenant, file_id)
    if found is None or found.is_hidden:
        raise not_found(f"No such File object: {quoted(file_id)[1:-1]}", "id")
    return found


def describe_file(file: StoredFile) -> dict[str, Any]:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def _listed(found: list[StoredFile], limit: int) -> Iterator[bytes]:
    shown = found[:limit]
    yield b'{"object":"list","data":['
    for index, file in enumerate(shown):
        yield (b"," if index else b"") + orjson.dumps(describe_file(file))
    ends = {
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }
    yield b"]," + orjson.dumps(ends)[1:]


def _form_ttl(fields: dict[str, str]) -> int | None:
    """Return after how many seconds the file is to be deleted, if the form says so. Raises APIError."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    number = int(seconds) if seconds is not None and _WHOLE.fullmatch(seconds) else None
    return check_ttl(anchor, number, "expires_after")


def check_ttl(anchor: str | None, seconds: int | None, param: str) -> int:
    """Return the seconds of an `expires_after`. Raises APIError."""
    if anchor != "created_at":
        raise bad_value(f"{param}.anchor", "must be `created_at`")
    if seconds is None or not MIN_TTL_S <= seconds <= MAX_TTL_S:
        raise bad_value(f"{param}.seconds", f"must be a number from {MIN_TTL_S} to {MAX_TTL_S}")
    return seconds
