"""What is declared of the routes for stored responses, conversations and chat completions."""

from __future__ import annotations

from http import HTTPStatus

from quipu.actors.config.declarations import Bounds

from ..body_field import BOOLEAN, STRING, BodyField, Schema
from ..item_shapes import INCLUDE, MORE_ITEMS, NEW_CONVERSATION, NEW_METADATA
from ..operation import (
    ANY_OBJECT,
    FLAG,
    STORED,
    TEXT_VALUE,
    WHOLE,
    Named,
    Operation,
    Part,
    always,
    array,
    by_name,
    maybe,
    record,
)
from .choices_schemas import CHAT_OBJECT
from .paging import DEFAULT_LIMIT, MAX_LIMIT
from .responses_schemas import RESPONSE_EVENT, RESPONSE_OBJECT

MAX_EVENT_NUMBER = 2**53
_UNAVAILABLE = {HTTPStatus.SERVICE_UNAVAILABLE: "The store is not available."}
_OTHERS = {HTTPStatus.NOT_FOUND: "Nothing is stored under this id, or it is another tenant's.", **_UNAVAILABLE}
_RESPONSE, _CONVERSATION, _CHAT = (
    {"response_id": "The id of a response."},
    {"conversation_id": "The id of a conversation."},
    {"completion_id": "The id of a chat completion."},
)
_ITEM = {**_CONVERSATION, "item_id": "The id of one of its items."}
_INCLUDED = BodyField(name="include", schema=INCLUDE, help="Has no effect.")
_CONVERSATION_OBJECT = Named(
    "Conversation",
    record(
        {
            "id": TEXT_VALUE,
            "object": always("conversation"),
            "created_at": WHOLE,
            "metadata": by_name(TEXT_VALUE),
        }
    ),
)


def _page(order: str) -> tuple[BodyField, ...]:
    return (
        BodyField(name="after", type=STRING, help="The id after which the page begins."),
        BodyField(name="limit", bounds=Bounds(minimum=1, maximum=MAX_LIMIT), default=DEFAULT_LIMIT),
        BodyField(name="order", choices=("asc", "desc"), default=order),
    )


def _list_of(items: Part) -> Schema:
    return record(
        {
            "object": always("list"),
            "data": array(items),
            "first_id": maybe(TEXT_VALUE),
            "last_id": maybe(TEXT_VALUE),
            "has_more": FLAG,
        }
    )


def _deleted(kind: str) -> Schema:
    return record({"id": TEXT_VALUE, "object": always(kind), "deleted": always(True)})


_ITEMS = Named("StoredItems", _list_of(ANY_OBJECT))

RETRIEVE_RESPONSE = Operation(
    summary="Return a stored response",
    tag=STORED,
    help="With `stream=true`, the events of a background response, those after `starting_after`.",
    path=_RESPONSE,
    query=(
        _INCLUDED,
        BodyField(name="include_obfuscation", type=BOOLEAN, help="Has no effect."),
        BodyField(name="stream", type=BOOLEAN),
        BodyField(name="starting_after", bounds=Bounds(minimum=0, maximum=MAX_EVENT_NUMBER)),
    ),
    answer=RESPONSE_OBJECT,
    events=RESPONSE_EVENT,
    others=_OTHERS,
)
DELETE_RESPONSE = Operation(
    summary="Delete a stored response", tag=STORED, path=_RESPONSE, answer=_deleted("response"), others=_OTHERS
)
CANCEL_RESPONSE = Operation(
    summary="Cancel a background response", tag=STORED, path=_RESPONSE, answer=RESPONSE_OBJECT, others=_OTHERS
)
INPUT_ITEMS = Operation(
    summary="List the input items of a response",
    tag=STORED,
    path=_RESPONSE,
    query=(*_page("desc"), _INCLUDED),
    answer=_ITEMS,
    others=_OTHERS,
)

CREATE_CONVERSATION = Operation(
    summary="Create a conversation",
    tag=STORED,
    body=NEW_CONVERSATION,
    body_may_be_empty=True,
    answer=_CONVERSATION_OBJECT,
    others=_OTHERS,
)
GET_CONVERSATION = Operation(
    summary="Return a conversation", tag=STORED, path=_CONVERSATION, answer=_CONVERSATION_OBJECT, others=_OTHERS
)
UPDATE_CONVERSATION = Operation(
    summary="Replace the metadata of a conversation",
    tag=STORED,
    path=_CONVERSATION,
    body=NEW_METADATA,
    answer=_CONVERSATION_OBJECT,
    others=_OTHERS,
)
DELETE_CONVERSATION = Operation(
    summary="Delete a conversation, but not its responses",
    tag=STORED,
    path=_CONVERSATION,
    answer=_deleted("conversation.deleted"),
    others=_OTHERS,
)
LIST_ITEMS = Operation(
    summary="List the items of a conversation",
    tag=STORED,
    path=_CONVERSATION,
    query=(*_page("desc"), _INCLUDED),
    answer=_ITEMS,
    others=_OTHERS,
)
ADD_ITEMS = Operation(
    summary="Add items to a conversation",
    tag=STORED,
    path=_CONVERSATION,
    body=MORE_ITEMS,
    answer=_ITEMS,
    others=_OTHERS,
)
GET_ITEM = Operation(
    summary="Return an item of a conversation", tag=STORED, path=_ITEM, answer=ANY_OBJECT, others=_OTHERS
)
DELETE_ITEM = Operation(
    summary="Delete an item of a conversation", tag=STORED, path=_ITEM, answer=_CONVERSATION_OBJECT, others=_OTHERS
)

LIST_CHATS = Operation(
    summary="List stored chat completions",
    tag=STORED,
    help="Only those with the given metadata, as in `metadata[key]=value`.",
    query=(*_page("asc"), BodyField(name="model", type=STRING, help="Only those of this model.")),
    answer=Named("StoredChats", _list_of(CHAT_OBJECT)),
    others=_UNAVAILABLE,
)
GET_CHAT = Operation(
    summary="Return a stored chat completion", tag=STORED, path=_CHAT, answer=CHAT_OBJECT, others=_OTHERS
)
UPDATE_CHAT = Operation(
    summary="Replace the metadata of a stored chat completion",
    tag=STORED,
    path=_CHAT,
    body=NEW_METADATA,
    answer=CHAT_OBJECT,
    others=_OTHERS,
)
DELETE_CHAT = Operation(
    summary="Delete a stored chat completion",
    tag=STORED,
    path=_CHAT,
    answer=_deleted("chat.completion.deleted"),
    others=_OTHERS,
)
LIST_MESSAGES = Operation(
    summary="List the messages of a stored chat completion",
    tag=STORED,
    path=_CHAT,
    query=(*_page("asc"), _INCLUDED),
    answer=_ITEMS,
    others=_OTHERS,
)
