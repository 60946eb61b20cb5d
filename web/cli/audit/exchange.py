"""One request of an audit, and what came back: values without behaviour of the network.

`Ask` is what is sent, `Exchange` how it ended. Every request ends as one exchange; a failure is part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .drawn_prompts import Prompt
from .said_usage import Said

PATHS: Mapping[str, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
"""The APIs that can be audited, and their endpoints."""
REFUSALS = frozenset(f"http_{status}" for status in (400, 404, 405, 422, 501))


@attrs.frozen
class Ask:
    api: str
    prompts: tuple[Prompt, ...]
    is_stream: bool = False
    max_tokens: int = 4
    fields: Mapping[str, Any] = attrs.field(factory=dict)
    """More fields of the body."""
    uses_other_key: bool = False
    leaves: bool = False
    """Close the connection once the first output has come."""


@attrs.frozen
class Failure:
    kind: str
    """`http_400`, `timeout`, `connect`, `too_large`, `not_json`, `budget`, …"""
    message: str = ""


@attrs.frozen
class Exchange:
    ask: Ask
    failure: Failure | None = None
    usages: tuple[tuple[str, Said], ...] = ()
    """Every usage that came, in order, with the name of its event: a stream should have one."""
    num_bare_outputs: int = 0
    """Events of a stream with output and without usage: if there are any, it has no running count."""
    num_choices: int = 0
    took_s: float = 0.0
    first_output_s: float | None = None
    """From sending to the first output, of a stream."""
    ignored: str = ""
    """The fields that the server says it ignored."""

    @property
    def said(self) -> Said:
        """What the usage says that came last; nothing if there was none.

        The two events of a stream of messages are one: what the last leaves out, the first has said.
        """
        last = self.usages[-1][1] if self.usages else Said()
        if self.ask.api != "messages" or len(self.usages) < 2:
            return last
        first = self.usages[0][1]
        if last.prompt is not None and (last.cached is not None or first.cached is None):
            return last
        return attrs.evolve(first, completion=last.completion, faults=last.faults)

    @property
    def prompt(self) -> int | None:
        return self.said.prompt

    @property
    def cached(self) -> int | None:
        return self.said.cached

    @property
    def is_answered(self) -> bool:
        return self.failure is None

    @property
    def is_refused(self) -> bool:
        """Whether the server said that it does not take such a request."""
        return self.failure is not None and self.failure.kind in REFUSALS
