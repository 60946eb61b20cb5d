"""Limits and checkpoints for reading a body, so that a long one does not block the event loop.

Every reader of a body has one `Pace`. It counts each message, part, tool and property, refuses too many of them, and
lets other tasks run every few hundred. Long bodies take turns: one proceeds in each iteration of the loop.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from ..http.turns import turn
from ..request.errors import bad_value
from .json_structure import MAX_CHAT_VALUES, MAX_CONTAINERS

MAX_MESSAGES = 20_000
"""Messages or input items of one request."""
MAX_PARTS = 20_000
"""Parts (blocks) of all messages of one request together."""
MAX_TOOLS = 2_048
MAX_PROPERTIES = 5_000
"""Properties in the schema of one tool, nested ones included."""
MAX_ALL_PROPERTIES = 65_536
"""The same of all tools of a request: it keeps the types of their arguments until it ends."""
ITEMS_A_TURN = 256
_SCHEMA_NODES_AN_ITEM = 16
_TOO_MANY = "too_many_items"


class Pace:
    """The progress of reading one body. Its checks raise APIError."""

    def __init__(self) -> None:
        self._num_parts = self._num_containers = self._num_values = self._num_properties = 0
        self._left = ITEMS_A_TURN
        self._has_turn = False

    async def __aenter__(self) -> Pace:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Release the turn, as needed before other work that takes turns."""
        if self._has_turn:
            self._has_turn = False
            turn().release()

    async def tick(self, num_items: int = 1) -> None:
        """Count items that have been read. A checkpoint from time to time."""
        self._left -= num_items
        if self._left <= 0:
            self._left = ITEMS_A_TURN
            self.rest()
            await turn().acquire()
            self._has_turn = True

    def check_messages(self, messages: list[Any], param: str) -> None:
        _check(len(messages), MAX_MESSAGES, param, "items")

    def check_parts(self, parts: list[Any], param: str) -> None:
        """Count the parts of one message."""
        self._num_parts += len(parts)
        if self._num_parts > MAX_PARTS:
            raise bad_value(param, f"all messages together must have at most {MAX_PARTS} parts", _TOO_MANY)

    def check_json_text(self, text: str, param: str) -> None:
        """Count what may become objects and arrays of `text` as JSON. Raises APIError if there are too many."""
        num_containers = text.count("{") + text.count("[")
        self._num_containers += num_containers
        self._num_values += num_containers + text.count(",")
        if self._num_containers > MAX_CONTAINERS or self._num_values > MAX_CHAT_VALUES:
            limits = f"{MAX_CONTAINERS} objects and arrays and {MAX_CHAT_VALUES} values"
            raise bad_value(param, f"all arguments together must have at most {limits}", _TOO_MANY)

    def check_tools(self, tools: Sized, param: str) -> None:
        _check(len(tools), MAX_TOOLS, param, "tools")

    async def schema(self, schema: dict[str, Any], param: str) -> None:
        """Count the properties of a tool's schema."""
        num_properties = num_nodes = 0
        waiting: list[Any] = [schema]
        while waiting:
            node = waiting.pop()
            num_nodes += 1
            if num_nodes % _SCHEMA_NODES_AN_ITEM == 0:
                await self.tick()
            if type(node) is list:
                waiting += [child for child in node if type(child) in (dict, list)]
                await self.tick(len(node) // _SCHEMA_NODES_AN_ITEM)
                continue
            properties = node.get("properties")
            if type(properties) is dict:
                num_properties += len(properties)
                _check(num_properties, MAX_PROPERTIES, param, "properties")
                self._num_properties += len(properties)
                _check(self._num_properties, MAX_ALL_PROPERTIES, param, "properties in all tools together")
            waiting += [child for child in node.values() if type(child) in (dict, list)]
            await self.tick(len(node) // _SCHEMA_NODES_AN_ITEM)


def _check(count: int, at_most: int, param: str, what: str) -> None:
    if count > at_most:
        raise bad_value(param, f"must have at most {at_most} {what}, got {count}", _TOO_MANY)
