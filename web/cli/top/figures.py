"""The numbers that `quipu top` shows, made of two readings of a server. Pure functions, without a terminal.

Those of a period are differences of the server's counters, which are exact; a rate divides one by the seconds between
the readings, and nothing else is rounded or smoothed.
"""

from __future__ import annotations

from typing import Any, Final

import attrs

from quipu.actors.messages.outcomes import Outcome

from .metric_samples import Samples, growth

BLOCK_STATES: Final = ("used", "pinned", "cached", "free")
LOWER_TIERS: Final = ("host", "disk", "remote")
_OUTCOMES: Final = tuple(map(str, Outcome))


Rows = tuple[dict[str, Any], ...]


@attrs.frozen
class Reading:
    """What a server has answered at one time. What it refused, or did not answer, is None."""

    at_s: float
    """By a clock that never jumps."""
    state: str
    """As in `GET /health`."""
    detail: str = ""
    samples: Samples | None = None
    engines: Rows | None = None
    upstreams: Rows = ()
    tenants: Rows | None = None
    """Rows of `GET /v1/cache/stats`, the last used first."""
    tenants_window_s: float = 0.0
    refusals: tuple[str, ...] = ()
    """Why something is missing, for the reader."""


@attrs.frozen
class Cached:
    """Prompt tokens of which it is known how many were cached, and those that were."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None


@attrs.frozen
class Figures:
    """The numbers of one screen."""

    num_running: int
    num_waiting: int
    num_open: int
    """Accounts that are not closed yet, those included whose client has left."""
    period_s: float | None
    """The time between the readings; None of the first one, which has no rates."""
    requests: dict[str, int]
    """Closed in the period, by outcome."""
    requests_total: dict[str, int]
    prompt_tokens: int
    """Of the prompts that were admitted in the period."""
    computed_tokens: int
    """Of those, the ones that were not cached."""
    generated_tokens: int
    """Streamed in the period: the first of each answer, and all that followed."""
    lately: Cached
    """In the period."""
    since_start: Cached
    by_tier: dict[str, int]
    """Cached tokens since the start by the tier that had them."""
    first_token_s: float | None
    """Mean in the period, from receipt."""
    gap_s: float | None
    """Mean in the period, between two tokens."""
    queue_s: float | None
    blocks: dict[str, int]
    tiers: dict[str, dict[str, int]]
    """Blocks of the tiers below the device, used and free."""
    engines_ready: int
    engines_desired: int
    num_disputed: int
    num_deaths: int
    has_restarted: bool
    """The server has been started anew since the reading before."""

    def rate(self, amount: float) -> float | None:
        """Return an amount of the period per second."""
        return amount / self.period_s if self.period_s else None


def make_figures(before: Reading | None, now: Reading) -> Figures | None:
    """Return the numbers, or None if the server does not show its metrics."""
    samples = now.samples
    if samples is None:
        return None
    old = None if before is None else before.samples
    is_first = before is None or old is None

    def grown(name: str, **labels: str) -> float:
        return 0.0 if old is None else growth(old, samples, name, **labels)

    def mean(name: str) -> float | None:
        count = grown(f"{name}_count")
        return grown(f"{name}_sum") / count if count else None

    queried, hits = grown("prefix_cache_queries_total"), grown("prefix_cache_hits_total")
    return Figures(
        num_running=int(samples.total("num_requests_running")),
        num_waiting=int(samples.total("num_requests_waiting")),
        num_open=int(samples.total("open_accounts")),
        period_s=None if is_first or before is None else max(now.at_s - before.at_s, 1e-3),
        requests={outcome: int(grown("requests_total", outcome=outcome)) for outcome in _OUTCOMES},
        requests_total={outcome: int(samples.total("requests_total", outcome=outcome)) for outcome in _OUTCOMES},
        prompt_tokens=int(grown("prompt_tokens_total")),
        computed_tokens=int(grown("prompt_tokens_total") - hits),
        # the counter of generated tokens grows when requests close; these two grow with each token
        generated_tokens=int(grown("time_to_first_token_seconds_count") + grown("inter_token_latency_seconds_count")),
        lately=Cached(int(queried), int(hits)),
        since_start=Cached(
            int(samples.total("prefix_cache_queries_total")), int(samples.total("prefix_cache_hits_total"))
        ),
        by_tier={tier: int(samples.total("cached_tokens_total", tier=tier)) for tier in _tiers_of(samples)},
        first_token_s=mean("time_to_first_token_seconds"),
        gap_s=mean("inter_token_latency_seconds"),
        queue_s=mean("request_queue_seconds"),
        blocks={state: int(samples.total("kv_blocks", state=state)) for state in BLOCK_STATES},
        tiers={
            tier: {state: int(samples.total("kv_tier_blocks", tier=tier, state=state)) for state in ("used", "free")}
            for tier in LOWER_TIERS
            if tier in samples.values("tier", "kv_tier_blocks")
        },
        engines_ready=int(samples.total("engines_ready")),
        engines_desired=int(samples.total("engines_desired")),
        num_disputed=int(samples.total("usage_disputed_total")),
        num_deaths=int(samples.total("engine_deaths_total")),
        has_restarted=old is not None and old.server != samples.server,
    )


def _tiers_of(samples: Samples) -> list[str]:
    """Return the tiers that cached tokens came from, the device first."""
    found = samples.values("tier", "cached_tokens_total")
    return sorted((tier for tier in found if samples.total("cached_tokens_total", tier=tier)), key=_rank)


def _rank(tier: str) -> tuple[int, str]:
    known = ("device", *LOWER_TIERS)
    return (known.index(tier) if tier in known else len(known), tier)
