"""What a request determines about the form of its response, beyond what its API always does.

The readers of requests (`openai/`, `anthropic/`) put a `ReplyRules` into the `GenerationRequest`; the writers of
responses follow it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen
class NamespacedTool:
    """A tool that its client knows by a namespace and a name."""

    namespace: str
    name: str


@attrs.frozen
class ReplyRules:
    legacy_functions: bool = False
    """A call is a `function_call` instead of one of the `tool_calls`."""
    custom_tools: frozenset[str] = frozenset()
    """Tools whose only argument, `input`, is a text that the client wants by itself."""
    namespaces: Mapping[str, NamespacedTool] = attrs.field(factory=dict)
    """Tools of namespaces, by the name that the model calls."""


NO_RULES = ReplyRules()
