"""`/v1/conversations`: lists of items that responses continue and extend. Registered by `install_conversations`.

What must always hold: an item is stored only if a response that continues the conversation can be made of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.messages.images import ImageFormat
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import Kind, NewObject, Page, StoredItem, StoredObject

from ...auth.sealed_texts import TextSeal
from ...request.errors import bad_value, not_found
from ...request.request_context import current_request_context
from ..bodies import take_body
from ..fields import Fields, missing, parse_object
from ..ignored_fields import ignored_fields
from ..image_parts import ImageParts
from ..item_shapes import MAX_ADDED, NEW_CONVERSATION
from ..operation import route
from ..pace import Pace
from . import stored_schemas as schemas
from .paging import read_page
from .responses_echo import read_metadata
from .responses_input import check_items
from .store_door import FLAG, StoreDoor, is_stored_id, no_item, no_object
from .stored_items import input_items, page_body

CONVERSATIONS = "/v1/conversations"
ONE = f"{CONVERSATIONS}/<conversation_id>"
ITEMS = f"{ONE}/items"
_KIND = Kind.CONVERSATION


def install_conversations(
    app: QuartTrio, door: StoreDoor | None, seal: TextSeal, wanted: Callable[[], ImageFormat | None]
) -> None:
    """Register the routes. Without a `door`, they say that nothing is stored. `seal` opens summaries;
    `wanted` returns how the model wants images."""

    @route(app, f"POST {CONVERSATIONS}", schemas.CREATE_CONVERSATION)
    async def create_conversation() -> dict[str, Any]:
        store = _open(door)
        fields, conversation_id = await _read_body(), f"conv_{secrets.token_hex(16)}"
        items = await _read_items(fields, conversation_id, seal, ImageParts(wanted()))
        new = NewObject(
            object_id=conversation_id,
            tenant=_tenant(),
            kind=_KIND,
            created_at=int(time.time()),
            head=b"{}",
            metadata=read_metadata(fields),
            items=items,
        )
        await store.call(ObjectTables.begin, new)
        return _body(conversation_id, new.created_at, new.metadata)

    @route(app, f"GET {ONE}", schemas.GET_CONVERSATION)
    async def get_conversation(conversation_id: str) -> dict[str, Any]:
        return _stored_body(await _find(_open(door), conversation_id))

    @route(app, f"POST {ONE}", schemas.UPDATE_CONVERSATION)
    async def update_conversation(conversation_id: str) -> dict[str, Any]:
        store, fields = _open(door), await _read_body()
        if fields.get("metadata") is None:
            raise missing("metadata")
        metadata = read_metadata(fields)
        found = None
        if is_stored_id(conversation_id):
            found = await store.call(ObjectTables.relabel, _tenant(), _KIND, conversation_id, metadata)
        if found is None:
            raise no_object(_KIND, conversation_id)
        return _stored_body(found)

    @route(app, f"DELETE {ONE}", schemas.DELETE_CONVERSATION)
    async def delete_conversation(conversation_id: str) -> dict[str, Any]:
        store = _open(door)
        is_known = is_stored_id(conversation_id)
        if not is_known or not await store.call(ObjectTables.delete, _tenant(), _KIND, conversation_id):
            raise no_object(_KIND, conversation_id)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    @route(app, f"GET {ITEMS}", schemas.LIST_ITEMS)
    async def list_items(conversation_id: str) -> Response:
        page = await read_page(_open(door), _tenant(), _KIND, conversation_id)
        return Response(page_body(page), content_type="application/json")

    @route(app, f"POST {ITEMS}", schemas.ADD_ITEMS)
    async def create_items(conversation_id: str) -> Response:
        store, fields = _open(door), await _read_body()
        if not fields.get("items"):
            raise missing("items")
        items = await _read_items(fields, secrets.token_hex(12), seal, ImageParts(wanted()))
        is_known = is_stored_id(conversation_id)
        if not is_known or not await store.call(ObjectTables.append, _tenant(), conversation_id, items):
            raise no_object(_KIND, conversation_id)
        page = Page([item.item_id for item in items], [item.data for item in items], has_more=False)
        return Response(page_body(page), content_type="application/json")

    @route(app, f"GET {ITEMS}/<item_id>", schemas.GET_ITEM)
    async def get_item(conversation_id: str, item_id: str) -> Response:
        store = _open(door)
        await _find(store, conversation_id)
        data = None
        if is_stored_id(item_id):
            data = await store.call(ObjectTables.item, _tenant(), _KIND, conversation_id, item_id)
        if data is None:
            raise no_item(item_id)
        return Response(data, content_type="application/json")

    @route(app, f"DELETE {ITEMS}/<item_id>", schemas.DELETE_ITEM)
    async def delete_item(conversation_id: str, item_id: str) -> dict[str, Any]:
        store = _open(door)
        found = await _find(store, conversation_id)
        is_known = is_stored_id(item_id)
        if not is_known or not await store.call(ObjectTables.delete_item, _tenant(), conversation_id, item_id):
            raise no_item(item_id)
        return _stored_body(found)


def _open(door: StoreDoor | None) -> StoreDoor:
    if door is None:
        message = f"This server does not store conversations. Its operator may start it with {FLAG}."
        raise not_found(message, "conversation_id", "conversations_not_stored")
    return door


def _tenant() -> str:
    return current_request_context().principal.tenant


async def _read_body() -> Fields:
    data, share = await take_body()
    body = await parse_object(data, share.grow) if data else {}
    current_request_context().ignored_fields = (await ignored_fields(body, NEW_CONVERSATION)).header
    return Fields(body, declared=NEW_CONVERSATION)


async def _read_items(fields: Fields, request_id: str, seal: TextSeal, images: ImageParts) -> Sequence[StoredItem]:
    items = fields.get("items")
    if type(items) is list and len(items) > MAX_ADDED:
        raise bad_value("items", f"must have at most {MAX_ADDED} items", "too_many_items")
    async with Pace() as pace:
        await check_items(fields, "items", pace, seal.of(_tenant()), images)
        return await input_items(items, request_id, pace, "items")


async def _find(store: StoreDoor, conversation_id: str) -> StoredObject:
    found: StoredObject | None = None
    if is_stored_id(conversation_id):
        found = await store.call(ObjectTables.find, _tenant(), _KIND, conversation_id)
    if found is None:
        raise no_object(_KIND, conversation_id)
    return found


def _stored_body(found: StoredObject) -> dict[str, Any]:
    return _body(found.object_id, found.created_at, orjson.loads(found.metadata))


def _body(conversation_id: str, created_at: int, metadata: Any) -> dict[str, Any]:
    return {"id": conversation_id, "object": "conversation", "created_at": created_at, "metadata": metadata}
