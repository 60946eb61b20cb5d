"""The usage that an upstream reports: which numbers are plausible, and what the client is told.

Pure. All other fields (`audio_tokens`, unknown fields, a 0) are left unchanged.

What must always hold: an impossible number is treated as if it had not been reported, and is never corrected; the
client is told the same numbers as are recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import msgspec

from ...messages.counts import MAX_COUNT, UNKNOWN, Count, Known
from ...messages.upstream import UpstreamUsage

MAX_SAID_CHARS = 1024
"""Number of characters of the reported usage that are kept."""
PROMPT_DETAILS = "prompt_tokens_details"
COMPLETION_DETAILS = "completion_tokens_details"


Path = tuple[str, ...]

CACHED: tuple[Path, ...] = (
    (PROMPT_DETAILS, "cached_tokens"),
    ("prompt_cache_hit_tokens",),  # DeepSeek
    ("cached_tokens",),  # Moonshot
    ("cache_read_input_tokens",),  # gateways in front of Anthropic's API
    (PROMPT_DETAILS, "cache_read_input_tokens"),
)
"""Fields that may report the number of cached tokens. All that are present have to agree."""
WRITTEN: tuple[Path, ...] = (
    (PROMPT_DETAILS, "cache_write_tokens"),
    ("cache_creation_input_tokens",),
    (PROMPT_DETAILS, "cache_creation_input_tokens"),
    (PROMPT_DETAILS, "cache_creation_tokens"),
)


@attrs.define
class _Reading:
    """The state of reading one usage object."""

    said: dict[str, Any]
    problems: list[str] = attrs.field(factory=list)

    def count(self, value: object, name: str, limit: Count = UNKNOWN, of_what: str = "") -> Count:
        """Return a reported number, if it is possible."""
        if value is None:
            return UNKNOWN
        if type(value) is not int or not 0 <= value <= MAX_COUNT:
            self.problems.append(f"{name} is no number of tokens")
            return UNKNOWN
        if isinstance(limit, Known) and value > limit.n:
            self.problems.append(f"{name} {value} of {limit.n} {of_what}")
            return UNKNOWN
        return Known(value)

    def of_prompt(self, places: Sequence[Path], prompt: Count) -> Count:
        """Return a number of prompt tokens that may be reported in several fields."""
        name = places[0][-1]
        values = [value for place in places if (value := _at(self.said, place)) is not None]
        counts = [self.count(value, name, prompt, "prompt tokens") for value in values]
        if len(set(counts)) > 1 and UNKNOWN not in counts:
            self.problems.append(f"several numbers of {name}")
            return UNKNOWN
        return UNKNOWN if UNKNOWN in counts or not counts else counts[0]


def read_usage(said: object) -> UpstreamUsage:
    """Return the usage in a parsed usage object."""
    if not isinstance(said, dict):
        return UpstreamUsage(problems=() if said is None else ("usage is no object",))
    reading = _Reading(said)
    prompt = reading.count(said.get("prompt_tokens"), "prompt_tokens")
    completion = reading.count(said.get("completion_tokens"), "completion_tokens")
    cached, written = reading.of_prompt(CACHED, prompt), reading.of_prompt(WRITTEN, prompt)
    if not isinstance(prompt, Known):
        cached = written = UNKNOWN
    elif isinstance(cached, Known) and isinstance(written, Known) and (cached + written).n > prompt.n:
        reading.problems.append(f"{cached.n} tokens cached and {written.n} written of {prompt.n} prompt tokens")
        cached = written = UNKNOWN
    reasoning = reading.count(
        _details(said, COMPLETION_DETAILS).get("reasoning_tokens"), "reasoning_tokens", completion, "completion tokens"
    )
    text = msgspec.json.encode(said).decode()
    return UpstreamUsage(
        prompt=prompt,
        cached=cached,
        cache_write=written,
        completion=completion,
        reasoning_tokens=reasoning.n if isinstance(reasoning, Known) and isinstance(completion, Known) else 0,
        said=text if len(text) <= MAX_SAID_CHARS and text.isascii() else None,
        problems=tuple(reading.problems),
    )


def told_usage(said: dict[str, Any], usage: UpstreamUsage, estimate: int | None) -> dict[str, Any] | None:
    """Return the usage object for the client; None if the client gets none.

    Numbers reported under another name are added under OpenAI's. `estimate`: cached tokens that a router expected, for
    a client that has asked for it and an upstream that does not report them.
    """
    if not isinstance(usage.prompt, Known) or not isinstance(usage.completion, Known):
        return None if usage.problems else said
    told = dict(said)
    details = dict(_details(said, PROMPT_DETAILS))
    for places, count in ((CACHED, usage.cached), (WRITTEN, usage.cache_write)):
        values = [_at(said, place) for place in places]
        if isinstance(count, Known):
            details[places[0][-1]] = count.n
        elif any(value is not None for value in values):
            for *inside, name in places:
                (details if inside else told).pop(name, None)
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


def _at(said: dict[str, Any], place: Path) -> object:
    """Return the value at a path; None if there is none."""
    *inside, name = place
    return (_details(said, inside[0]) if inside else said).get(name)


def _details(said: dict[str, Any], name: str) -> dict[str, Any]:
    details = said.get(name)
    return details if isinstance(details, dict) else {}
