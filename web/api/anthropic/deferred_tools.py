"""Tools with `defer_loading`: the model is shown one where a search has found it, not with the others.

A client that searches by itself, as Claude Code does, gets its search called like any tool. The result has a
`tool_reference` for each tool found, whose definition is in `tools` from then on; a `tool_addition` in a message does
the same without a search. Either is rendered as the tool's definition, in the form in which chat templates get it.

What must always hold: a deferred tool changes nothing of the prompt before the block that names it, so that what is
cached of a conversation stays cached; each definition is written once, so that no prompt is longer than its request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from ..fields import Fields
from ..output_grammar import check_size
from ..pace import Pace

SEARCH_OF_SERVERS = "tool_search_tool_"
"""Begins the types of Anthropic's own search, which finds nothing here: a request with it has no deferred tools."""


class DeferredTools:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._unseen: dict[str, tuple[Mapping[str, Any], str]] = {}
        """Each tool in the form that chat templates expect, with its path."""
        self._seen: set[str] = set()

    def add(self, name: str, tool: Mapping[str, Any], path: str) -> None:
        self._unseen[name] = tool, path

    def are_named(self, block: Fields) -> bool:
        """Return whether a block names one of these tools."""
        name = _name_in(block)
        return name in self._unseen or name in self._seen

    async def describe(self, block: Fields) -> str:
        """Return the definition of the tool that a block names, or its name from the second time on.

        Raises APIError if the definition is too large to be written.
        """
        name = _name_in(block)
        assert name is not None
        if name in self._seen:
            return name
        tool, path = self._unseen.pop(name)
        self._seen.add(name)
        await check_size(tool, path, self._pace)
        return orjson.dumps(tool).decode()


def _name_in(block: Fields) -> str | None:
    reference: Any = None
    match block.get("type"):
        case "tool_reference":
            reference = block.get("tool_name")
        case "tool_addition" if type(tool := block.get("tool")) is dict and tool.get("type") == "tool_reference":
            reference = tool.get("name", tool.get("tool_name"))
    return reference if type(reference) is str else None
