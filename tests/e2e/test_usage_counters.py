"""Counters match the usage in responses; the log has no content. Bad requests leave no trace in the counters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.prompts import text_prompt, token_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually
from tests.e2e.streams import streaming

COUNTERS = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total", "prefix_cache_queries_total")


def increase(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}


def test_counters_match_responses(fake: Server) -> None:
    """Once no account is open, the counters have increased by the sums of all usage that was sent."""
    shared = token_prompt("books", 100)
    bodies: list[dict[str, Any]] = [
        *({"prompt": shared[: 20 + 7 * index], "max_tokens": 3 + index} for index in range(8)),
        {"prompt": [shared[:50], shared[:90]], "n": 2, "temperature": 0.5},
        {"prompt": text_prompt("books", 30), "n": 3},
        {"prompt": shared, "stop_token_ids": list(range(32, 100)), "max_tokens": 50},
        {"prompt": shared, "stop": ["a", "b", "c", "d"], "max_tokens": 50},
    ]
    before = fake.wait_at_rest()
    with ThreadPoolExecutor(8) as pool:
        answers = [answer.json()["usage"] for answer in pool.map(lambda body: fake.complete(**body), bodies)]
        with streaming(fake, shared, 30) as stream:
            stream.read_all()
    assert stream.usage is not None
    usages = [*answers, stream.usage]
    after = fake.wait_at_rest()
    increased = increase(before, after)
    prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    cached_tokens = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert increased["prompt_tokens_total"] == increased["prefix_cache_queries_total"] == prompt_tokens
    assert increased['cached_tokens_total{tier="device"}'] == increased["prefix_cache_hits_total"] == cached_tokens > 0
    assert increased["generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    assert increased['requests_total{outcome="finished"}'] == len(usages)
    assert increased["request_cached_tokens_sum"] == cached_tokens
    assert after["open_accounts"] == after['kv_blocks{state="used"}'] == after["kv_cache_usage_ratio"] == 0
    assert after["usage_disputed_total"] == 0
    totals = (after["prompt_tokens_total"], after["prefix_cache_hits_total"])

    def last_logged() -> tuple[float, float]:
        stats = fake.events("prefix_cache.stats")[-1]
        return stats["total_prompt_tokens"], stats["total_cached_tokens"]

    eventually(lambda: last_logged() == totals, "the log has the counters' sums")


def test_disconnect_is_counted(fake: Server) -> None:
    """A stream dropped by its client is cancelled: its tokens are counted, its blocks are freed."""
    prompt = token_prompt("leaver", 60)
    before = fake.wait_at_rest()
    with streaming(fake, prompt, 4000):
        pass
    increased = increase(before, fake.wait_at_rest())
    assert increased['requests_total{outcome="cancelled"}'] == 1
    assert increased["prompt_tokens_total"] == 60 and increased["generation_tokens_total"] >= 1


def request_lines(server: Server, request_id: str) -> list[dict[str, Any]]:
    return [line for line in server.events("request.done") if line["request_id"] == request_id]


def test_request_ids(fake: Server) -> None:
    """A client's request id is echoed and logged with the server's; without one, the server's is sent."""
    answer = fake.complete("ids")
    assert answer.headers["X-Request-Id"] == answer.headers["X-Quipu-Request-Id"] in answer.json()["id"]
    body = {"model": "demo", "prompt": "ids", "max_tokens": 2}
    for _ in range(2):  # the same id twice: it does not have to be unique
        named = fake.post("/v1/completions", body, headers={"X-Request-Id": "trace-7b/42"})
        assert named.headers["X-Request-Id"] == "trace-7b/42"
        own = named.headers["X-Quipu-Request-Id"]
        lines = eventually(lambda own=own: request_lines(fake, own), "the request's line is written")
        assert [line["client_request_id"] for line in lines] == ["trace-7b/42"]


def test_no_content_in_log(tiny: Server) -> None:
    """At debug level, the log has no part of a prompt, of an output or of a list of token ids."""
    secret = "Xylophonquarz"
    with tiny.client() as client:
        answers = [
            client.completions.create(model="demo", prompt=f"{secret} and more", max_tokens=40, seed=3).choices[0].text,
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": secret}], max_tokens=40, seed=4, stop=[secret]
            )
            .choices[0]
            .message.content
            or "",
        ]
    refused = [
        tiny.complete(secret, temperature=9),
        tiny.complete(secret, max_tokens=10**6),
        tiny.complete([secret, 7]),
        tiny.post("/v1/completions", {"model": secret, "prompt": "x"}),
        httpx.post(tiny.url + "/v1/completions", content=f'{{"prompt": "{secret}'.encode(), timeout=PATIENCE_S),
        tiny.get(f"/v1/{secret}?q={secret}"),
    ]
    assert all(400 <= answer.status_code < 500 for answer in refused)
    ids = token_prompt("ids in the log", 12)
    tiny.complete(ids)
    eventually(lambda: len(tiny.events("account.closed")) >= 4, "the accounts' lines are written")
    log_text = tiny.log_text
    assert secret not in log_text
    assert f"{ids[3]},{ids[4]}" not in log_text and f"{ids[3]}, {ids[4]}" not in log_text
    for answer in answers:
        windows = {answer[at : at + 12] for at in range(len(answer) - 12)}
        assert len(windows) > 30
        assert not [window for window in windows if window in log_text]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_bad_requests(fake: Server, stream: bool) -> None:
    """A request that cannot start gets an error status and an error that names the field, also when streaming."""
    before = fake.wait_at_rest()
    num_context = fake.get("/v1/models").json()["data"][0]["max_model_len"]
    tokens = [7] * num_context
    table: list[tuple[dict[str, Any], int, str | None, str]] = [
        ({"model": "nobody"}, 404, "model", "model_not_found"),
        ({"prompt": tokens}, 400, "prompt", "context_length_exceeded"),
        ({"prompt": "list " * num_context}, 400, "prompt", "context_length_exceeded"),
        ({"max_tokens": num_context}, 400, "max_tokens", "context_length_exceeded"),
        ({"prompt": ""}, 400, "prompt", "invalid_value"),
        ({"top_p": 2}, 400, "top_p", "invalid_value"),
    ]
    for fields, status, param, code in table:
        answer = fake.complete(**{"prompt": "x", "stream": stream, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
        assert error["code"] in (code, None), error
    content = b'{"model": "demo", "prompt": '
    answer = httpx.post(fake.url + "/v1/completions", content=content, timeout=PATIENCE_S)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_json"
    increased = increase(before, fake.wait_at_rest())
    assert not [name for name in COUNTERS if name in increased]
