"""The usage that a response states, whatever its API, as counts that can be compared.

A count is a whole number from 0 to 2^53. Everything else in its place (a negative number, a fraction, a text, true) is
a fault and no count. What is missing or null is None: it is not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

MAX_COUNT = 2**53
"""Beyond this, JSON's readers no longer agree about a number."""
_MAX_SHOWN = 40
_ELSEWHERE = ("prompt_cache_hit_tokens", "cached_tokens", "cache_read_input_tokens")
"""Names under which some servers say cached tokens, directly in `usage`."""


@attrs.frozen
class Said:
    """What one `usage` says."""

    prompt: int | None = None
    """All tokens of the prompt, cached ones included."""
    cached: int | None = None
    created: int | None = None
    completion: int | None = None
    where: str = ""
    """The name of the field with the cached tokens; empty if there is none."""
    faults: tuple[str, ...] = ()
    """What stands where a count should be."""


@attrs.define
class _Counts:
    """Reads counts, and keeps what was none."""

    faults: list[str] = attrs.field(factory=list)

    def read(self, values: Any, name: str) -> int | None:
        value = values.get(name) if isinstance(values, Mapping) else None
        if value is None:
            return None
        if type(value) is int and 0 <= value <= MAX_COUNT:
            return value
        self.faults.append(f"{name} is {shown(value)}")
        return None


def read_openai(usage: Mapping[str, Any]) -> Said:
    """Return what the usage of a chat, a completion or a response says."""
    counts = _Counts()
    kind = "input" if "input_tokens" in usage else "prompt"
    details = usage.get(f"{kind}_tokens_details")
    cached, where = counts.read(details, "cached_tokens"), f"{kind}_tokens_details.cached_tokens"
    if cached is None and not counts.faults:
        cached, where = _elsewhere(counts, usage)
    return Said(
        prompt=counts.read(usage, f"{kind}_tokens"),
        cached=cached,
        created=counts.read(details, "cache_write_tokens"),
        completion=counts.read(usage, "output_tokens" if kind == "input" else "completion_tokens"),
        where=where if cached is not None else "",
        faults=tuple(counts.faults),
    )


def read_messages(usage: Mapping[str, Any]) -> Said:
    """Return what the usage of a message says: its total is the sum of the three parts of the prompt."""
    counts = _Counts()
    rest = counts.read(usage, "input_tokens")
    cached = counts.read(usage, "cache_read_input_tokens")
    created = counts.read(usage, "cache_creation_input_tokens")
    return Said(
        prompt=None if rest is None else rest + (cached or 0) + (created or 0),
        cached=cached,
        created=created,
        completion=counts.read(usage, "output_tokens"),
        where="cache_read_input_tokens" if cached is not None else "",
        faults=tuple(counts.faults),
    )


def usages_of(api: str, payload: Any) -> Iterator[tuple[str, Said]]:
    """Yield each usage of a response or of an event of a stream, with the name of its event."""
    if not isinstance(payload, Mapping):
        return
    kind = payload.get("type")
    name = kind[:_MAX_SHOWN] if isinstance(kind, str) else ""
    places = [payload]
    if api in ("responses", "messages"):
        inner = payload.get("response" if api == "responses" else "message")
        places += [inner] if isinstance(inner, Mapping) else []
    for place in places:
        usage = place.get("usage")
        if isinstance(usage, Mapping) and usage:
            yield name, read_messages(usage) if api == "messages" else read_openai(usage)
        elif usage is not None and not isinstance(usage, Mapping):
            yield name, Said(faults=(f"usage is {shown(usage)}",))


def shown(value: Any) -> str:
    """Return a short text of a value from a server; of a container only its kind, which may be deep and large."""
    if isinstance(value, str | int | float | bool):
        return repr(value)[:_MAX_SHOWN]
    return "an object" if isinstance(value, Mapping) else "a list"


def _elsewhere(counts: _Counts, usage: Mapping[str, Any]) -> tuple[int | None, str]:
    for name in _ELSEWHERE:
        if (cached := counts.read(usage, name)) is not None:
            return cached, name
    return None, ""
