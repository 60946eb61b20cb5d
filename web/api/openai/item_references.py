"""Items of an `input` that only refer to stored ones, by id: they are replaced before anything else reads the input.

Their type may be absent, as in OpenAI's API, unlike that of anything but a message.

The id of an item names the response that it was made with, which is where it is looked for, among those of the tenant.

What must always hold: an item of another tenant is like one that does not exist; no more is read than a body may have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import ContextTooLong, Kind

from ...request.errors import bad_value, not_found, quoted
from ...request.request_context import current_request_context
from ..fields import Fields
from ..json_body import parse_json
from ..json_structure import MAX_CHAT_VALUES, TooComplex
from ..pace import MAX_MESSAGES
from .store_door import StoreDoor, is_stored_id, needs_store

MAX_REFERENCES = 128
"""In one input."""
REFERENCE = "item_reference"
_ITEM_ID = re.compile(r"[a-z]+_([A-Za-z0-9.:-]+)(?:_i?[0-9]+)?")


async def with_references(
    body: dict[str, Any], door: StoreDoor | None, max_bytes: int, grow: Callable[[int], object]
) -> dict[str, Any]:
    """Return a body whose `input` has the items that it refers to. Raises APIError.

    `grow` takes memory from the budget of bodies. Without a `door`, nothing is stored.
    """
    items = body.get("input")
    if type(items) is not list or len(items) > MAX_MESSAGES:
        return body
    places = [at for at, item in enumerate(items) if type(item) is dict and _is_reference(item)]
    if not places:
        return body
    if door is None:
        raise needs_store(f"input[{places[0]}]")
    if len(places) > MAX_REFERENCES:
        raise bad_value("input", f"must have at most {MAX_REFERENCES} items of the type `{REFERENCE}`")
    ids = [Fields(items[at], f"input[{at}]").text("id") for at in places]
    tenant = current_request_context().principal.tenant
    try:
        found = await door.call(_find, tenant, ids, max_bytes)
        for at, item_id, data in zip(places, ids, found, strict=True):
            if data is None:
                raise not_found(f"Item with id {quoted(item_id)} not found.", f"input[{at}].id", "item_not_found")
        data = b"[" + b",".join(filter(None, found)) + b"]"
        grow(len(data))
        read = await parse_json(data, grow, MAX_CHAT_VALUES)
    except ContextTooLong as error:
        problem = f"the items that it refers to have more than {error.num_bytes} bytes (--max-body-bytes)"
        raise bad_value("input", problem) from None
    except TooComplex as error:
        raise bad_value("input", f"what it refers to is too complex: {error}") from None
    replaced = [*items]
    for at, item in zip(places, read, strict=True):
        replaced[at] = item
    return {**body, "input": replaced}


def _is_reference(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    return kind == REFERENCE or (kind is None and item.get("role") is None and item.get("id") is not None)


def _find(tables: ObjectTables, tenant: str, ids: Sequence[str], max_bytes: int) -> list[bytes | None]:
    found: list[bytes | None] = []
    num_bytes = 0
    for item_id in ids:
        named = _ITEM_ID.fullmatch(item_id) if is_stored_id(item_id) else None
        data = None if named is None else tables.item(tenant, Kind.RESPONSE, f"resp_{named[1]}", item_id)
        num_bytes += len(data or b"")
        if num_bytes > max_bytes:
            raise ContextTooLong(max_bytes, len(found))
        found.append(data)
    return found
