"""Upstreams that answer requests and probes with random bytes: only their own requests fail, and counts are possible.

`python -m bench.stalls --fuzz N` sends many more of them to a real server.
"""

from __future__ import annotations

import json

import pytest
import structlog.testing
import trio

from bench.stalls.drawn_answers import drawn_answer
from quipu.actors.fleet.upstreams import actor
from quipu.actors.messages.counts import MAX_COUNT, Known
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.request_desk import upstream_pool
from tests.upstreams import Answering, Asked, hello, open_fake, whole

NUM_ANSWERS = 250
NUM_PROBES = 60


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
async def test_answers(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    """Each request ends with one record whose counts are possible, and the next one gets its own answer."""
    monkeypatch.setattr(actor, "REST_S", 0.001)
    statuses = set()

    async def script(asked: Asked, answering: Answering) -> None:
        number = asked.fields.get("user")
        if number is None:
            await hello(asked, answering)
            return
        drawn = drawn_answer(int(number), streams=streams)
        await answering.stream.send_all(drawn.data)
        if drawn.closes:
            await answering.cut()

    with structlog.testing.capture_logs() as lines:
        async with open_fake(script) as (served, _):
            for number in range(NUM_ANSWERS):
                answer = await served.ask(user=str(number), stream=streams)
                statuses.add(answer.status_code)
                assert answer.status_code in (200, 502, 503) or 400 <= answer.status_code < 500, number
                if number % 5 == 0:
                    assert (await served.ask()).json() == whole()
            while len(served.journal.closed) < NUM_ANSWERS + NUM_ANSWERS // 5:
                await trio.sleep(0.001)
            records = served.journal.closed
    assert {200, 502} <= statuses and {Outcome.FINISHED, Outcome.FAILED} <= {record.outcome for record in records}
    assert len({record.request_id for record in records}) == len(records)
    for record in records:
        counts = [count.n for count in (record.prompt, record.cached, record.cache_write) if isinstance(count, Known)]
        assert all(0 <= count <= MAX_COUNT for count in [*counts, record.completion_tokens])
        if isinstance(record.cached, Known) and isinstance(record.cache_write, Known):
            assert isinstance(record.prompt, Known)
            assert record.cached.n + record.cache_write.n <= record.prompt.n
    assert not [line for line in lines if "crashed" in line["event"]]


async def test_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever probes are answered with, probing goes on, and the other upstream serves."""
    monkeypatch.setattr(upstream_pool, "PROBE_S", 0.002)
    monkeypatch.setattr(upstream_pool, "FIRST_BACKOFF_S", 0.002)
    monkeypatch.setattr(upstream_pool, "MAX_BACKOFF_S", 0.002)
    numbers = iter(range(10**6))

    async def probe(asked: Asked, answering: Answering) -> None:
        drawn = drawn_answer(next(numbers), streams=False)
        models = json.dumps({"data": [{"id": "far", "max_model_len": 10**25}]}).encode()
        await answering.stream.send_all(drawn.data.replace(b'"choices"', b'"data":' + models[8:-1] + b',"x"'))
        if drawn.closes:
            await answering.cut()

    with structlog.testing.capture_logs() as lines:
        async with open_fake(hello, hello) as (served, (drawn, _)):
            drawn.probe = probe
            while drawn.num_probes < NUM_PROBES:
                await trio.sleep(0.001)
            assert (await served.ask()).json() == whole()
            assert (await served.client.get("/v1/models")).status_code == 200
            assert (await served.client.get("/server_info")).status_code == 200
    assert not [line for line in lines if "crashed" in line["event"]]
