"""The page of Anthropic's usage report, made from the ledger. `usage_anthropic.py` reads what a client asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import orjson

from quipu.actors.ledger.reading import Sum

from .reports import Ledger
from .usage_buckets import Range, rfc3339
from .usage_report import Column, Dimension, Filled, Filters, Same, fill, labels

DIMENSIONS: Final[Mapping[str, Dimension]] = {
    "account_id": Same(None),
    "api_key_id": Column("key_id"),
    "context_window": Same(None),
    "inference_geo": Same("not_available"),
    "model": Column("model"),
    "service_account_id": Same(None),
    "service_tier": Same("standard"),
    "speed": Same("standard"),
    "workspace_id": Column("tenant"),
}


@attrs.frozen
class AnthropicReport:
    range: Range
    filters: Filters
    group_by: tuple[str, ...]

    def make(self, ledger: Ledger) -> bytes:
        page = self.range.lay_out()
        filled = fill(ledger, page, self.filters, DIMENSIONS, self.group_by)
        return orjson.dumps(
            {
                "data": [_bucket(one, self.group_by) for one in filled],
                "has_more": page.next_start is not None,
                "next_page": page.cursor,
            }
        )


def _bucket(filled: Filled, group_by: Sequence[str]) -> dict[str, Any]:
    return {
        "starting_at": rfc3339(filled.bucket.start),
        "ending_at": rfc3339(filled.bucket.end),
        "results": [_result(one, group_by) for one in filled.sums],
    }


def _result(one: Sum, group_by: Sequence[str]) -> dict[str, Any]:
    created = one.created_5m_tokens + one.created_1h_tokens
    return {
        "uncached_input_tokens": one.prompt_tokens - one.cached_tokens - created,
        "cache_read_input_tokens": one.cached_tokens,
        "cache_creation": {
            "ephemeral_5m_input_tokens": one.created_5m_tokens,
            "ephemeral_1h_input_tokens": one.created_1h_tokens,
        },
        "output_tokens": one.completion_tokens,
        "server_tool_use": {"web_search_requests": 0},
        **labels(one, DIMENSIONS, group_by),
    }
