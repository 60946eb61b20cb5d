"""The requests of a benchmark: asks, in conversations, in a workload.

A dataset makes a `Workload`; the load generator opens its conversations one after another. A conversation is built when
it is opened, so many long prompts take no memory before they are sent. Opening the same conversation of the same
workload twice gives the same asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs


class WorkloadError(Exception):
    """A dataset cannot be made from these flags or this file. The message names the flag or the line."""


@attrs.frozen
class Ask:
    """One request."""

    fields: dict[str, Any]
    """Its own fields of the body: `prompt` or `messages`, `max_tokens`, perhaps `tools` and `tool_choice`."""


@attrs.frozen
class Conversation:
    """Consecutive asks: each is sent when the previous one has been answered."""

    num_turns: int
    make_ask: Callable[[Sequence[str]], Ask]
    """Makes the next ask from the texts of the responses so far."""


def single(ask: Ask) -> Conversation:
    """Return a conversation of one turn."""
    return Conversation(1, lambda answers: ask)


@attrs.frozen
class Workload:
    num_conversations: int
    num_asks: int
    open: Callable[[int], Conversation]
    """Returns the conversation at an index, from 0."""
    arrivals_s: Sequence[float] | None = None
    """Start times of the conversations after the start of the run, if the dataset has them; non-decreasing."""
