"""Usage in every chunk: clients that leave are booked with the last one, and only those that asked for it see it."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.counts import UNKNOWN, Known
from quipu.actors.messages.outcomes import Outcome
from tests.upstreams import ASK, CHAT, USAGE, Answering, Asked, chunk, open_fake

SO_FAR: dict[str, Any] = {"prompt_tokens": 30, "completion_tokens": 1, "total_tokens": 31}


async def counting(asked: Asked, answering: Answering) -> None:
    """Answer as vLLM does: with usage in chunks if it was asked for, and without the field if it was not."""
    options = asked.fields["stream_options"]
    fields = {"usage": SO_FAR} if options.get("continuous_usage_stats") else {}
    await answering.begin()
    await answering.event(chunk("Hello ", **fields))
    if asked.fields.get("user") == "leaves":
        await answering.left.wait()
        return
    await answering.event(chunk("there", "stop", **fields))
    await answering.event(chunk(None, usage=USAGE))
    await answering.event(b"[DONE]")
    await answering.end()


async def test_asked_for_only_where_it_is_known() -> None:
    """Usage in chunks is requested only from upstreams that are known to have it: others might refuse the field."""
    for is_known in (True, False):
        async with open_fake(counting, continuous_usage=is_known) as (served, (fake,)):
            await served.stream()
            await served.stream(stream_options={"include_usage": True, "continuous_usage_stats": False, "other": 1})
            first, second = (asked.fields["stream_options"] for asked in fake.asked)
            assert first == {"include_usage": True} | ({"continuous_usage_stats": True} if is_known else {})
            assert second == {"include_usage": True, "continuous_usage_stats": is_known, "other": 1}


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (None, ["absent", "absent"]),
        ({}, ["absent", "absent"]),
        ({"include_usage": False, "continuous_usage_stats": True}, ["absent", "absent"]),
        ({"include_usage": True}, [None, None, USAGE]),
        ({"include_usage": True, "continuous_usage_stats": True}, [SO_FAR, SO_FAR, USAGE]),
    ],
)
async def test_clients_see_what_they_asked_for(options: Any, seen: list[Any]) -> None:
    """Clients see usage in chunks only if they asked for it; nothing else in chunks or the record differs."""
    async with open_fake(counting, continuous_usage=True) as (served, _):
        fields = {} if options is None else {"stream_options": options}
        *events, done = await served.stream(**fields)
        assert done == "[DONE]" and [event.pop("usage", "absent") for event in events] == seen
        assert events[:2] == [chunk("Hello "), chunk("there", "stop")]
        record = await served.record()
        assert (record.prompt, record.completion_tokens) == (Known(30), 2)


@pytest.mark.parametrize("num_choices", [1, 2])
async def test_client_that_leaves_is_booked_with_the_last_usage(num_choices: int) -> None:
    """The last usage is booked; with several choices, whose chunks may count only their own, only the prompt is."""
    async with open_fake(counting, continuous_usage=True) as (served, (fake,)):
        asked = ASK | {"stream": True, "user": "leaves", "n": num_choices}
        text = ""

        async def read_on() -> None:
            nonlocal text
            async with served.client.stream("POST", CHAT, json=asked) as response:
                async for part in response.aiter_text():
                    text += part

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_on)
            while "Hello" not in text:
                await trio.sleep(0.002)
            nursery.cancel_scope.cancel()
        assert "usage" not in text
        await fake.answerings[0].left.wait()
        record = await served.record()
        assert record.outcome is Outcome.CANCELLED and not record.disputed
        assert (record.prompt, record.cached) == (Known(30), UNKNOWN)
        is_known = num_choices == 1
        assert (record.completion_tokens, record.knows_completion) == ((1, True) if is_known else (0, False))
        while served.counters()["open_accounts"]:
            await trio.sleep(0.002)
        counters = served.counters()
        assert counters["prompt_tokens_total"] == 30
        assert counters.get("generation_tokens_total", 0) == (1 if is_known else 0)
