"""`tools` of a response: functions, custom tools and groups of both, as the chat template shows them.

    function     a function
    custom       a function whose only argument, `input`, is the text that the client is to receive
    namespace    each tool of the group, under a name that has the group's
    any other    skipped and reported to the client: it is carried out by OpenAI's server, or has no meaning here

Agents also send tools as items of the input (`additional_tools`), so `responses_input.py` adds to the same set.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from ..generation import NamespacedTool, ReplyRules
from ..pace import Pace
from ..tool_set import ToolSet, read_name

_FREE_TEXT: Mapping[str, Any] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class ResponseTools(ToolSet):
    def __init__(self, pace: Pace) -> None:
        super().__init__(pace)
        self._custom: set[str] = set()
        self._namespaces: dict[str, NamespacedTool] = {}

    def reply_rules(self) -> ReplyRules:
        return ReplyRules(custom_tools=frozenset(self._custom), namespaces=self._namespaces)

    async def read(self, fields: Fields, namespace: str | None = None, *, skip_known: bool = False) -> None:
        """Read the `tools` of a request, a group or an item. Raises APIError.

        `skip_known`: a tool whose name is known already is not an error.
        """
        for entry in fields.objects("tools", "a list of tools", self._pace.check_tools):
            kind = entry.text("type")
            if kind in ("function", "custom"):
                await self._add(entry, namespace, is_custom=kind == "custom", skip_known=skip_known)
            elif kind == "namespace" and namespace is None:
                await self._pace.tick()
                await self.read(entry, read_name(entry), skip_known=skip_known)
            else:
                await self.skip(entry.path)

    async def _add(self, tool: Fields, namespace: str | None, *, is_custom: bool, skip_known: bool) -> None:
        name = read_name(tool)
        if namespace is not None:
            grouped = NamespacedTool(namespace, name)
            name = grouped.flat_name
            self._namespaces[name] = grouped
        if skip_known and name in self:
            await self._pace.tick()
            return
        if is_custom:
            self._custom.add(name)
            description, schema, is_strict = _describe_custom(tool), _FREE_TEXT, False
        else:
            is_strict = self.read_strict(tool)
            description, schema = tool.get("description"), await self.read_schema(tool)
        function = {"name": name, **({"description": description} if description else {}), "parameters": schema}
        shown = {"type": "function", "function": function}
        await self.add(name, tool.param("name"), shown, schema, tool.param("parameters"), is_strict=is_strict)


def _describe_custom(tool: Fields) -> str:
    description = tool.get("description") or ""
    form = tool.fields("format")
    if form.get("definition") is None:
        return description
    syntax, definition = form.text("syntax"), form.text("definition")
    return f"{description}\n\nThe input must match this grammar ({syntax}):\n{definition}".lstrip("\n")
