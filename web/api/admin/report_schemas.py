"""What is declared of the routes that report usage: records, and sums in the formats of two APIs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec

from quipu.actors.config.declarations import Bounds
from quipu.actors.ledger.fields import FlatRecord

from ..body_field import BOOLEAN, STRING, BodyField, Schema
from ..operation import (
    ANY_OBJECT,
    COUNT,
    FLAG,
    TEXT_VALUE,
    USAGE,
    Named,
    Operation,
    always,
    array,
    maybe,
    one_of,
    record,
)
from ..query import LATEST, MAX_VALUES
from ..usage_schemas import MISS
from .usage_buckets import DEFAULT_WIDTH, WIDTHS
from .usage_report import RETRIES, AnthropicReport, EmbeddingsReport, OpenAIReport

_REF, _PLACE = "#/$defs/", "#/$defs/{name}"


def _record_fields() -> dict[str, Any]:
    """Return the schemas of a usage record's fields, as its class declares them."""
    (schema,), parts = msgspec.json.schema_components([FlatRecord], ref_template=_PLACE)
    fields: dict[str, Any] = _without_references(parts[schema["$ref"].removeprefix(_REF)]["properties"], parts)
    return fields


def _without_references(part: Any, parts: dict[str, Any]) -> Any:
    if isinstance(part, dict):
        if type(ref := part.get("$ref")) is str:
            return _without_references(parts[ref.removeprefix(_REF)], parts)
        return {name: _without_references(inner, parts) for name, inner in part.items() if name != "title"}
    return [_without_references(inner, parts) for inner in part] if isinstance(part, list) else part


_ID = {"request_id": "From the response header `X-Quipu-Request-Id`."}
_NO_RECORD = {HTTPStatus.NOT_FOUND: "No record exists for this id, or it is another tenant's."}
RECORD = Operation(
    summary="Show the usage record of a request",
    tag=USAGE,
    help="An admin key is also shown the record's place in the ledger's hash chain.",
    path=_ID,
    answer=Named(
        "UsageRecord",
        record({**_record_fields(), "object": always("usage.record"), "cache_misses": array(MISS), "recovered": FLAG}),
    ),
    others=_NO_RECORD,
)
RECEIPT = Operation(
    summary="Sign a receipt of a usage record",
    tag=USAGE,
    help="With a proof that the record is in the ledger. `quipu ledger verify-receipt` checks it.",
    path=_ID,
    answer=ANY_OBJECT,
    others=_NO_RECORD,
)
KEYS = Operation(
    summary="Show the public keys that sign receipts",
    tag=USAGE,
    answer=record({"keys": array(ANY_OBJECT)}),
)


def texts(name: str, help: str, *allowed: str) -> BodyField:
    """Declare a query parameter that may be given several times."""
    value: Schema = one_of(*allowed) if allowed else {"type": "string", "minLength": 1}
    return BodyField(name=name, schema={"type": "array", "items": value, "maxItems": MAX_VALUES}, help=help)


TIME: Schema = {"type": "integer", "minimum": 0, "maximum": LATEST}
"""Unix seconds."""
_RFC3339: Schema = {"type": "string", "format": "date-time"}
_MOST_BUCKETS = max(width.max_limit for width in WIDTHS.values())
_MOST = ", ".join(f"{width.max_limit} of {name}" for name, width in WIDTHS.items())
_PAGE = (
    BodyField(name="bucket_width", choices=tuple(WIDTHS), default=DEFAULT_WIDTH, help="The length of a bucket."),
    BodyField(
        name="limit",
        bounds=Bounds(minimum=1, maximum=_MOST_BUCKETS),
        help=f"Buckets of a page; at most {_MOST}.",
    ),
    BodyField(name="page", type=STRING, help="The `next_page` of a response to the same query."),
    texts("api_key_ids", "Only of these keys."),
    texts("models", "Only of these models."),
    BodyField(name="retries", choices=RETRIES, default="count", help="Whether retries of a request count once."),
)
_PAGED = {"has_more": FLAG, "next_page": maybe(TEXT_VALUE)}
_TIMES = (
    BodyField(name="start_time", schema=TIME, is_required=True, help="Unix seconds."),
    BodyField(name="end_time", schema=TIME, help="Unix seconds."),
)
_PROJECTS = texts("project_ids", "Only of these tenants.")
_BUCKET = record({"object": always("bucket"), "start_time": COUNT, "end_time": COUNT, "results": array(ANY_OBJECT)})
_OPENAI_PAGE = record({"object": always("page"), "data": array(_BUCKET), **_PAGED})
OPENAI_USAGE_REPORT = Operation(
    summary="Report usage in the format of OpenAI's API",
    tag=USAGE,
    query=(
        *_TIMES,
        BodyField(name="batch", type=BOOLEAN, help="Only batches, or only others."),
        _PROJECTS,
        texts("group_by", "What to tell apart.", *OpenAIReport.dimensions),
        *_PAGE,
    ),
    answer=_OPENAI_PAGE,
)
OPENAI_EMBEDDINGS_REPORT = Operation(
    summary="Report usage of embeddings, scores and reranking in the format of OpenAI's API",
    tag=USAGE,
    query=(*_TIMES, _PROJECTS, texts("group_by", "What to tell apart.", *EmbeddingsReport.dimensions), *_PAGE),
    answer=_OPENAI_PAGE,
)
TIERS = ("standard", "batch", "priority", "priority_on_demand", "flex", "flex_discount")
"""Lines of batches have the second, all other requests the first."""
SAME_FILTERS = {
    "inference_geos": ("not_available", "global", "us"),
    "speeds": ("standard", "fast"),
}
"""Every request to this server has the first of these values."""
ANTHROPIC_USAGE_REPORT = Operation(
    summary="Report usage in the format of Anthropic's API",
    tag=USAGE,
    query=(
        BodyField(name="starting_at", schema=_RFC3339, is_required=True, help="With an offset."),
        BodyField(name="ending_at", schema=_RFC3339, help="With an offset."),
        texts("workspace_ids", "Only of these tenants."),
        texts("group_by", "What to tell apart.", *AnthropicReport.dimensions),
        texts("service_tiers", "Only these; `batch` are the lines of batches, `standard` is all else.", *TIERS),
        *(texts(name, f"Every request has `{allowed[0]}`.", *allowed) for name, allowed in SAME_FILTERS.items()),
        *_PAGE,
    ),
    answer=record(
        {
            "data": array(record({"starting_at": TEXT_VALUE, "ending_at": TEXT_VALUE, "results": array(ANY_OBJECT)})),
            **_PAGED,
        }
    ),
)
