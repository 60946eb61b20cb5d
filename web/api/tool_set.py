"""The tools of one request, as the readers of each API collect them.

A tool is shown to the model by the chat template, and may be called by its name. What must always hold: names are
unique, and every schema has been counted (`pace.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from quipu.actors.grammars.call_grammar import GrammarTool
from quipu.actors.grammars.tool_types import types_by_property
from quipu.actors.messages.output import ArgumentTypes, OutputRules

from ..request.errors import bad_value
from .body_shapes import MAX_NAME_CHARS
from .fields import Fields, wrong_type
from .pace import Pace

_ITEMS_A_PROPERTY = 8
"""Finding the types of a property takes at worst as long as reading this many parts of a message."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")


class ToolSet:
    def __init__(self, pace: Pace) -> None:
        self.unused: list[str] = []
        """Paths of tools that were skipped, and of their fields without effect."""
        self._pace = pace
        self.shown: list[Mapping[str, Any]] = []
        """In the form that chat templates expect."""
        self._types: dict[str, dict[str, tuple[str, ...]]] = {}
        self.held: list[GrammarTool] = []
        """As grammars know them: those that are strict are held to their schemas."""
        self._strict: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._types

    async def read_schema(self, function: Fields, field: str = "parameters") -> Mapping[str, Any]:
        """Return a tool's schema, or an empty one. Raises APIError."""
        schema, param = function.get(field), function.param(field)
        if schema is None:
            return {}
        if type(schema) is not dict:
            raise wrong_type(param, "an object")
        await self._pace.schema(schema, f"{param}.properties")
        return schema

    def read_strict(self, function: Fields) -> bool:
        """Return `strict`: whether calls match the tool's schema. Raises APIError."""
        is_strict = function.flag("strict")
        if is_strict:
            self._strict.append(function.param("strict"))
        return is_strict

    def note_strict(self) -> None:
        """Note that no call is held to a schema, so that `strict` has no effect."""
        self.unused += self._strict

    async def add(
        self,
        name: str,
        param: str,
        tool: Mapping[str, Any],
        schema: Mapping[str, Any],
        schema_param: str,
        *,
        is_strict: bool = False,
        is_shown: bool = True,
    ) -> None:
        """Add a tool whose name comes from the field `param`. Raises APIError if another one has this name.

        `is_shown`: the template shows it; any tool may be called.
        """
        if name in self._types:
            raise bad_value(param, "must be unique, but another tool has the same name")
        if is_shown:
            self.shown.append(tool)
        self._pace.check_tools(self.shown, param)
        types = self._types[name] = {}
        self.held.append(GrammarTool(name, schema, schema_param, param, is_strict, is_strict))
        await self._pace.tick()
        for key, allowed in types_by_property(schema):
            if allowed:
                types[key] = allowed
            await self._pace.tick(_ITEMS_A_PROPERTY)

    async def skip(self, where: str) -> None:
        """Note that the tool at this path has no meaning here."""
        self.unused.append(where)
        await self._pace.tick()

    def rules(self, callable_names: Collection[str] | None, *, one_call: bool) -> OutputRules:
        """Return how the output is read. `callable_names`: what may be called; None means every tool."""
        types: Mapping[str, ArgumentTypes] = self._types
        if callable_names is not None:
            types = {name: types[name] for name in types if name in callable_names}
        return OutputRules(tool_types=types, max_calls=1 if one_call else None)


def read_name(function: Fields) -> str:
    """Return a tool's name, and check its description. Raises APIError."""
    name = function.text("name")
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        allowed = f"must have between 1 and {MAX_NAME_CHARS} characters, each a letter, a digit, `_`, `-` or `.`"
        raise bad_value(function.param("name"), allowed)
    function.optional_text("description")
    return name
