"""The ledger has no room: new requests get an error that says when to retry, and nothing of them is counted.

Requests admitted before have their room and continue; once there is room again, new requests are served.
"""

from __future__ import annotations

from typing import Any

import pytest
import structlog.testing
import trio

from quipu.actors.messages.counts import UNKNOWN
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.usage_record import UsageRecord
from tests.fake_oracle import continuation
from tests.journals import KeptJournal
from tests.runtimes import Client, small_runtime, text_of
from tests.traps.wire import CHAT, COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle

PROMPT = prompt_of(50)
MESSAGES = [{"role": "user", "content": "why is that so? " * 5}]
REQUESTS: list[Any] = [
    pytest.param(COMPLETIONS, body(PROMPT), 503, id="completions"),
    pytest.param(COMPLETIONS, body(PROMPT, **STREAMED), 503, id="completions, streamed"),
    pytest.param(COMPLETIONS, body([PROMPT, PROMPT[:20]], n=2), 503, id="prompts and choices"),
    pytest.param(CHAT, {"model": "demo", "messages": MESSAGES}, 503, id="chat"),
    pytest.param(CHAT, {"model": "demo", "messages": MESSAGES, **STREAMED}, 503, id="chat, streamed"),
    pytest.param("/v1/messages", {"model": "demo", "messages": MESSAGES, "max_tokens": 8}, 529, id="messages"),
    pytest.param("/v1/responses", {"model": "demo", "input": "why is that so?"}, 503, id="responses"),
]
COUNTED = (
    "prompt_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "generation_tokens_total",
    "request_cached_tokens_count",
    "time_to_first_token_seconds_count",
    "usage_disputed_total",
)


def full(record: UsageRecord) -> bool:
    return False


@pytest.mark.parametrize(("path", "request_body", "status"), REQUESTS)
async def test_refused_for_lack_of_room(
    autojump_clock: trio.abc.Clock, path: str, request_body: dict[str, Any], status: int
) -> None:
    """The client gets an error in its API's shape with Retry-After; the request is rejected, its counts are unknown and
    in no sum; blocks and sequences are free again."""
    journal = KeptJournal(has_room=full)
    async with small_runtime(journal=journal) as client:
        http = over_http(client)
        with structlog.testing.capture_logs() as lines:
            exchange, answer = await http.post(path, request_body)
            await settle(client)
        after, stats = samples(client), client.runtime.entry_store.stats.fields()
        journal.has_room = lambda record: True
        served, _ = await http.post(path, {**request_body, "stream": False, "stream_options": None})
        await settle(client)
    assert exchange.status == status
    assert int(exchange.headers["retry-after"]) >= 1
    assert "ledger" in answer["error"]["message"]
    assert answer["error"]["type"] == ("overloaded_error" if status == 529 else "service_unavailable")
    record = journal.closed[0]
    assert record.outcome is Outcome.REJECTED
    assert record.prompt == record.cached == record.cache_write == UNKNOWN
    assert record.completion_tokens == 0
    assert record.admitted_at is record.first_token_at is None
    assert after['requests_total{outcome="rejected"}'] == 1
    assert [after[name] for name in COUNTED] == [0] * len(COUNTED)
    assert sum(stats.values()) == 0
    assert not any(line["event"] == "prefix_cache.stats" for line in lines)
    assert served.status == 200
    assert {record.request_id for record in journal.admitted} == {journal.closed[1].request_id}


async def test_admitted_requests_continue(autojump_clock: trio.abc.Clock) -> None:
    """Requests before and after are served completely while one between them is refused."""
    journal = KeptJournal()
    answers: dict[str, Any] = {}
    async with small_runtime(journal=journal) as client:

        async def ask(name: str, prompt: list[int]) -> None:
            answers[name] = (await over_http(client).post(COMPLETIONS, body(prompt, max_tokens=30)))[1]

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "before", PROMPT)
            await trio.sleep(0.0653)
            journal.has_room = full
            nursery.start_soon(ask, "between", PROMPT)
            await trio.sleep(0.0453)
            assert "error" in answers["between"]
            journal.has_room = lambda record: True
            nursery.start_soon(ask, "after", PROMPT)
        await settle(client)
        after = samples(client)
    for name in ("before", "after"):
        assert answers[name]["choices"][0]["text"] == text_of(continuation(PROMPT, 30))
    assert answers["after"]["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert after["prompt_tokens_total"] == 100
    assert after["prefix_cache_hits_total"] == 48
    assert after["usage_disputed_total"] == 0


async def test_later_prompts_are_counted_without_room(autojump_clock: trio.abc.Clock) -> None:
    """A request admitted with its first prompt will have a closing record, so its other prompts are counted."""
    journal = KeptJournal()
    journal.has_room = lambda record: not journal.open

    async def ask(client: Client) -> dict[str, Any]:
        answer = (await over_http(client).post(COMPLETIONS, body([PROMPT, PROMPT[:20]])))[1]
        assert isinstance(answer, dict)
        return answer

    async with small_runtime(journal=journal, max_num_seqs=1) as client:
        answer = await ask(client)
        await settle(client)
        after = samples(client)
    assert answer["usage"]["prompt_tokens"] == after["prompt_tokens_total"] == 70
    assert [record.prompt_tokens for record in journal.closed] == [70]
