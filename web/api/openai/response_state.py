"""The fields of `POST /v1/responses` that refer to what is stored, and what they refer to.

What a response continues is read like the beginning of its `input`, so that it becomes the same messages, and the same
tokens, as if the client had sent it again.

What must always hold: nothing is read that is larger than a body may be, and it takes its memory from the same budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.stored import Context, ContextTooLong, Kind, StillOpen

from ...request.errors import APIError, bad_value, invalid, not_found, quoted
from ...request.request_context import current_request_context
from ..fields import Fields, wrong_type
from ..json_body import parse_json
from ..json_structure import MAX_CHAT_VALUES, TooComplex
from ..pace import MAX_MESSAGES
from .store_door import StoreDoor, is_stored_id, needs_store

_TOO_LONG = "conversation_too_long"


@attrs.frozen
class ResponseState:
    is_stored: bool = False
    is_background: bool = False
    previous: str | None = None
    conversation: str | None = None
    segments: Sequence[int] = ()
    """Of what it continues, to be shared with it."""
    context: Sequence[dict[str, Any]] = ()
    """The items of that."""
    param: str = ""
    """The field that named it."""


NO_STATE = ResponseState()


async def read_state(
    fields: Fields, door: StoreDoor | None, max_bytes: int, grow: Callable[[int], object]
) -> ResponseState:
    """Return what a body says of stored responses. Raises APIError.

    `grow` takes memory from the budget of bodies. Without a `door`, nothing is stored.
    """
    store = fields.flag("store") if fields.get("store") is not None else door is not None
    is_background = fields.flag("background")
    previous, conversation = fields.optional_text("previous_response_id"), _read_conversation(fields)
    if door is None:
        named = {"background": is_background, "conversation": conversation, "previous_response_id": previous}
        for param, value in named.items():
            if value:
                raise needs_store(param)
        return NO_STATE
    if is_background and not store:
        raise bad_value("background", "only allowed when `store` is true")
    if conversation is not None and not store:
        raise bad_value("conversation", "only allowed when `store` is true")
    state = ResponseState(store, is_background, previous, conversation)
    if previous is not None and conversation is not None:
        raise bad_value("conversation", "not allowed together with `previous_response_id`")
    if previous is not None:
        found = await _find(door, Kind.RESPONSE, previous, "previous_response_id", max_bytes)
        if found is None:
            raise previous_not_found(previous)
        return await _with_context(state, found, "previous_response_id", grow)
    if conversation is not None:
        found = await _find(door, Kind.CONVERSATION, conversation, "conversation", max_bytes)
        if found is None:
            message = f"Conversation {quoted(conversation)} was not found."
            raise not_found(message, "conversation", "conversation_not_found")
        return await _with_context(state, found, "conversation", grow)
    return state


def previous_not_found(previous: str) -> APIError:
    message = f"Previous response with id {quoted(previous)} not found."
    return invalid(message, "previous_response_id", "previous_response_not_found")


def _read_conversation(fields: Fields) -> str | None:
    """Return the id of the conversation, which may be an object with it."""
    value = fields.get("conversation")
    if type(value) is dict:
        return fields.fields("conversation").text("id")
    if value is not None and type(value) is not str:
        raise wrong_type("conversation", "a string or an object")
    return value


async def _find(door: StoreDoor, kind: Kind, object_id: str, param: str, max_bytes: int) -> Context | None:
    if not is_stored_id(object_id):
        return None
    tenant = current_request_context().principal.tenant
    try:
        return await door.call(ObjectTables.context, tenant, kind, object_id, max_bytes, MAX_MESSAGES)
    except StillOpen:
        message = f"The response {quoted(object_id)} is still being generated. Continue it once it has ended."
        raise invalid(message, param, "previous_response_in_progress") from None
    except ContextTooLong as error:
        what = f"{error.num_items} items with {error.num_bytes} bytes"
        limits = f"{MAX_MESSAGES} items and {max_bytes} bytes (--max-body-bytes)"
        raise bad_value(param, f"it continues {what}; at most {limits} are read", _TOO_LONG) from None


async def _with_context(
    state: ResponseState, found: Context, param: str, grow: Callable[[int], object]
) -> ResponseState:
    data = b"[" + b",".join(found.items) + b"]"
    grow(len(data))
    try:
        items = await parse_json(data, grow, MAX_CHAT_VALUES)
    except TooComplex as error:
        raise bad_value(param, f"what it continues is too complex: {error}", _TOO_LONG) from None
    return attrs.evolve(state, segments=found.segments, context=items, param=param)
