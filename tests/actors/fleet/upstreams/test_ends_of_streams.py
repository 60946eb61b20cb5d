"""Ends of upstreams' streams: what a client is told, and what is counted, if there is no good end."""

from __future__ import annotations

import json

import pytest

from quipu.actors.messages.counts import UNKNOWN
from quipu.actors.messages.outcomes import Outcome
from quipu.web.options import AppOptions
from tests.journals import KeptJournal
from tests.upstreams import USAGE, Answering, Asked, Script, chunk, events_of, hello, open_fake


class HeldJournal(KeptJournal):
    """A journal on a disk that fails."""

    is_held = True

    def flush(self) -> None:
        if not self.is_held:
            super().flush()


async def test_deadline_after_the_last_event() -> None:
    """At its deadline a client whose record cannot be written gets an error, and not the end of the stream."""
    journal = HeldJournal()
    options = AppOptions(request_timeout_s=0.3)
    async with open_fake(hello, journal=journal, options=options) as (served, _):
        told = await served.stream(stream_options={"include_usage": True})
        assert "longer than 0.3 seconds" in told[-2]["error"]["message"] and told.count("[DONE]") == 1
        assert not any(isinstance(one, dict) and one.get("usage") for one in told)
        assert (await served.ask()).status_code == 504
        journal.is_held = False
        journal.flush()
    assert [record.completion_tokens for record in journal.closed] == [2, 2]


async def send_usage_first(asked: Asked, answering: Answering) -> None:
    await answering.begin()
    await answering.event(chunk(None, usage=USAGE))
    await answering.cut()


async def send_usage_unheard(asked: Asked, answering: Answering) -> None:
    """Send a usage that is told under other names, where it cannot be found to be replaced."""
    usage = {"prompt_tokens": 30, "completion_tokens": 2, "prompt_cache_hit_tokens": 16}
    others = {f"x{number}": {"usage": 0} for number in range(100)}
    await answering.whole(json.dumps({**others, "choices": [{"index": 0}], "usage": usage, "y": others}).encode())


@pytest.mark.parametrize(("script", "streams"), [(send_usage_first, True), (send_usage_unheard, False)])
async def test_usage_of_an_answer_that_nobody_got(script: Script, streams: bool) -> None:
    """Usage of an attempt of which the client got nothing is not counted, whoever answers in the end."""
    async with open_fake(script) as (served, _):
        assert (await served.ask(stream=streams)).status_code == 502
        record = await served.record()
        assert (record.outcome, record.prompt, record.cached) == (Outcome.FAILED, UNKNOWN, UNKNOWN)
        assert not record.completion_tokens and not served.counters().get("prompt_tokens_total")


async def test_data_on_several_lines() -> None:
    """An event whose data is on several lines reaches the client as one event with that data."""
    one = json.dumps(chunk("Hello there", "stop"), indent=1).replace("\n", "\ndata: ")

    async def send_lines(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.send(f"data: {one}\n\ndata: [DONE]\n\n".encode())
        await answering.end()

    async def fail_on_lines(asked: Asked, answering: Answering) -> None:
        await answering.begin()
        await answering.event(chunk("Hello "))
        await answering.send(b'data: {"error":\ndata: {"message": "its own words"}}\n\n')
        await answering.end()

    async with open_fake(send_lines) as (served, fakes):
        answer = await served.ask(stream=True)
        assert all(line.startswith("data: ") for line in answer.text.split("\n") if line), answer.text
        told = events_of(answer.text)
        assert told[0]["choices"][0]["delta"]["content"] == "Hello there" and told[1:] == ["[DONE]"]
        fakes[0].script = fail_on_lines
        answer = await served.ask(stream=True)
        assert all(line.startswith("data: ") for line in answer.text.split("\n") if line), answer.text
        assert events_of(answer.text)[1] == {"error": {"message": "its own words"}}
