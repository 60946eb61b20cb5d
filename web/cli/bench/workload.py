"""What is asked of a server: asks, in conversations, in a workload.

Datasets make a `Workload`; the load generator opens its conversations one after another. A conversation is built when
it is opened, so a workload of many long prompts takes no room before they are sent. Opening the same conversation of
the same workload twice gives the same asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs


class WorkloadError(Exception):
    """A dataset cannot be made from these flags or this file. The message names the flag, or the file's line."""


@attrs.frozen
class Ask:
    """One request."""

    fields: dict[str, Any]
    """Its own part of the body: `prompt` or `messages`, `max_tokens`, perhaps `tools` and `tool_choice`."""


@attrs.frozen
class Conversation:
    """Asks that follow one another: the next is sent when the one before it has been answered."""

    num_turns: int
    make_ask: Callable[[Sequence[str]], Ask]
    """From the texts of the answers so far to the next ask."""


def single(ask: Ask) -> Conversation:
    """A conversation of one turn."""
    return Conversation(1, lambda answers: ask)


@attrs.frozen
class Workload:
    num_conversations: int
    num_asks: int
    open: Callable[[int], Conversation]
    """The conversation of a place, from 0."""
    arrivals_s: Sequence[float] | None = None
    """When each begins after the start of the run, where the dataset says so; never falling."""
