"""The usage that an upstream reports: what of it can be believed, and how its client sees it.

Pure. Whatever else an upstream says of a request (`audio_tokens`, a field that nobody here knows, a 0) stays as it is.

What must always hold: a number that cannot be is treated as if it had not been said, and is never corrected; what a
client is told agrees with what is booked.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from ..messages.counts import UNKNOWN, Count, Known
from ..messages.upstream import ForeignUsage

MAX_TOKENS = 2**53 - 1
"""Of any count: no more can be told to every client."""
MAX_SAID_CHARS = 1024
"""What is kept of what was said."""
PROMPT_DETAILS = "prompt_tokens_details"
COMPLETION_DETAILS = "completion_tokens_details"


@attrs.define
class _Reading:
    """One usage object that is being read."""

    problems: list[str] = attrs.field(factory=list)

    def count(self, value: object, name: str, limit: Count = UNKNOWN, of_what: str = "") -> Count:
        """Return a number that was said, if it can be."""
        if value is None:
            return UNKNOWN
        if type(value) is not int or not 0 <= value <= MAX_TOKENS:
            self.problems.append(f"{name} is no number of tokens")
            return UNKNOWN
        if isinstance(limit, Known) and value > limit.n:
            self.problems.append(f"{name} {value} of {limit.n} {of_what}")
            return UNKNOWN
        return Known(value)


def read_usage(said: object) -> ForeignUsage:
    """Return what a usage object, as it was parsed, says."""
    if not isinstance(said, dict):
        return ForeignUsage(problems=() if said is None else ("usage is no object",))
    reading = _Reading()
    prompt = reading.count(said.get("prompt_tokens"), "prompt_tokens")
    completion = reading.count(said.get("completion_tokens"), "completion_tokens")
    of_prompt, of_completion = _details(said, PROMPT_DETAILS), _details(said, COMPLETION_DETAILS)
    cached = reading.count(of_prompt.get("cached_tokens"), "cached_tokens", prompt, "prompt tokens")
    written = reading.count(of_prompt.get("cache_write_tokens"), "cache_write_tokens", prompt, "prompt tokens")
    reasoning = reading.count(
        of_completion.get("reasoning_tokens"), "reasoning_tokens", completion, "completion tokens"
    )
    is_counted = isinstance(prompt, Known)
    text = msgspec.json.encode(said).decode()
    return ForeignUsage(
        prompt=prompt,
        cached=cached if is_counted else UNKNOWN,
        cache_write=written if is_counted else UNKNOWN,
        completion=completion,
        reasoning_tokens=reasoning.n if isinstance(reasoning, Known) and isinstance(completion, Known) else 0,
        said=text if len(text) <= MAX_SAID_CHARS and text.isascii() else None,
        problems=tuple(reading.problems),
    )


def told_usage(said: dict[str, Any], usage: ForeignUsage, estimate: int | None) -> dict[str, Any] | None:
    """Return a usage object as a client is told it, None if it is told nothing.

    `estimate`: what a router expected to be cached, for a client that has asked and an upstream that does not count.
    """
    if not isinstance(usage.prompt, Known) or not isinstance(usage.completion, Known):
        return None if usage.problems else said
    told = dict(said)
    details = dict(_details(said, PROMPT_DETAILS))
    for name, count in (("cached_tokens", usage.cached), ("cache_write_tokens", usage.cache_write)):
        if details.get(name) is not None and not isinstance(count, Known):
            del details[name]
    if estimate is not None and not isinstance(usage.cached, Known):
        details["cached_tokens_estimate"] = estimate
    if details != _details(said, PROMPT_DETAILS):
        told[PROMPT_DETAILS] = details
    reasoning = _details(said, COMPLETION_DETAILS).get("reasoning_tokens")
    if reasoning is not None and reasoning != usage.reasoning_tokens:
        told[COMPLETION_DETAILS] = {
            name: value for name, value in said[COMPLETION_DETAILS].items() if name != "reasoning_tokens"
        }
    return told


def _details(said: dict[str, Any], name: str) -> dict[str, Any]:
    details = said.get(name)
    return details if isinstance(details, dict) else {}
