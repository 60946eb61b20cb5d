"""Usage as the OpenAI endpoints show it: a projection of the one usage record, or of what is known so far.

`UsageRecord` comes with the last event of a request and is what the books say; a `Tally` adds up the events of a
request that is still running. Neither is corrected here: a number is shown as it was booked, 0 as 0, unknown as null.
"""

from __future__ import annotations

from typing import Any

import attrs

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.usage_record import UsageRecord

from ..request.tally import Tally

_NAMED_TIERS = ("device", "host", "disk", "remote")


def tallied_usage(tally: Tally, *, with_tiers: bool) -> dict[str, Any] | None:
    """Cumulative usage for a chunk; tiers are known only from the record. None while nothing was admitted."""
    if tally.prompt_tokens is None:
        return None
    usage = _openai(tally.prompt_tokens, tally.cached_tokens, tally.cache_write_tokens, tally.completion_tokens)
    if with_tiers:
        usage["prompt_tokens_details"]["cached_tokens_by_tier"] = None
    return usage


def openai_usage(record: UsageRecord, *, with_tiers: bool) -> dict[str, Any]:
    """The `usage` object of a completion or chat completion (specification of usage, section 3)."""
    usage = _openai(record.prompt_tokens, record.cached_tokens, record.cache_write_tokens, record.completion_tokens)
    if with_tiers:
        usage["prompt_tokens_details"]["cached_tokens_by_tier"] = cached_tokens_by_tier(record)
        usage["prompt_tokens_details"]["cache_misses"] = [_miss(miss) for miss in record.cache_misses]
    return usage


def cached_tokens_by_tier(record: UsageRecord) -> dict[str, int] | None:
    """Cached tokens by where they lay; the parts add up to the whole. None where the whole is unknown."""
    if record.cached_tokens is None:
        return None
    booked = record.cached_by_tier or {}
    tiers = {tier: booked.get(tier, 0) for tier in _NAMED_TIERS}
    # Hits of unknown tier are nobody's: they are never labelled as the device's.
    tiers["unattributed"] = record.cached_tokens - sum(tiers.values())
    return tiers


def told_miss(miss: CacheMiss) -> CacheMiss:
    """Why a prompt's cached prefix ended where it did, as a client may know it.

    That the same tokens are there under another tenant is for operators: told, it would say what others have sent.
    """
    return attrs.evolve(miss, reason=MissReason.DIVERGED) if miss.reason is MissReason.OTHER_DOMAIN else miss


def _miss(miss: CacheMiss) -> dict[str, Any]:
    told = told_miss(miss)
    return {"reason": told.reason.value, "token": told.token}


def _openai(prompt: int | None, cached: int | None, written: int | None, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": None if prompt is None else prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "cache_write_tokens": written, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
            "audio_tokens": 0,
        },
    }
