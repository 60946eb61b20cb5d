"""Anthropic's usage report over plain HTTP, in the documented shape: whole UTC buckets, whatever the offset."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.web.api.admin.usage_buckets import rfc3339
from quipu.web.request.errors import unavailable
from tests.web.api.admin.usage_books import (
    ANTHROPIC,
    DAY,
    MIDNIGHT,
    NOW,
    BookSource,
    client_of,
    get_error,
    get_report,
    record_at,
)
from tests.web.asgi_client import Client

START = "2025-06-01T00:00:00Z"


async def report(client: Client, **parameters: Any) -> list[dict[str, Any]]:
    answer = await get_report(client, ANTHROPIC, {"starting_at": START, **parameters})
    buckets: list[dict[str, Any]] = answer["data"]
    return buckets


def spans(buckets: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(bucket["starting_at"], bucket["ending_at"]) for bucket in buckets]


def outputs(buckets: list[dict[str, Any]]) -> list[int]:
    """Return the output tokens of each bucket; each request has ten."""
    return [sum(result["output_tokens"] for result in bucket["results"]) for bucket in buckets]


async def test_one_bucket() -> None:
    """The parts of the input are disjoint and add up; fields that were not grouped by are null."""
    source = BookSource([record_at(10, created_5m_tokens=16, created_1h_tokens=32), record_at(20, cached=Known(96))])
    answer = await get_report(client_of(source), ANTHROPIC, {"starting_at": START, "limit": 1})
    assert answer == {
        "data": [
            {
                "starting_at": START,
                "ending_at": "2025-06-02T00:00:00Z",
                "results": [
                    {
                        "uncached_input_tokens": 100 - 48 - 48 + 4,
                        "cache_read_input_tokens": 48 + 96,
                        "cache_creation": {"ephemeral_5m_input_tokens": 16, "ephemeral_1h_input_tokens": 32},
                        "output_tokens": 20,
                        "server_tool_use": {"web_search_requests": 0},
                        "account_id": None,
                        "api_key_id": None,
                        "context_window": None,
                        "inference_geo": None,
                        "model": None,
                        "service_account_id": None,
                        "service_tier": None,
                        "speed": None,
                        "workspace_id": None,
                    }
                ],
            }
        ],
        "has_more": True,
        "next_page": answer["next_page"],
    }


async def test_whole_buckets() -> None:
    """The start is rounded down to a boundary; a bucket that ends after the end is left out, one that ends there is
    not."""
    client = client_of(BookSource([record_at(0), record_at(DAY - 0.001), record_at(DAY)]))
    buckets = await report(client, starting_at="2025-06-01T13:00:00Z", ending_at="2025-06-03T00:00:00Z")
    assert spans(buckets) == [(START, "2025-06-02T00:00:00Z"), ("2025-06-02T00:00:00Z", "2025-06-03T00:00:00Z")]
    assert outputs(buckets) == [20, 10]
    assert len(await report(client, ending_at="2025-06-02T23:59:59.999Z")) == 1
    assert await report(client, starting_at="2025-06-01T10:00:00Z", ending_at="2025-06-01T20:00:00Z") == []


async def test_boundaries() -> None:
    """A request that closes on a boundary is in the bucket that begins there."""
    client = client_of(BookSource([record_at(59.999), record_at(60), record_at(119.999), record_at(120)]))
    buckets = await report(client, bucket_width="1m", limit=3)
    assert outputs(buckets) == [10, 20, 10]
    assert spans(buckets)[1] == ("2025-06-01T00:01:00Z", "2025-06-01T00:02:00Z")


@pytest.mark.parametrize(
    "start",
    [
        "2025-06-01T00:00:00+00:00",
        "2025-06-01T02:00:00+02:00",
        "2025-05-31T18:30:00-05:30",
        "2025-06-01t00:00:00z",
        "2025-06-01 00:00:00.000Z",
        "2025-06-01T05:45:59.123456789+05:45",
    ],
)
async def test_time_zones(start: str) -> None:
    """Any offset is accepted; buckets and responses are in UTC."""
    buckets = await report(
        client_of(BookSource([record_at(0), record_at(3599.9)])), starting_at=start, bucket_width="1h", limit=1
    )
    assert spans(buckets) == [(START, "2025-06-01T01:00:00Z")] and outputs(buckets) == [20]


async def test_until_now_and_in_the_future() -> None:
    """The last bucket is the current one; a start in the future has none."""
    source = BookSource([record_at(NOW - MIDNIGHT - 1)])
    client = client_of(source)
    for end in ({}, {"ending_at": "2026-01-01T00:00:00Z"}):
        buckets = await report(client, limit=31, **end)
        assert len(buckets) == 11 and outputs(buckets)[-1] == 10
    num_queries = len(source.seen_queries)
    answer = await get_report(client, ANTHROPIC, {"starting_at": rfc3339(NOW + DAY)})
    assert answer == {"data": [], "has_more": False, "next_page": None} and len(source.seen_queries) == num_queries


@pytest.mark.parametrize(("width", "default", "most"), [("1m", 60, 1440), ("1h", 24, 168), ("1d", 7, 31)])
async def test_limits(width: str, default: int, most: int) -> None:
    """Limits are as documented; the ledger is queried for one page's range only."""
    source = BookSource()
    client = client_of(source)
    for limit, expected in (({}, default), ({"limit": most}, most)):
        answer = await get_report(
            client, ANTHROPIC, {"starting_at": "1970-01-01T00:00:00Z", "bucket_width": width, **limit}
        )
        assert (len(answer["data"]), answer["has_more"]) == (expected, True)
        query = source.seen_queries[-1]
        assert (query.since, query.until) == (0, expected * {"1m": 60, "1h": 3600, "1d": DAY}[width])
    error = await get_error(client, ANTHROPIC, {"starting_at": START, "bucket_width": width, "limit": most + 1})
    assert "`limit`" in error["message"]


async def test_pages_with_groups() -> None:
    """Pages follow each other without gaps or repetitions; a page is limited in buckets, however many groups they
    contain.
    """
    source = BookSource([record_at(hour * 3600 + 7, tenant=tenant) for hour in (0, 3, 4) for tenant in ("acme", "b")])
    client = client_of(source)
    parameters: dict[str, Any] = {"starting_at": "2025-06-01T00:30:00Z", "ending_at": "2025-06-01T05:00:00Z"}
    parameters |= {"bucket_width": "1h", "limit": 2, "group_by[]": ["workspace_id"]}
    pages = [await get_report(client, ANTHROPIC, parameters)]
    while pages[-1]["has_more"]:
        pages.append(await get_report(client, ANTHROPIC, {**parameters, "page": pages[-1]["next_page"]}))
    buckets = [bucket for page in pages for bucket in page["data"]]
    assert [len(page["data"]) for page in pages] == [2, 2, 1] and pages[-1]["next_page"] is None
    assert [start[11:13] for start, _ in spans(buckets)] == ["00", "01", "02", "03", "04"]
    assert [[result["workspace_id"] for result in bucket["results"]] for bucket in buckets] == [
        ["acme", "b"],
        [],
        [],
        ["acme", "b"],
        ["acme", "b"],
    ]


@pytest.mark.parametrize("form", ["{}", "{}[]", "{}[{i}]"])
async def test_groups_and_filters(form: str) -> None:
    """A tenant is a workspace; fields that all requests share have one value; lists are accepted in three forms."""
    records = [
        record_at(1, tenant="acme", key_id="k1"),
        record_at(2, tenant="acme", key_id="k2", model="big"),
        record_at(3, tenant="b", batch_id="batch_1"),
    ]
    client = client_of(BookSource(records))

    async def results(**lists: list[str]) -> list[dict[str, Any]]:
        pairs = [(form.format(name, i=i), value) for name, values in lists.items() for i, value in enumerate(values)]
        answer = await get_report(client, ANTHROPIC, [("starting_at", START), ("limit", 1), ("colour", "blue"), *pairs])
        found: list[dict[str, Any]] = answer["data"][0]["results"]
        return found

    names = ["workspace_id", "model", "service_tier", "inference_geo", "context_window", "account_id", "speed"]
    assert [tuple(result[name] for name in names) for result in await results(group_by=names)] == [
        ("acme", "big", "standard", "not_available", None, None, "standard"),
        ("acme", "demo", "standard", "not_available", None, None, "standard"),
        ("b", "demo", "batch", "not_available", None, None, "standard"),
    ]
    keys = await results(group_by=["api_key_id"], workspace_ids=["acme"])
    assert [result["api_key_id"] for result in keys] == ["k1", "k2"]

    async def num(**filters: list[str]) -> int:
        return int(sum(result["output_tokens"] for result in await results(**filters)) // 10)

    assert await num() == 3
    assert await num(workspace_ids=["acme", "nobody"]) == 2
    assert await num(api_key_ids=["k1"]) == 1
    assert await num(models=["big", "demo"], workspace_ids=["b"]) == 1
    assert await num(service_tiers=["batch", "standard"]) == 3
    assert await num(service_tiers=["batch"]) == 1 and await num(service_tiers=["flex"]) == 0
    assert await num(service_tiers=["standard"], workspace_ids=["b"]) == 0
    assert await num(inference_geos=["us"]) == 0 and await num(speeds=["standard"]) == 3


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ([], "starting_at"),
        ([("starting_at", "")], "starting_at"),
        ([("starting_at", "1748736000")], "starting_at"),
        ([("starting_at", "2025-06-01")], "starting_at"),
        ([("starting_at", "2025-06-01T00:00:00")], "starting_at"),
        ([("starting_at", "2025-06-01T00:00:00+00:00Z")], "starting_at"),
        ([("starting_at", "2025-06-01T00:00:00 02:00")], "starting_at"),
        ([("starting_at", "2025-02-30T00:00:00Z")], "starting_at"),
        ([("starting_at", "2025-06-01T25:00:00Z")], "starting_at"),
        ([("starting_at", "1969-12-31T23:59:59Z")], "starting_at"),
        ([("starting_at", "0000-01-01T00:00:00Z")], "starting_at"),
        ([("starting_at", "9999-12-31T23:59:59-23:00")], "starting_at"),
        ([("starting_at", START), ("starting_at", START)], "starting_at"),
        ([("starting_at", START), ("ending_at", START)], "ending_at"),
        ([("starting_at", START), ("ending_at", "later")], "ending_at"),
        ([("starting_at", START), ("bucket_width", "1y")], "bucket_width"),
        ([("starting_at", START), ("limit", "0")], "limit"),
        ([("starting_at", START), ("group_by[]", "project_id")], "group_by"),
        ([("starting_at", START), ("page", "page_x")], "page"),
        ([("starting_at", START), ("service_tiers[]", "gold")], "service_tiers"),
        ([("starting_at", START), ("context_window[]", "0-200k")], "context_window"),
        ([("starting_at", START), ("account_ids[]", "me")], "account_ids"),
        ([("starting_at", START), ("retries", "once")], "retries"),
        ([("starting_at", START), ("workspace_ids[]", "")], "workspace_ids"),
    ],
)
async def test_bad_parameters(parameters: list[tuple[str, str]], param: str) -> None:
    """A bad parameter is a 400 that names it, in Anthropic's shape, with or without `anthropic-version`."""
    source = BookSource()
    error = await get_error(client_of(source), ANTHROPIC, parameters)
    assert set(error) == {"type", "message"} and error["type"] == "invalid_request_error"
    assert f"`{param}`" in error["message"]
    assert source.seen_queries == []


async def test_estimates_are_not_billed() -> None:
    """Estimated cached tokens count as uncached; failed and cancelled requests count the work done."""
    source = BookSource(
        [
            record_at(1),
            record_at(2, cached=Estimate(96), cached_by_tier=None),
            record_at(3, cached=UNKNOWN, cached_by_tier=None, outcome=Outcome.FAILED),
            record_at(4, outcome=Outcome.CANCELLED, completion_tokens=1),
            record_at(5, retry_of="another"),
        ]
    )
    (bucket,) = await report(client_of(source), limit=1)
    (result,) = bucket["results"]
    assert result["cache_read_input_tokens"] == 144
    assert result["uncached_input_tokens"] == 52 + 100 + 100 + 52 + 52
    assert result["output_tokens"] == 41


async def test_retries_and_faults() -> None:
    """Every request counts, or each once with its retries; requests that the server failed never count tokens."""
    source = BookSource(
        [
            record_at(1, "r1", outcome=Outcome.FAILED, fault=Fault.STEP_FAILED),
            record_at(2, "r2", retry_of="r1", outcome=Outcome.CANCELLED, completion_tokens=7),
            record_at(3, "r3", retry_of="r1", completion_tokens=20),
            record_at(4, "r4", outcome=Outcome.FAILED, fault=Fault.RECOVERED),
        ]
    )
    for parameters, num_tokens in (({}, 27), ({"retries": "count"}, 27), ({"retries": "collapse"}, 20)):
        (bucket,) = await report(client_of(source), limit=1, **parameters)
        (result,) = bucket["results"]
        assert result["output_tokens"] == num_tokens


async def test_unavailable_ledger() -> None:
    """An unavailable ledger is 529 instead of 503, with Retry-After."""
    source = BookSource(error=unavailable("The usage ledger cannot be read at the moment.", "ledger_unavailable"))
    exchange, answer = await client_of(source).get(f"{ANTHROPIC}?starting_at={START}")
    assert exchange.status == 529 and "retry-after" in exchange.headers
    assert answer["type"] == "error" and answer["error"]["type"] == "overloaded_error"
