"""Requests that are passed on: what the upstream gets, what the client gets, and what is booked."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio

from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.outcomes import FinishReason, Outcome
from tests.journals import KeptJournal
from tests.upstreams import ASK, CHAT, USAGE, Answering, Asked, chunk, hello, open_fake, says, whole


async def test_whole_response_is_passed_on_unchanged() -> None:
    """The client gets every byte of the upstream's answer, unknown fields and zeros included."""
    async with open_fake() as (served, _):
        response = await served.ask()
        assert response.status_code == 200
        assert response.content == json.dumps(whole()).encode()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_usage_is_booked_as_the_upstream_says(streams: bool) -> None:
    """The record, the counters and the client have the upstream's usage, and the record keeps all details."""
    async with open_fake() as (served, _):
        if streams:
            events = await served.stream(stream_options={"include_usage": True})
            told = events[-2]["usage"]
        else:
            told = (await served.ask()).json()["usage"]
        assert told == USAGE
        record = await served.record()
        assert (record.prompt, record.cached, record.cache_write) == (Known(30), Known(16), UNKNOWN)
        assert (record.completion_tokens, record.knows_completion, record.reasoning_tokens) == (2, True, 1)
        assert (record.outcome, record.finish_reason, record.num_choices) == (Outcome.FINISHED, FinishReason.STOP, 1)
        assert json.loads(record.upstream_usage) == USAGE
        assert record.cached_by_tier == {"unattributed": 16} and not record.disputed
        counters = served.counters()
        assert counters["prompt_tokens_total"] == counters["prefix_cache_queries_total"] == 30
        assert counters["prefix_cache_hits_total"] == counters['cached_tokens_total{tier="unattributed"}'] == 16
        assert counters["generation_tokens_total"] == 2 and counters["open_accounts"] == 0
        assert counters['requests_total{outcome="finished"}'] == 1


async def test_stream_shows_usage_only_if_asked() -> None:
    """Usage is always requested from the upstream; a client that did not ask for it does not see it."""
    async with open_fake() as (served, (fake,)):
        events = await served.stream()
        assert events == [
            chunk("Hello "),
            chunk("there", "stop"),
            "[DONE]",
        ]
        assert fake.asked[-1].fields["stream_options"] == {"include_usage": True}
        events = await served.stream(stream_options={"include_usage": False, "other": 1})
        assert all("usage" not in event for event in events[:-1]) and len(events) == 3
        assert fake.asked[-1].fields["stream_options"] == {"include_usage": True, "other": 1}
        events = await served.stream(stream_options={"include_usage": True})
        assert [event["usage"] for event in events[:-1]] == [None, None, USAGE]
        assert len({record.prompt for record in served.journal.closed}) == 1


async def test_body_reaches_the_upstream_as_it_came() -> None:
    """The body of a request is passed on byte for byte, with unknown fields; the client's headers are not."""
    body = json.dumps({**ASK, "of_no_known_name": [1.50, 2]}, indent=1).encode()
    async with open_fake() as (served, (fake,)):
        headers = {"Authorization": "Bearer of-the-client", "Cookie": "secret", "X-Other": "1"}
        await served.client.post(CHAT, content=body, headers=headers)
        (asked,) = fake.asked
        assert asked.body == body and asked.path == CHAT
        assert asked.headers["authorization"] == "Bearer sk-of-the-upstream"
        assert "of-the-client" not in str(asked.headers) and "cookie" not in asked.headers


async def test_completions_are_passed_on() -> None:
    """`/v1/completions` goes to the same path of the upstream."""
    async with open_fake() as (served, (fake,)):
        response = await served.client.post("/v1/completions", json={"model": "far", "prompt": "a"})
        assert response.json()["usage"] == USAGE and fake.asked[0].path == "/v1/completions"
        assert (await served.record()).endpoint == "/v1/completions"


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "usage",
    [None, {"prompt_tokens": 30, "completion_tokens": 2, "total_tokens": 32}],
    ids=["nothing", "no details"],
)
async def test_missing_counts_are_unknown(usage: Any, streams: bool) -> None:
    """A count that the upstream does not report is unknown, not 0, and no counter includes it."""
    async with open_fake(says(usage)) as (served, _):
        answer = (await served.stream(stream_options={"include_usage": True})) if streams else await served.ask()
        assert answer
        record, counters = await served.record(), served.counters()
        assert record.cached == UNKNOWN and record.cached_by_tier is None
        assert record.outcome is Outcome.FINISHED
        if usage is None:
            assert record.prompt == UNKNOWN and not record.knows_completion and record.upstream_usage is None
        else:
            assert record.prompt == Known(30) and record.knows_completion and record.completion_tokens == 2
        num_prompt = 0 if usage is None else 30
        assert counters.get("prompt_tokens_total", 0) == num_prompt
        assert counters.get("prefix_cache_hits_total", 0) == counters.get("prefix_cache_queries_total", 0) == 0


async def test_zero_is_a_number() -> None:
    """A 0 that the upstream reports is a known count."""
    usage = USAGE | {"prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0}}
    async with open_fake(says(usage)) as (served, _):
        assert (await served.ask()).json()["usage"] == usage
        record = await served.record()
        assert record.cached == Known(0) and record.cached_by_tier == {"unattributed": 0}


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ({"cached_tokens": 31, "audio_tokens": 5}, {"audio_tokens": 5}),
        ({"cached_tokens": -1}, {}),
        ({"cached_tokens": "16"}, {}),
        ({"cached_tokens": True}, {}),
    ],
)
async def test_impossible_numbers_are_not_believed(details: Any, told: Any) -> None:
    """Impossible counts are unknown in the record, are not shown to the client, and make the account disputed."""
    async with open_fake(says(USAGE | {"prompt_tokens_details": details})) as (served, _):
        usage = (await served.ask()).json()["usage"]
        assert usage == USAGE | {"prompt_tokens_details": told}
        record = await served.record()
        assert record.cached == UNKNOWN and record.prompt == Known(30) and record.disputed
        assert served.counters()["usage_disputed_total"] == 1
        assert served.counters()["prefix_cache_hits_total"] == 0


async def test_impossible_prompt_length_leaves_no_usage() -> None:
    """If the prompt length is impossible, the client gets no usage, and the record's counts are unknown."""
    async with open_fake(says(USAGE | {"prompt_tokens": -3})) as (served, _):
        assert (await served.ask()).json()["usage"] is None
        record = await served.record()
        assert record.prompt == UNKNOWN and record.cached == UNKNOWN and record.disputed
        assert "prompt_tokens_total" not in {k for k, v in served.counters().items() if v}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_overlong_usage_is_dropped(streams: bool) -> None:
    """Usage of excessive length is neither shown nor booked, and the account is disputed."""
    async with open_fake(says(USAGE | {"more": ["x" * 100] * 200})) as (served, _):
        if streams:
            events = await served.stream(stream_options={"include_usage": True})
            assert [event["usage"] for event in events[:-1]] == [None, None, None]
        else:
            assert (await served.ask()).json()["usage"] is None
        record = await served.record()
        assert record.prompt == UNKNOWN and record.disputed and record.upstream_usage is None


async def test_large_answers_are_read_as_small_ones() -> None:
    """Usage and finish reasons of a large answer count, for at most 1,024 choices; `"error": null` is no error."""

    async def script(asked: Asked, answering: Answering) -> None:
        choices = [{"index": index, "finish_reason": "length"} for index in range(2000)]
        body = {"error": None, "text": "x" * 100_000, "choices": choices, "usage": USAGE}
        await answering.whole(json.dumps(body).encode())

    async with open_fake(script) as (served, _):
        answer = (await served.ask()).json()
        assert answer["usage"] == USAGE and len(answer["choices"]) == 2000
        record = await served.record()
        assert (record.prompt, record.finish_reason, record.num_choices) == (Known(30), FinishReason.LENGTH, 1024)


class HeldJournal(KeptJournal):
    """A journal that stores nothing while it is held."""

    is_held = True

    def flush(self) -> None:
        if not self.is_held:
            super().flush()


async def test_last_bytes_follow_the_record() -> None:
    """The client gets the end of a stream, and a whole response, only after the journal has stored its record."""
    journal = HeldJournal()
    async with open_fake(journal=journal) as (served, _):
        async with served.client.stream("POST", CHAT, json=ASK | {"stream": True}) as response:
            parts = response.aiter_text()
            text = await anext(parts)
            while not journal.closed:
                await trio.sleep(0.002)
            while "there" not in text:
                text += await anext(parts)
            with trio.move_on_after(0.05):
                text += await anext(parts)
            assert "[DONE]" not in text
        journal.closed.clear()
        answers: list[Any] = []

        async def ask() -> None:
            answers.append(await served.ask())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while not journal.closed:
                await trio.sleep(0.002)
            await trio.sleep(0.05)
            assert not answers
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_the_upstreams_request(streams: bool) -> None:
    """If a client leaves, the connection to the upstream is closed, and unknown counts are not booked as 0."""

    async def endless(asked: Asked, answering: Answering) -> None:
        if streams:
            await answering.begin()
            await answering.event(chunk("Hello "))
        await answering.left.wait()

    async with open_fake(endless) as (served, (fake,)):
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with served.client.stream("POST", CHAT, json=ASK | {"stream": streams}) as response:
                    async for _ in response.aiter_raw():
                        pass

            nursery.start_soon(ask)
            while not fake.answerings:
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            nursery.cancel_scope.cancel()
        await fake.answerings[0].left.wait()
        record = await served.record()
        assert record.outcome is Outcome.CANCELLED and record.prompt == UNKNOWN
        assert served.counters()["num_requests_running"] == 0


async def test_a_slow_client_slows_only_its_own_upstream() -> None:
    """An upstream's answer is read no faster than its client reads, and others are served meanwhile."""
    sent = 0

    async def flood(asked: Asked, answering: Answering) -> None:
        nonlocal sent
        if "slow" not in asked.fields:
            await hello(asked, answering)
            return
        await answering.begin()
        event = chunk("x" * 50_000)
        for _ in range(400):
            await answering.event(event)
            sent += 1
        await answering.event(chunk("", "stop"))
        await answering.event(b"[DONE]")
        await answering.end()

    async with open_fake(flood) as (served, _):
        async with served.client.stream("POST", CHAT, json=ASK | {"stream": True, "slow": True}) as response:
            await trio.testing.wait_all_tasks_blocked(0.2)
            stalled = sent
            assert 0 < stalled < 350
            assert (await served.ask()).status_code == 200
            num_bytes = 0
            async for part in response.aiter_raw():
                num_bytes += len(part)
        assert sent == 400 and num_bytes > 400 * 50_000
