"""The page of OpenAI's usage API, made from the ledger. `usage_openai.py` reads what a client asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs
import orjson

from quipu.actors.ledger.reading import Sum

from .reports import Ledger
from .usage_buckets import Range
from .usage_report import Column, Dimension, Filled, Filters, Same, fill, labels

DIMENSIONS: Final[Mapping[str, Dimension]] = {
    "project_id": Column("tenant"),
    "user_id": Same(None),
    "api_key_id": Column("key_id"),
    "model": Column("model"),
    "batch": Same(False),
    "service_tier": Same("default"),
    "api_source": Same("unlabeled"),
}


@attrs.frozen
class OpenAIReport:
    range: Range
    filters: Filters
    group_by: tuple[str, ...]

    def make(self, ledger: Ledger) -> bytes:
        page = self.range.lay_out()
        filled = fill(ledger, page, self.filters, DIMENSIONS, self.group_by)
        return orjson.dumps(
            {
                "object": "page",
                "data": [_bucket(one, self.group_by) for one in filled],
                "has_more": page.next_start is not None,
                "next_page": page.cursor,
            }
        )


def _bucket(filled: Filled, group_by: Sequence[str]) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": filled.bucket.start,
        "end_time": filled.bucket.end,
        "results": [_result(one, group_by) for one in filled.sums],
    }


def _result(one: Sum, group_by: Sequence[str]) -> dict[str, Any]:
    uncached = one.prompt_tokens - one.cached_tokens - one.cache_write_tokens
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": one.prompt_tokens,
        "input_uncached_tokens": uncached,
        "input_cached_tokens": one.cached_tokens,
        "input_cache_write_tokens": one.cache_write_tokens,
        "input_text_tokens": uncached,
        "input_cached_text_tokens": one.cached_tokens,
        "input_audio_tokens": 0,
        "input_cached_audio_tokens": 0,
        "output_tokens": one.completion_tokens,
        "output_text_tokens": one.completion_tokens,
        "output_audio_tokens": 0,
        "num_model_requests": one.num_requests,
        **labels(one, DIMENSIONS, group_by),
    }
