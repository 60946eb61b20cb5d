"""What an audit finds: checks, trials of them, and the verdict that trials add up to.

A verdict is `false` only if no truthful server could have answered so: eviction, other clients, several replicas,
caches that promise nothing and retries by a gateway explain a count that is too small, and one that is too large now
and then. What they could explain is `unknown`, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import attrs

from .exchange import Exchange

ENOUGH = 4
"""So many trials, each with prompts of its own, have to fail before a server is accused: all that are made."""

CHECKS: Mapping[str, str] = {
    "reported": "the usage of a repeated prompt has cached tokens",
    "zero": "0 is said of a new prompt, not left out",
    "cold": "no more of a new prompt is said to be cached than a chat template has",
    "counts": "each count is a whole number, and no more is cached than the prompt has",
    "total": "the prompt has as many tokens when it is cached as when it is not",
    "warm": "a repeated prompt is said to be cached",
    "blocks": "what is cached is whole blocks, or single tokens",
    "prefix": "no more is said to be cached than the common prefix of two prompts",
    "once": "a stream says its usage once",
    "streamed": "a stream says as much as a whole response",
    "apis": "the same prompt has the same count in each API",
    "stop": "a stop string changes nothing",
    "max_tokens": "`max_tokens: 1` changes nothing",
    "choices": "with n = 2 the prompt is counted once",
    "list": "the prompts of a list are added up",
    "parallel": "counts hold while requests run in parallel",
    "disconnect": "counts hold after a client has left",
    "refused": "nothing of a prompt is cached that was only refused",
    "salt": "prompts with another `cache_salt` are kept apart",
    "key": "prompts of another key are kept apart",
    "pressure": "no more is said to be cached once others have filled the cache",
    "counters": "Prometheus' counters rise by what clients were told",
    "time": "what is said to be cached saves time",
}
"""Each check, and the claim that is true or false."""


class Verdict(StrEnum):
    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not applicable"


@attrs.frozen
class Trial:
    """One attempt to see whether a claim holds."""

    is_held: bool | None
    """None: this attempt cannot say."""
    reason: str
    shown_by: Sequence[Exchange] = ()
    """The requests that show it, in the order in which they were sent."""
    is_certain: bool = False
    """If the claim does not hold: nothing but a wrong count explains it, so that one attempt is enough."""
    is_offered: bool = True
    """Whether the server offers what the check is about."""


@attrs.frozen
class Finding:
    check: str
    api: str
    is_stream: bool | None
    """None: the check is not about one of both."""
    verdict: Verdict
    reason: str
    shown_by: tuple[Exchange, ...] = ()


def settle(check: str, api: str, is_stream: bool | None, trials: Sequence[Trial]) -> Finding:
    """Return the verdict of the trials of one check."""

    def found(verdict: Verdict, trial: Trial, reason: str | None = None) -> Finding:
        return Finding(check, api, is_stream, verdict, reason or trial.reason, tuple(trial.shown_by))

    if not trials:
        return Finding(check, api, is_stream, Verdict.UNKNOWN, "not tried")
    failed = [trial for trial in trials if trial.is_held is False]
    certain = [trial for trial in failed if trial.is_certain]
    if certain:
        return found(Verdict.FALSE, certain[0])
    if len(failed) >= ENOUGH and len(failed) == len(trials):
        return found(Verdict.FALSE, failed[-1], f"{failed[-1].reason} ({len(failed)} times of {len(trials)})")
    if failed:
        often = f"{len(failed)} times of {len(trials)}"
        return found(Verdict.UNKNOWN, failed[0], f"doubtful: {failed[0].reason} ({often}; a retry could explain it)")
    if any(not trial.is_offered for trial in trials):
        return found(Verdict.NOT_APPLICABLE, next(trial for trial in trials if not trial.is_offered))
    unsure = [trial for trial in trials if trial.is_held is None]
    if unsure:
        return found(Verdict.UNKNOWN, unsure[0])
    return found(Verdict.TRUE, trials[-1])
