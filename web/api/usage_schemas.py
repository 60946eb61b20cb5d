"""The schemas of usage as `usage.py` writes it."""

from __future__ import annotations

from quipu.actors.messages.block_manager import MissReason
from quipu.actors.messages.tiers import CACHE_TIERS

from .operation import COUNT, Named, array, either, maybe, one_of, record

TIERS = Named("CachedTokensByTier", record({**{tier.value: COUNT for tier in CACHE_TIERS}, "unattributed": COUNT}))
"""Cached tokens by where they were."""
MISS = Named("CacheMiss", record({"reason": one_of(*(reason.value for reason in MissReason)), "token": COUNT}))
_OF_DETAILS = {
    "image_tokens": COUNT,
    "cached_tokens_by_tier": maybe(TIERS),
    "cached_tokens_estimate": COUNT,
    "cache_misses": array(MISS),
}
"""With `return_cached_tokens_details` only."""
_WRITTEN = maybe(COUNT)
DETAILS = record(
    {"cache_write_tokens": _WRITTEN, "audio_tokens": COUNT},
    {"cached_tokens": COUNT, **_OF_DETAILS},
)
OPENAI_USAGE = Named(
    "Usage",
    record(
        {
            "prompt_tokens": maybe(COUNT),
            "completion_tokens": COUNT,
            "total_tokens": maybe(COUNT),
            "prompt_tokens_details": DETAILS,
            "completion_tokens_details": record(
                {
                    "reasoning_tokens": COUNT,
                    "accepted_prediction_tokens": COUNT,
                    "rejected_prediction_tokens": COUNT,
                    "audio_tokens": COUNT,
                }
            ),
        }
    ),
)
RESPONSE_USAGE = Named(
    "ResponseUsage",
    record(
        {
            "input_tokens": maybe(COUNT),
            "input_tokens_details": record({"cache_write_tokens": _WRITTEN}, {"cached_tokens": COUNT, **_OF_DETAILS}),
            "output_tokens": COUNT,
            "output_tokens_details": record({"reasoning_tokens": COUNT}),
            "total_tokens": maybe(COUNT),
        }
    ),
)
USAGE_OR_NULL = either(OPENAI_USAGE, {"type": "null"})
