"""The usage reports of both administration APIs: from filters and a range to a page of sums by bucket and group.

`organization_usage.py` reads what a client asks for. The APIs use different names (a tenant is a project in one and a
workspace in the other), which `dimensions` maps to the ledger. Both count every request, whichever API it used: each
is the whole bill, OpenAI's in two reports, one of texts and one of vectors and scores.

What must always hold: every request that was not rejected is counted once by each API, retries included unless they are
to be collapsed; a request that the server itself failed counts no tokens; an estimate is in no sum, so tokens that are
only estimated to be cached count as uncached.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import attrs
import orjson

from quipu.actors.ledger.reading import GroupColumn, Query, Sum
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import ServiceTier

from .reports import Ledger
from .usage_buckets import Bucket, Page, Range, rfc3339

RETRIES: Final = ("count", "collapse")
"""Values of `retries`. `collapse`: a request and its retries count once."""
COUNTED: Final = tuple(outcome for outcome in Outcome if outcome is not Outcome.REJECTED)


@attrs.frozen
class Same:
    """A value that all requests to this server share. None: unknown."""

    value: str | bool | None


@attrs.frozen
class IsBatch:
    """Whether requests are lines of batches."""


@attrs.frozen
class UsageReport(ABC):
    """One page in the format of an API."""

    range: Range
    query: Query
    """The filters, without the time."""
    matches_nothing: bool
    """A filter is set that no request can match."""
    collapse_retries: bool
    group_by: tuple[str, ...]

    dimensions: ClassVar[Mapping[str, GroupColumn | Same | IsBatch]]
    kinds: ClassVar[tuple[str, ...]] = ()
    """Of the requests that are counted. Empty: all."""
    head: ClassVar[Mapping[str, str]] = {}
    """The first fields of the page."""

    @abstractmethod
    def bucket(self, bucket: Bucket) -> dict[str, Any]:
        """Return a bucket without its results."""

    @abstractmethod
    def result(self, one: Sum) -> dict[str, Any]:
        """Return the sum of one group, without its labels."""

    def make(self, ledger: Ledger) -> bytes:
        page = self.range.lay_out()
        sums = self._sums(ledger, page)
        data = [
            {**self.bucket(one), "results": sums.get(self.range.width.border(one.start), [])} for one in page.buckets
        ]
        return orjson.dumps(
            {**self.head, "data": data, "has_more": page.next_start is not None, "next_page": page.cursor}
        )

    def _sums(self, ledger: Ledger, page: Page) -> dict[float, list[dict[str, Any]]]:
        """Return the results of each bucket in which something happened, by its boundary."""
        found: dict[float, list[dict[str, Any]]] = {}
        if not page.buckets or self.matches_nothing:
            return found
        query = attrs.evolve(self.query, since=page.buckets[0].start, until=page.buckets[-1].end, kinds=self.kinds)
        requested = [self.dimensions[name] for name in self.group_by]
        columns: list[GroupColumn] = [
            "service_tier" if isinstance(dimension, IsBatch) else dimension
            for dimension in requested
            if not isinstance(dimension, Same)
        ]
        width_s = self.range.width.width_s
        for one in ledger.sums(query, group_by=columns, bucket_s=width_s, collapse_retries=self.collapse_retries):
            assert one.bucket is not None
            found.setdefault(one.bucket, []).append({**self.result(one), **self._labels(one)})
        return found

    def _labels(self, one: Sum) -> dict[str, str | bool | None]:
        """Return every dimension's value in a group, None for those that were not requested."""
        return {name: _label(dim, one) if name in self.group_by else None for name, dim in self.dimensions.items()}


def _label(dimension: GroupColumn | Same | IsBatch, one: Sum) -> str | bool | None:
    if isinstance(dimension, Same):
        return dimension.value
    if isinstance(dimension, IsBatch):
        return one.group["service_tier"] == ServiceTier.BATCH
    return one.group[dimension]


class OpenAIReport(UsageReport):
    dimensions = {
        "project_id": "tenant",
        "user_id": Same(None),
        "api_key_id": "key_id",
        "model": "model",
        "batch": IsBatch(),
        "service_tier": Same("default"),
        "api_source": Same("unlabeled"),
    }
    head = {"object": "page"}
    kinds: ClassVar[tuple[str, ...]] = ("generate",)

    def bucket(self, bucket: Bucket) -> dict[str, Any]:
        return {"object": "bucket", "start_time": bucket.start, "end_time": bucket.end}

    def result(self, one: Sum) -> dict[str, Any]:
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
        }


class EmbeddingsReport(OpenAIReport):
    """What is in the other report if a server makes vectors and scores: prompts alone."""

    dimensions = {name: OpenAIReport.dimensions[name] for name in ("project_id", "user_id", "api_key_id", "model")}
    kinds: ClassVar[tuple[str, ...]] = ("embed", "score")

    def result(self, one: Sum) -> dict[str, Any]:
        return {
            "object": "organization.usage.embeddings.result",
            "input_tokens": one.prompt_tokens,
            "input_cached_tokens": one.cached_tokens,
            "num_model_requests": one.num_requests,
        }


class AnthropicReport(UsageReport):
    dimensions = {
        "account_id": Same(None),
        "api_key_id": "key_id",
        "context_window": Same(None),
        "inference_geo": Same("not_available"),
        "model": "model",
        "service_account_id": Same(None),
        "service_tier": "service_tier",
        "speed": Same("standard"),
        "workspace_id": "tenant",
    }

    def bucket(self, bucket: Bucket) -> dict[str, Any]:
        return {"starting_at": rfc3339(bucket.start), "ending_at": rfc3339(bucket.end)}

    def result(self, one: Sum) -> dict[str, Any]:
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
        }
