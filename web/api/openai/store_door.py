"""The response store, as handlers use it: in turns that go round among tenants, with errors that clients understand."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.response_store import ResponseStore
from quipu.actors.response_store.stored import Kind, StoreUnavailable

from ...http.turns import FairTurns, TooManyWaiting
from ...request.errors import APIError, invalid, not_found, quoted, unavailable
from ...request.request_context import current_request_context

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_WAITING = 256
"""Requests of one tenant that wait for the store."""
FLAG = "--response-store TTL"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,160}")
_NAMES = {
    Kind.RESPONSE: ("Response", "response_id"),
    Kind.CONVERSATION: ("Conversation", "conversation_id"),
    Kind.CHAT: ("Chat completion", "completion_id"),
}


class StoreDoor:
    def __init__(self, store: ResponseStore) -> None:
        self.store = store
        self._turns = FairTurns(max_waiting=MAX_WAITING)
        self.locked: set[tuple[str, str]] = set()
        """Conversations, by tenant and id, that a response is extending."""

    async def call(self, work: Callable[[ObjectTables, *Ts], T], *args: *Ts) -> T:
        """Run a method of the tables for the current request. Raises APIError, and what the method raises."""
        try:
            async with self._turns.turn(current_request_context().principal.party):
                return await self.store.call(work, *args)
        except TooManyWaiting:
            raise unavailable("Too many of your requests wait for stored responses. Try again later.") from None
        except StoreUnavailable as error:
            raise store_unavailable(error) from None


def store_unavailable(error: StoreUnavailable) -> APIError:
    message = str(error)
    return unavailable(f"{message[:1].upper()}{message[1:]}.", "response_store_unavailable")


def is_stored_id(value: str) -> bool:
    """Return whether a client's text may be the id of something stored."""
    return _ID.fullmatch(value) is not None


def no_object(kind: Kind, object_id: str) -> APIError:
    """Return the error for an id that this tenant has not stored, whoever else has."""
    name, param = _NAMES[kind]
    return not_found(f"{name} {quoted(object_id)} was not found.", param, f"{kind}_not_found")


def no_item(item_id: str) -> APIError:
    return not_found(f"Item {quoted(item_id)} was not found.", "item_id", "item_not_found")


def needs_store(param: str) -> APIError:
    """Return the error for a field that refers to what this server does not store."""
    return invalid(
        f"Unsupported parameter: `{param}` needs stored responses, which this server does not keep. Its operator may "
        f"start it with {FLAG}.",
        param,
        "unsupported_parameter",
    )


def not_stored() -> APIError:
    """Return the error of a server that stores nothing."""
    message = (
        "This server does not store responses, so none can be retrieved, listed, cancelled or deleted. Its operator "
        f"may start it with {FLAG}."
    )
    return not_found(message, "response_id", "response_not_stored")
