"""Going through what may be long in a body, without holding the event loop and without end.

Every reader of a body has one `Pace`: it is told of each message, part, tool and property, refuses more of them than
one request may have, and lets other tasks run every few hundred. Of all long bodies that are being read, one goes on in
each round of the loop (`turns.py`).
"""

from __future__ import annotations

from typing import Any

from ..http.turns import turn
from ..request.errors import bad_value
from .json_structure import MAX_CHAT_VALUES, MAX_CONTAINERS

MAX_MESSAGES = 20_000
"""Messages, or input items, of one request."""
MAX_PARTS = 20_000
"""Parts (blocks) of all messages of one request together."""
MAX_TOOLS = 2_048
MAX_PROPERTIES = 5_000
"""Properties in the schema of one tool, nested ones included."""
ITEMS_A_TURN = 256
_SCHEMA_NODES_AN_ITEM = 16
_TOO_MANY = "too_many_items"


class Pace:
    """What has been read of one body."""

    def __init__(self) -> None:
        self._num_parts = self._num_containers = self._num_values = 0
        self._left = ITEMS_A_TURN
        self._has_turn = False

    async def __aenter__(self) -> Pace:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.rest()

    def rest(self) -> None:
        """Give the turn back, before something else that takes turns is done."""
        if self._has_turn:
            self._has_turn = False
            turn().release()

    async def tick(self, num_items: int = 1) -> None:
        """So many items have been read. A checkpoint from time to time."""
        self._left -= num_items
        if self._left <= 0:
            self._left = ITEMS_A_TURN
            self.rest()
            await turn().acquire()
            self._has_turn = True

    def check_messages(self, messages: list[Any], param: str) -> None:
        """Raises APIError where there are too many."""
        _check(len(messages), MAX_MESSAGES, param, "items")

    def check_parts(self, parts: list[Any], param: str) -> None:
        """Count the parts of one message. Raises APIError where the request has too many."""
        self._num_parts += len(parts)
        if self._num_parts > MAX_PARTS:
            raise bad_value(param, f"all messages together must have at most {MAX_PARTS} parts", _TOO_MANY)

    def check_written(self, text: str, param: str) -> None:
        """Count what may become objects and lists of a text that is JSON. Raises APIError where it is too much."""
        num_containers = text.count("{") + text.count("[")
        self._num_containers += num_containers
        self._num_values += num_containers + text.count(",")
        if self._num_containers > MAX_CONTAINERS or self._num_values > MAX_CHAT_VALUES:
            limits = f"{MAX_CONTAINERS} objects and arrays and {MAX_CHAT_VALUES} values"
            raise bad_value(param, f"all arguments together must have at most {limits}", _TOO_MANY)

    def check_tools(self, tools: list[Any], param: str) -> None:
        """Raises APIError where there are too many."""
        _check(len(tools), MAX_TOOLS, param, "tools")

    async def schema(self, schema: dict[str, Any], param: str) -> None:
        """Go through a tool's schema. Raises APIError where it has too many properties."""
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
            waiting += [child for child in node.values() if type(child) in (dict, list)]
            await self.tick(len(node) // _SCHEMA_NODES_AN_ITEM)


def _check(count: int, at_most: int, param: str, what: str) -> None:
    if count > at_most:
        raise bad_value(param, f"must have at most {at_most} {what}, got {count}", _TOO_MANY)
