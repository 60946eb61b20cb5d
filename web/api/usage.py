"""Usage as the OpenAI endpoints show it: a projection of the usage record, or of what is known so far.

The `UsageRecord` comes with the last event of a request; a `Tally` adds up the events of a running one. Numbers are
shown as recorded, 0 as 0. Cached tokens that the engine did not count are absent; a router's estimate has a field of
its own, for clients that ask for details.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.tiers import CACHE_TIERS
from quipu.actors.messages.usage_record import UsageRecord

from ..request.tally import Tally


def tallied_usage(tally: Tally, *, with_tiers: bool, image_tokens: int | None = None) -> dict[str, Any] | None:
    """Return cumulative usage for a chunk. Tiers are known only from the record. None until a prompt is admitted."""
    if tally.prompt_tokens is None:
        return None
    usage = _openai(tally, image_tokens)
    if with_tiers:
        usage["prompt_tokens_details"] |= {"cached_tokens_by_tier": None, **_estimate(tally)}
    return usage


def openai_usage(record: UsageRecord, *, with_tiers: bool, image_tokens: int | None = None) -> dict[str, Any]:
    """Return the `usage` object of a completion or chat completion (docs/use/usage.md).

    `image_tokens`: prompt tokens that stand for images; None: there are no images.
    """
    usage = _openai(record, image_tokens)
    if with_tiers:
        tiers = all_tiers(record.cached_tokens, record.cached_by_tier)
        usage["prompt_tokens_details"] |= {"cached_tokens_by_tier": tiers, **_estimate(record)}
        usage["prompt_tokens_details"]["cache_misses"] = [_miss(miss) for miss in record.cache_misses]
    return usage


def all_tiers(num_cached: int | None, by_tier: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return cached tokens by storage tier, which add up to the total; None if that is unknown."""
    if num_cached is None:
        return None
    tiers = {tier.value: (by_tier or {}).get(tier, 0) for tier in CACHE_TIERS}
    # Hits of unknown tier are never attributed to the device.
    tiers["unattributed"] = num_cached - sum(tiers.values())
    return tiers


def miss_for_client(miss: CacheMiss) -> CacheMiss:
    """Return why a prompt's cached prefix ended, as its client may know it.

    Only operators may learn that the same tokens are cached under another tenant: it reveals what others have sent.
    """
    return attrs.evolve(miss, reason=MissReason.DIVERGED) if miss.reason is MissReason.OTHER_DOMAIN else miss


def _miss(miss: CacheMiss) -> dict[str, Any]:
    shown = miss_for_client(miss)
    return {"reason": shown.reason.value, "token": shown.token}


def _estimate(known: UsageRecord | Tally) -> dict[str, int]:
    estimate = known.cached_tokens_estimate
    return {} if estimate is None else {"cached_tokens_estimate": estimate}


def _openai(known: UsageRecord | Tally, image_tokens: int | None) -> dict[str, Any]:
    prompt, completion = known.prompt_tokens, known.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": None if prompt is None else prompt + completion,
        "prompt_tokens_details": {
            **({} if known.cached_tokens is None else {"cached_tokens": known.cached_tokens}),
            "cache_write_tokens": known.cache_write_tokens,
            "audio_tokens": 0,
            **({} if image_tokens is None else {"image_tokens": image_tokens}),
        },
        "completion_tokens_details": {
            "reasoning_tokens": known.reasoning_tokens,
            "accepted_prediction_tokens": known.accepted_prediction_tokens,
            "rejected_prediction_tokens": known.rejected_prediction_tokens,
            "audio_tokens": 0,
        },
    }
