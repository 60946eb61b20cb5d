"""Chat completions that their clients want stored: what is kept of them, and `/v1/chat/completions/{completion_id}`.

Registered by `install_stored_chats`. A completion is stored when it is complete; only those that were served are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVarTuple

import orjson
from quart import Response, request
from quart_trio import QuartTrio

from quipu.actors.config.declarations import CHAT
from quipu.actors.messages.handler import Closed
from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import (
    Ending,
    Kind,
    NewObject,
    NoSuchItem,
    StoredItem,
    StoredObject,
    StoreUnavailable,
)

from ...http.sse import json_for_line
from ...request.errors import APIError, bad_value, error_of, not_found
from ...request.request_context import current_request_context
from ..answer import Reply
from ..fields import missing
from ..item_shapes import NEW_METADATA
from ..keeping import Keeper
from ..operation import route
from ..pace import Pace
from ..query import Parameters, no_such_item
from ..small_body import read_small_body
from ..stream import Transcript
from ..whole_response import joined
from . import stored_schemas as schemas
from .paging import read_page, read_query
from .responses_echo import read_metadata
from .store_door import StoreDoor, is_stored_id, no_object, not_stored
from .stored_items import page_body

Ts = TypeVarTuple("Ts")

ONE = f"{CHAT}/<completion_id>"
MAX_FILTERS = 16
_KIND = Kind.CHAT
_VLLM_BATCH = "batch"
"""What vLLM has at this path is no stored completion."""
_NO_BATCH = (
    f"Unknown URL: POST {CHAT}/{_VLLM_BATCH}. Several chats in one request are not served here: send each in its own "
    f"request to {CHAT}, or all of them to /v1/batches."
)


class ChatKeeper(Keeper):
    """Stores one chat completion."""

    def __init__(
        self,
        reply: Reply,
        created_at: int,
        items: Sequence[StoredItem],
        metadata: Mapping[str, str],
        door: StoreDoor,
        tenant: str,
    ) -> None:
        self._reply = reply
        self._created_at = created_at
        self._items = items
        self._metadata = metadata
        self._door = door
        self._tenant = tenant
        self._is_begun = self._is_ending = False

    async def begin(self) -> None:
        items, self._items = self._items, ()
        new = NewObject(
            object_id=self._reply.answer_id,
            tenant=self._tenant,
            kind=_KIND,
            model=self._reply.wanted.model,
            created_at=self._created_at,
            head=b"",
            metadata=self._metadata,
            items=items,
            is_open=True,
        )
        self._is_begun = True  # also if its client leaves meanwhile: a thread may store it all the same
        try:
            await self._door.call(ObjectTables.begin, new)
        except APIError as error:
            self._is_begun = False
            self._door.store.note_unstored(error.message)

    async def end(self, transcript: Transcript, closed: Closed) -> None:
        if not self._is_begun or self._is_ending or error_of(closed) is not None:
            return
        self._is_ending = True
        try:
            head = await joined(self._reply.pieces(transcript, closed.record))
            ending = Ending(object_id=self._reply.answer_id, tenant=self._tenant, head=head)
            await self._door.store.call(ObjectTables.end, ending)
        except StoreUnavailable as error:
            self._door.store.note_unstored(str(error))
            self._discard()
        except BaseException:  # its client has left
            self._discard()
            raise

    def drop(self) -> None:
        if self._is_begun and not self._is_ending:
            self._discard()

    def _discard(self) -> None:
        self._door.store.discard(self._tenant, _KIND, self._reply.answer_id)

    def start_soon(self, task: Callable[[*Ts], Awaitable[object]], *args: *Ts) -> None:
        self._door.store.start_soon(task, *args)


async def message_items(messages: Any, completion_id: str, pace: Pace) -> Sequence[StoredItem]:
    """Return the messages of a chat that has been read. Raises APIError for one that cannot be encoded."""
    stored = []
    for index, message in enumerate(messages):
        await pace.tick()
        item_id, content = f"{completion_id}-{index}", message.get("content")
        parts = content if type(content) is list else None
        text = None if parts is not None else content
        whole = {**message, "id": item_id, "content": text, "content_parts": parts}
        try:
            stored.append(StoredItem(item_id, json_for_line(whole)))
        except orjson.JSONEncodeError:
            raise bad_value(f"messages[{index}]", "nested too deeply to be stored") from None
    return stored


def install_stored_chats(app: QuartTrio, door: StoreDoor | None) -> None:
    """Register the routes. Without a `door`, they say that nothing is stored, and there is no list."""
    if door is not None:
        _install_list(app, door)

    @route(app, f"GET {ONE}", schemas.GET_CHAT)
    async def get_chat_completion(completion_id: str) -> Response:
        return Response(_body(await _find(_open(door), completion_id)), content_type="application/json")

    @route(app, f"POST {ONE}", schemas.UPDATE_CHAT)
    async def update_chat_completion(completion_id: str) -> Response:
        if completion_id == _VLLM_BATCH:
            raise not_found(_NO_BATCH, code="unknown_url")
        store = _open(door)
        fields = await read_small_body(NEW_METADATA)
        if fields.get("metadata") is None:
            raise missing("metadata")
        await _find(store, completion_id)
        metadata = read_metadata(fields)
        found = await store.call(ObjectTables.relabel, _tenant(), _KIND, completion_id, metadata)
        if found is None:
            raise no_object(_KIND, completion_id)
        return Response(_body(found), content_type="application/json")

    @route(app, f"DELETE {ONE}", schemas.DELETE_CHAT)
    async def delete_chat_completion(completion_id: str) -> dict[str, Any]:
        store = _open(door)
        await _find(store, completion_id)
        if not await store.call(ObjectTables.delete, _tenant(), _KIND, completion_id):
            raise no_object(_KIND, completion_id)
        return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}

    @route(app, f"GET {ONE}/messages", schemas.LIST_MESSAGES)
    async def list_messages(completion_id: str) -> Response:
        store = _open(door)
        await _find(store, completion_id)
        page = await read_page(store, _tenant(), _KIND, completion_id, default_order="asc")
        return Response(page_body(page), content_type="application/json")


def _install_list(app: QuartTrio, door: StoreDoor) -> None:

    @route(app, f"GET {CHAT}", schemas.LIST_CHATS)
    async def list_chat_completions() -> Response:
        parameters = Parameters(request.args)
        query = read_query(parameters, default_order="asc")
        filters = _read_filters()
        try:
            page = await door.call(
                ObjectTables.list_objects, _tenant(), _KIND, query, parameters.text("model"), filters
            )
        except NoSuchItem:
            raise no_such_item("after") from None
        ids = [found.object_id for found in page.objects]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        rest = orjson.dumps({"first_id": first, "last_id": last, "has_more": page.has_more})[1:]
        data = b'{"object":"list","data":[' + b",".join(map(_body, page.objects)) + b"]," + rest
        return Response(data, content_type="application/json")


def _open(door: StoreDoor | None) -> StoreDoor:
    if door is None:
        raise not_stored()
    return door


def _tenant() -> str:
    return current_request_context().principal.tenant


async def _find(store: StoreDoor, completion_id: str) -> StoredObject:
    found: StoredObject | None = None
    if is_stored_id(completion_id):
        found = await store.call(ObjectTables.find, _tenant(), _KIND, completion_id)
    if found is None or not found.head:  # not complete yet
        raise no_object(_KIND, completion_id)
    return found


def _body(found: StoredObject) -> bytes:
    return found.head[:-1] + b',"metadata":' + found.metadata + b"}"


def _read_filters() -> dict[str, str]:
    """Return the metadata that is asked for, as in `metadata[key]=value`. Raises APIError."""
    filters = {}
    for name, value in request.args.items(multi=True):
        if name.startswith("metadata[") and name.endswith("]"):
            filters[name[len("metadata[") : -1]] = value
        elif name == "metadata" and value:
            raise bad_value("metadata", "must be given as metadata[key]=value")
    if len(filters) > MAX_FILTERS:
        raise bad_value("metadata", f"must have at most {MAX_FILTERS} pairs")
    return filters
