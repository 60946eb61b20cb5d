"""What a request's API asks of the form of its response, for the writers of responses.

The readers of each API make the rules, `GenerationRequest` carries them. Names of tools are those that the chat
template shows.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

_OWN_GROUP = "functions"


@attrs.frozen
class NamespacedTool:
    """A tool of a group, as its client knows it."""

    namespace: str
    name: str

    @property
    def flat_name(self) -> str:
        """Return the name by which the model knows it. Codex puts its own tools into a group `functions`."""
        return self.name if self.namespace == _OWN_GROUP else f"{self.namespace}__{self.name}"


@attrs.frozen
class ReplyRules:
    """How calls and reasoning are written."""

    names_reasoning: bool = False
    """The message of a chat has the fields of reasoning even if there was none, as vLLM's does."""
    legacy_functions: bool = False
    """The client sent `functions`: a call is a `function_call` of the message."""
    custom_tools: frozenset[str] = frozenset()
    """Tools whose only argument, `input`, is free text; the client receives the text alone."""
    namespaces: Mapping[str, NamespacedTool] = attrs.field(factory=dict)
    """Tools of groups."""


NO_RULES = ReplyRules()
