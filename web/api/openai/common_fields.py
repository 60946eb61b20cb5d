"""The fields that completions, chat and responses share: limits, and how the response is delivered."""

from __future__ import annotations

from ...request.errors import bad_value
from ..fields import Fields
from ..generation import Delivery, TokenLimit


def read_limit(fields: Fields) -> TokenLimit:
    """`max_completion_tokens`, or else `max_tokens`. Raises APIError."""
    # Both are checked, so that neither hides an invalid value of the other.
    older, newer = fields.integer("max_tokens"), fields.integer("max_completion_tokens")
    return TokenLimit(older, "max_tokens") if newer is None else TokenLimit(newer, "max_completion_tokens")


def read_delivery(fields: Fields) -> Delivery:
    """Return how the response is wanted. Raises APIError."""
    stream = fields.flag("stream")
    options = fields.fields("stream_options")
    if fields.get("stream_options") and not stream:
        raise bad_value("stream_options", "only allowed when `stream` is true")
    include_usage, continuous_usage = options.flag("include_usage"), options.flag("continuous_usage_stats")
    return Delivery(
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and continuous_usage,
        with_tiers=fields.flag("return_cached_tokens_details"),
    )


def unused_verbosity(fields: Fields) -> tuple[str, ...]:
    """Return the path of `verbosity` if it asks for what no model here can do. Raises APIError."""
    return () if fields.optional_text("verbosity") in (None, "medium") else (fields.param("verbosity"),)
