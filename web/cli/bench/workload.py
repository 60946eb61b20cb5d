"""The requests of a benchmark: asks, in conversations, in a workload.

A dataset makes a `Workload`; the load generator opens its conversations one after another. An ask is made when it is
about to be sent, so many long prompts take no memory before that, and making it again gives the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs


class WorkloadError(Exception):
    """A dataset cannot be made from these flags or this file. The message names the flag or the line."""


@attrs.frozen
class Ask:
    fields: dict[str, Any]
    """Its own fields of the body: `prompt` or `messages`, `max_tokens`, perhaps `tools` and `tool_choice`."""


@attrs.frozen
class Conversation:
    """Consecutive asks: each is sent when the previous one has been answered."""

    num_turns: int
    make_ask: Callable[[Sequence[str]], Ask]


@attrs.frozen
class Workload:
    num_conversations: int
    num_asks: int
    open: Callable[[int], Conversation]
    arrivals_s: Sequence[float] | None = None
    """Start times of the conversations after the start of the run, if the dataset has them; non-decreasing."""


def single_turns(num: int, ask: Callable[[int], Ask], arrivals_s: Sequence[float] | None = None) -> Workload:
    """Return a workload of conversations of one turn, `ask(index)`."""
    return Workload(num, num, lambda place: Conversation(1, lambda answers: ask(place)), arrivals_s)
