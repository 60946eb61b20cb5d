"""OpenAI's usage report: its buckets, groups, filters and pages, and the parameters that it refuses by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from openai.types.admin.organization import UsageCompletionsResponse, UsageEmbeddingsResponse

from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.web.request.errors import unavailable
from tests.web.api.admin.usage_books import (
    DAY,
    EMBEDDINGS,
    MIDNIGHT,
    NOW,
    OPENAI,
    BookSource,
    client_of,
    get_error,
    get_report,
    record_at,
)
from tests.web.asgi_client import Client

NEVER_ADMITTED: dict[str, Any] = {
    "outcome": Outcome.CANCELLED,
    "admitted_at": None,
    "prompt": UNKNOWN,
    "cached": UNKNOWN,
    "cached_by_tier": None,
    "cache_write": UNKNOWN,
    "completion_tokens": 0,
}


async def report(client: Client, **parameters: Any) -> list[dict[str, Any]]:
    answer = await get_report(client, OPENAI, {"start_time": MIDNIGHT, **parameters})
    UsageCompletionsResponse.model_validate(answer)
    buckets: list[dict[str, Any]] = answer["data"]
    return buckets


def spans(buckets: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(bucket["start_time"] - MIDNIGHT, bucket["end_time"] - MIDNIGHT) for bucket in buckets]


def requests_of(buckets: list[dict[str, Any]]) -> list[int]:
    """Return the number of requests in each bucket."""
    return [sum(result["num_model_requests"] for result in bucket["results"]) for bucket in buckets]


async def test_one_bucket() -> None:
    """The bucket has the sums of everything that closed in it, under OpenAI's names; fields not grouped by are null."""
    source = BookSource([record_at(10), record_at(20, cached=Known(0), cache_write=Known(96), completion_tokens=5)])
    answer = await get_report(client_of(source), OPENAI, {"start_time": MIDNIGHT, "limit": 1})
    assert answer == {
        "object": "page",
        "data": [
            {
                "object": "bucket",
                "start_time": MIDNIGHT,
                "end_time": MIDNIGHT + DAY,
                "results": [
                    {
                        "object": "organization.usage.completions.result",
                        "input_tokens": 200,
                        "input_uncached_tokens": 8,
                        "input_cached_tokens": 48,
                        "input_cache_write_tokens": 144,
                        "input_text_tokens": 8,
                        "input_cached_text_tokens": 48,
                        "input_audio_tokens": 0,
                        "input_cached_audio_tokens": 0,
                        "output_tokens": 15,
                        "output_text_tokens": 15,
                        "output_audio_tokens": 0,
                        "num_model_requests": 2,
                        "project_id": None,
                        "user_id": None,
                        "api_key_id": None,
                        "model": None,
                        "batch": None,
                        "service_tier": None,
                        "api_source": None,
                    }
                ],
            }
        ],
        "has_more": True,
        "next_page": answer["next_page"],
    }


async def test_boundaries() -> None:
    """A bucket, like the range, includes its first moment and excludes its end."""
    last_moment = math.nextafter(MIDNIGHT + DAY, 0) - MIDNIGHT
    source = BookSource(
        [
            record_at(-0.001),
            record_at(0),
            record_at(last_moment),
            record_at(DAY),
            record_at(2 * DAY - 0.001),
            record_at(2 * DAY),
        ]
    )
    client = client_of(source)
    assert requests_of(await report(client, end_time=MIDNIGHT + 2 * DAY)) == [2, 2]
    assert requests_of(await report(client, end_time=MIDNIGHT + 2 * DAY + 1)) == [2, 2, 1]
    for width, width_s in (("1m", 60), ("1h", 3600)):
        source.records = [
            record_at(math.nextafter(MIDNIGHT + width_s, 0) - MIDNIGHT),
            record_at(width_s),
            record_at(width_s + 0.001),
        ]
        assert requests_of(await report(client, bucket_width=width, limit=3)) == [1, 2, 0]


async def test_alignment() -> None:
    """Boundaries are UTC boundaries; the first bucket begins at start_time and the last one ends at end_time."""
    source = BookSource([record_at(9 * 3600), record_at(11 * 3600), record_at(25 * 3600), record_at(36 * 3600)])
    buckets = await report(client_of(source), start_time=MIDNIGHT + 10 * 3600, end_time=MIDNIGHT + 36 * 3600)
    assert spans(buckets) == [(10 * 3600, DAY), (DAY, 36 * 3600)]
    assert requests_of(buckets) == [1, 1]
    buckets = await report(client_of(source), start_time=MIDNIGHT + 59, end_time=MIDNIGHT + 61, bucket_width="1m")
    assert spans(buckets) == [(59, 60), (60, 61)]


async def test_empty_buckets_are_listed() -> None:
    """A day without requests is a bucket without results, so that a chart has no gaps."""
    source = BookSource([record_at(0), record_at(3 * DAY)])
    buckets = await report(client_of(source), end_time=MIDNIGHT + 5 * DAY, group_by=["model"])
    assert spans(buckets) == [(day * DAY, (day + 1) * DAY) for day in range(5)]
    assert [len(bucket["results"]) for bucket in buckets] == [1, 0, 0, 1, 0]


async def test_until_now() -> None:
    """Without an end, or with one in the future, the last bucket is the current one."""
    client = client_of(BookSource([record_at(NOW - MIDNIGHT - 1)]))
    for end in ({}, {"end_time": NOW + 400 * DAY}):
        buckets = await report(client, limit=31, **end)
        assert len(buckets) == 11 and spans(buckets)[-1] == (10 * DAY, 11 * DAY)
        assert requests_of(buckets)[-1] == 1


async def test_start_in_the_future() -> None:
    """A range in the future has no buckets and no pages, and the ledger is not read."""
    source = BookSource([record_at(0)])
    answer = await get_report(client_of(source), OPENAI, {"start_time": NOW + DAY})
    assert answer == {"object": "page", "data": [], "has_more": False, "next_page": None}
    assert source.seen_queries == []


@pytest.mark.parametrize(("width", "default", "most"), [("1m", 60, 1440), ("1h", 24, 168), ("1d", 7, 31)])
async def test_limits(width: str, default: int, most: int) -> None:
    """Page sizes are those of OpenAI's API; a huge range is read one page at a time."""
    source = BookSource()
    client = client_of(source)
    for limit, expected in (({}, default), ({"limit": 1}, 1), ({"limit": most}, most)):
        answer = await get_report(client, OPENAI, {"start_time": 0, "end_time": NOW, "bucket_width": width, **limit})
        assert (len(answer["data"]), answer["has_more"]) == (expected, True)
        query = source.seen_queries[-1]
        assert query.since is not None and query.until is not None
        assert query.until - query.since == expected * {"1m": 60, "1h": 3600, "1d": DAY}[width]
    for wrong in (0, most + 1, -1):
        error = await get_error(client, OPENAI, {"start_time": 0, "bucket_width": width, "limit": wrong})
        assert error["param"] == "limit" and str(most) in error["message"]
    assert len(await report(client, bucket_width="1d")) == 7, "the default width must be a day"


async def test_pages_with_groups() -> None:
    """Pages follow each other without gaps or repetitions; a page is limited in buckets, whatever they contain."""
    models = ("a", "b", "c")
    source = BookSource([record_at(day * DAY + 5, model=model) for day in range(0, 9, 2) for model in models])
    client = client_of(source)
    parameters: dict[str, Any] = {"start_time": MIDNIGHT + 1, "end_time": MIDNIGHT + 9 * DAY, "limit": 2}
    parameters["group_by"] = ["model"]
    pages = [await get_report(client, OPENAI, parameters)]
    while pages[-1]["has_more"]:
        pages.append(await get_report(client, OPENAI, {**parameters, "page": pages[-1]["next_page"]}))
    buckets = [bucket for page in pages for bucket in page["data"]]
    assert [len(page["data"]) for page in pages] == [2, 2, 2, 2, 1] and pages[-1]["next_page"] is None
    assert spans(buckets) == [(max(day * DAY, 1), (day + 1) * DAY) for day in range(9)]
    assert [[result["model"] for result in bucket["results"]] for bucket in buckets] == [["a", "b", "c"], []] * 4 + [
        ["a", "b", "c"]
    ]


async def test_groups() -> None:
    """A tenant is a project; fields that all requests share have one value; users are unknown."""
    source = BookSource(
        [
            record_at(1, tenant="acme", key_id="k1"),
            record_at(2, tenant="acme", key_id="k2", model="big"),
            record_at(3, tenant="b", key_id=None, batch_id="batch_1"),
        ]
    )
    client = client_of(source)

    async def groups(*names: str) -> list[tuple[Any, ...]]:
        (bucket,) = await report(client, limit=1, group_by=list(names))
        assert sum(result["input_tokens"] for result in bucket["results"]) == 300
        return [tuple(result[name] for name in names) for result in bucket["results"]]

    assert await groups("project_id") == [("acme",), ("b",)]
    assert await groups("api_key_id") == [(None,), ("k1",), ("k2",)]
    assert await groups("model", "project_id") == [("big", "acme"), ("demo", "acme"), ("demo", "b")]
    assert await groups("user_id", "batch", "service_tier", "api_source") == [
        (None, True, "default", "unlabeled"), (None, False, "default", "unlabeled"),
    ]  # fmt: skip


async def test_filters() -> None:
    """Each filter narrows the result, and filters combine."""
    source = BookSource(
        [
            record_at(1, tenant="acme", key_id="k1"),
            record_at(2, tenant="acme", key_id="k2", model="big"),
            record_at(3, tenant="b", key_id="k3", batch_id="batch_1"),
        ]
    )
    client = client_of(source)

    async def num(**filters: Any) -> int:
        return requests_of(await report(client, limit=1, **filters))[0]

    assert await num() == 3
    assert await num(project_ids=["acme"]) == 2
    assert await num(project_ids=["acme", "b", "nobody"]) == 3
    assert await num(api_key_ids=["k1", "k3"]) == 2
    assert await num(models=["big"]) == 1
    assert await num(models=["demo"], project_ids=["acme"]) == 1
    assert await num(models=["demo"], api_key_ids=["k2"]) == 0
    assert await num(batch="false") == 2 and await num(batch="true") == 1


async def test_each_kind_in_its_report() -> None:
    """Embeddings and scores are in the report of OpenAI's API that is theirs, texts in the other, and none in both."""
    kinds = ("generate", "embed", "score", "embed")
    source = BookSource([record_at(at, kind=kind, model=kind) for at, kind in enumerate(kinds)])
    client = client_of(source)
    (bucket,) = await report(client, limit=1)
    assert bucket["results"][0]["num_model_requests"] == 1
    parameters = {"start_time": MIDNIGHT, "limit": 1, "group_by": ["model"]}
    page = await get_report(client, EMBEDDINGS, parameters)
    parsed = UsageEmbeddingsResponse.model_validate(page, strict=True)
    told = [(one["model"], one["num_model_requests"], one["input_tokens"]) for one in page["data"][0]["results"]]
    assert told == [("embed", 2, 200), ("score", 1, 100)] and parsed.data[0].results
    error = await get_error(client, EMBEDDINGS, {**parameters, "group_by": ["batch"]})
    assert error["param"] == "group_by"


@pytest.mark.parametrize("form", ["{}", "{}[]", "{}[{i}]"])
async def test_forms_of_lists(form: str) -> None:
    """The three ways in which clients write a list are equivalent; unknown parameters are ignored."""
    client = client_of(BookSource([record_at(1, model="a"), record_at(2, model="b"), record_at(3, model="c")]))
    pairs = [("start_time", MIDNIGHT), ("limit", 1), ("colour", "blue"), ("colours[]", "red")]
    pairs += [(form.format("models", i=i), model) for i, model in enumerate("ab")]
    pairs += [(form.format("group_by", i=i), name) for i, name in enumerate(("model", "project_id"))]
    (bucket,) = (await get_report(client, OPENAI, pairs))["data"]
    assert [(result["model"], result["project_id"]) for result in bucket["results"]] == [("a", "acme"), ("b", "acme")]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ([], "start_time"),
        ([("start_time", "")], "start_time"),
        ([("start_time", "yesterday")], "start_time"),
        ([("start_time", "1.5")], "start_time"),
        ([("start_time", "-1")], "start_time"),
        ([("start_time", "9" * 30)], "start_time"),
        ([("start_time", "253402300800")], "start_time"),
        ([("start_time", "1"), ("start_time", "2")], "start_time"),
        ([("start_time", "5"), ("end_time", "5")], "end_time"),
        ([("start_time", "5"), ("end_time", "4")], "end_time"),
        ([("start_time", "5"), ("end_time", "soon")], "end_time"),
        ([("start_time", "5"), ("bucket_width", "1w")], "bucket_width"),
        ([("start_time", "5"), ("limit", "many")], "limit"),
        ([("start_time", "5"), ("limit", "٣")], "limit"),
        ([("start_time", "5"), ("group_by", "colour")], "group_by"),
        ([("start_time", "5"), ("group_by", "model"), ("group_by[]", "outcome")], "group_by"),
        ([("start_time", "5"), ("page", "2")], "page"),
        ([("start_time", "5"), ("batch", "maybe")], "batch"),
        ([("start_time", "5"), ("retries", "once")], "retries"),
        ([("start_time", "5"), ("user_ids[]", "me")], "user_ids"),
        ([("start_time", "5"), ("project_ids", "")], "project_ids"),
        ([("start_time", "5"), ("models[]", "a\0b")], "models"),
        ([("start_time", "5"), *[("models[]", f"m{i}") for i in range(501)]], "models"),
    ],
)
async def test_bad_parameters(parameters: list[tuple[str, str]], param: str) -> None:
    """A bad parameter is a 400 that names it, in OpenAI's shape, before the ledger is queried."""
    source = BookSource()
    error = await get_error(client_of(source), OPENAI, parameters)
    assert error["param"] == param and f"`{param}`" in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"]
    assert source.seen_queries == []


async def test_what_is_counted() -> None:
    """Failed and cancelled requests and retries count the work done. Requests that the server failed count no tokens,
    and rejected ones do not count at all.
    """
    source = BookSource(
        [
            record_at(1),
            record_at(2, outcome=Outcome.FAILED, completion_tokens=3),
            record_at(3, outcome=Outcome.CANCELLED, completion_tokens=1),
            record_at(4, **NEVER_ADMITTED),
            record_at(5, outcome=Outcome.FINISHED, retry_of="r1"),
            record_at(6, **{**NEVER_ADMITTED, "outcome": Outcome.REJECTED}),
            record_at(7, outcome=Outcome.FAILED, fault=Fault.ENGINE_DIED),
        ]
    )
    (bucket,) = await report(client_of(source), limit=1)
    (result,) = bucket["results"]
    assert (result["input_tokens"], result["input_cached_tokens"], result["output_tokens"]) == (400, 192, 24)
    assert result["num_model_requests"] == 6


async def test_retries_collapsed() -> None:
    """`collapse` counts each request and its retries once; the default is `count`."""
    source = BookSource(
        [record_at(1, "r1"), record_at(2, "r2", retry_of="r1"), record_at(3, "r3", retry_of="r1"), record_at(4, "r4")]
    )

    async def num(**parameters: str) -> int:
        (bucket,) = await report(client_of(source), limit=1, **parameters)
        (result,) = bucket["results"]
        return int(result["num_model_requests"])

    assert await num() == await num(retries="count") == 4
    assert await num(retries="collapse") == 2


async def test_only_rejected() -> None:
    """A bucket with only rejected requests is empty."""
    source = BookSource([record_at(1, **{**NEVER_ADMITTED, "outcome": Outcome.REJECTED})])
    assert [bucket["results"] for bucket in await report(client_of(source), limit=1)] == [[]]


async def test_estimates_are_not_billed() -> None:
    """Estimated cached tokens count as uncached, and so do unknown ones."""
    source = BookSource(
        [
            record_at(1),
            record_at(2, cached=Estimate(96), cached_by_tier=None, cache_write=Known(0)),
            record_at(3, cached=UNKNOWN, cached_by_tier=None, cache_write=UNKNOWN),
        ]
    )
    (bucket,) = await report(client_of(source), limit=1)
    (result,) = bucket["results"]
    assert (result["input_tokens"], result["input_cached_tokens"]) == (300, 48)
    assert result["input_uncached_tokens"] == 4 + 100 + 100


async def test_unavailable_ledger() -> None:
    """An unavailable ledger is a 503 in OpenAI's shape with Retry-After."""
    source = BookSource(error=unavailable("The usage ledger cannot be read at the moment.", "ledger_unavailable"))
    exchange, answer = await client_of(source).get(f"{OPENAI}?start_time={MIDNIGHT}")
    assert exchange.status == 503 and "retry-after" in exchange.headers
    assert answer["error"]["code"] == "ledger_unavailable"
