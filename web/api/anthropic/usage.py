"""Usage as the Messages API shows it: a projection of the usage record, or of what is known at the first token.

    input_tokens + cache_read_input_tokens + cache_creation_input_tokens = the prompt's tokens

If the engine does not count what it reuses, the two cache fields are null and the whole prompt is in the first.

What must always hold: the three parts are disjoint positions of the prompt, so none of them is ever negative; they are
the same in every event of a stream and in a whole response.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.usage_record import UsageRecord

from ...request.tally import Tally


def messages_usage(known: UsageRecord | Tally, num_output_tokens: int, num_thinking_tokens: int = 0) -> dict[str, Any]:
    """Return the `usage` of a message or of `message_start` (docs/use/usage.md)."""
    return {
        **delta_usage(known, num_output_tokens, num_thinking_tokens),
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
        "speed": "standard",
    }


def delta_usage(known: UsageRecord | Tally, num_output_tokens: int, num_thinking_tokens: int = 0) -> dict[str, Any]:
    """Return the `usage` of `message_delta`, which repeats all counts."""
    cached = known.cached_tokens
    is_counted = cached is not None
    created = known.created_5m_tokens + known.created_1h_tokens if is_counted else 0
    split = {
        "ephemeral_5m_input_tokens": known.created_5m_tokens,
        "ephemeral_1h_input_tokens": known.created_1h_tokens,
    }
    return {
        "input_tokens": (known.prompt_tokens or 0) - (cached or 0) - created,
        "cache_creation_input_tokens": created if is_counted else None,
        "cache_read_input_tokens": cached,
        "cache_creation": split if is_counted else None,
        "output_tokens": num_output_tokens,
        "output_tokens_details": {"thinking_tokens": num_thinking_tokens},
    }
