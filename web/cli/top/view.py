"""What `quipu top` shows at one time, and the words that its screen and its lines share. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from .figures import Cached, Figures, Reading


@attrs.frozen
class Outage:
    """The server does not answer."""

    since: str
    """The time of day."""
    reason: str


@attrs.frozen
class View:
    base_url: str
    time: str
    """The time of day of the reading, or of the attempt."""
    interval_s: float
    reading: Reading | None = None
    """The last one, which may be older than an outage."""
    figures: Figures | None = None
    """None if the server does not show its numbers to this key."""
    outage: Outage | None = None


def outage_words(outage: Outage) -> str:
    return f"not reachable since {outage.since}: {outage.reason}"


def rate_words(rate: float | None) -> str:
    """Return a number per second, a dash before there are two readings."""
    if rate is None:
        return "-/s"
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:.1f}/s"


def duration_words(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:,.0f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def share_words(cached: Cached) -> str:
    """Return a hit rate with the counts that it is made of, which are exact."""
    if cached.share is None:
        return "-"
    return f"{cached.share:.1%} ({cached.cached_tokens:,} of {cached.prompt_tokens:,})"


def used_share(figures: Figures) -> float:
    """Return the share of the KV blocks that requests or pins hold."""
    total = sum(figures.blocks.values())
    return (figures.blocks["used"] + figures.blocks["pinned"]) / total if total else 0.0


def rows_of(view: View) -> Iterator[tuple[str, str]]:
    """Yield the numbers: a title and a line each."""
    figures = view.figures
    if figures is None:
        return
    closed = [f"{name} {rate_words(figures.rate(count))}" for name, count in figures.requests.items()]
    running = f"running {figures.num_running:,}   waiting {figures.num_waiting:,}   open {figures.num_open:,}"
    yield "requests", "   ".join([running, *closed])
    tokens = {
        "prompt": figures.prompt_tokens,
        "computed": figures.computed_tokens,
        "generated": figures.generated_tokens,
    }
    yield "tokens", "   ".join(f"{name} {rate_words(figures.rate(count))}" for name, count in tokens.items())
    latencies = {"queue": figures.queue_s, "first token": figures.first_token_s, "between tokens": figures.gap_s}
    yield "latency", "   ".join(f"{name} {duration_words(seconds)}" for name, seconds in latencies.items())
    yield "cached", f"now {share_words(figures.lately)}   since the start {share_words(figures.since_start)}"
    if len(figures.by_tier) > 1:
        yield "from tiers", "   ".join(f"{tier} {count:,}" for tier, count in figures.by_tier.items())
    blocks = "   ".join(f"{state} {count:,}" for state, count in figures.blocks.items())
    yield "KV blocks", f"{used_share(figures):.1%} in use   {blocks}"
    for tier, states in figures.tiers.items():
        yield f"{tier} tier", "   ".join(f"{state} {count:,}" for state, count in states.items())
    troubles = {"disputed accounts": figures.num_disputed, "deaths of engines": figures.num_deaths}
    engines = f"{figures.engines_ready} of {figures.engines_desired} ready"
    yield "engines", "   ".join([engines, *(f"{name} {count:,}" for name, count in troubles.items() if count)])


def line_of(view: View) -> str:
    """Return one line for a log or a pipe."""
    if view.outage is not None:
        return f"{view.time}  {outage_words(view.outage)}"
    figures = view.figures
    if figures is None:
        state = view.reading.state if view.reading is not None else "unknown"
        return f"{view.time}  {state}  {' '.join(view.reading.refusals) if view.reading is not None else ''}".rstrip()
    is_first = figures.period_s is None
    cached = f"{share_words(figures.since_start)} since the start" if is_first else share_words(figures.lately)
    return "  ".join(
        [
            view.time,
            f"running {figures.num_running:,}",
            f"waiting {figures.num_waiting:,}",
            f"prompt {rate_words(figures.rate(figures.prompt_tokens))}",
            f"generated {rate_words(figures.rate(figures.generated_tokens))}",
            f"cached {cached}",
            f"KV {used_share(figures):.1%}",
            f"engines {figures.engines_ready}/{figures.engines_desired}",
            *(["the server has restarted"] if figures.has_restarted else []),
        ]
    )


def document_of(view: View) -> dict[str, Any]:
    """Return everything for programs, as JSON has it."""
    reading = view.reading
    return {
        "object": "quipu.top",
        "url": view.base_url,
        "time": view.time,
        "reachable": view.outage is None,
        "error": None if view.outage is None else view.outage.reason,
        "state": None if reading is None else reading.state,
        "detail": None if reading is None else reading.detail,
        "numbers": None if view.figures is None else attrs.asdict(view.figures),
        "engines": None if reading is None else reading.engines,
        "upstreams": [] if reading is None else reading.upstreams,
        "tenants": None if reading is None else [_without_series(row) for row in reading.tenants or ()],
        "refused": [] if reading is None else reading.refusals,
    }


def _without_series(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name in ("tenant", "model", *COUNTS)}


COUNTS = ("requests", "prompt_tokens", "cached_tokens")
