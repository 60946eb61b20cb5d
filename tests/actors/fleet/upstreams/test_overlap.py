"""Requests go where their prompts are cached according to KV events, which are only ever reported as estimates."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import trio
import zmq

from quipu.actors.config.upstream_config import UpstreamConfig
from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from tests.tiny import TINY
from tests.upstreams import USAGE, FakeUpstream, Served, open_served, says

SIZE = 16
PROMPT = list(range(300, 350))
BARE = {"prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52}


class Publisher:
    """Publishes what a cache holds, as vLLM does."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._number = 0

    async def wait_subscribed(self) -> None:
        while not await trio.to_thread.run_sync(self._socket.poll, 1000):
            pass
        self._socket.recv()

    def publish(self, *events: list[Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, events])
        self._socket.send_multipart((b"", self._number.to_bytes(8, "big"), payload))
        self._number += 1

    def store(self, tokens: list[int]) -> None:
        names = list(range(1, 1 + len(tokens) // SIZE))
        self.publish(["BlockStored", names, None, tokens[: len(names) * SIZE], SIZE, None, "GPU", None])

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def open_publishing(usage: Any) -> AsyncIterator[tuple[Served, list[FakeUpstream], list[Publisher]]]:
    """Serve two fake upstreams that publish events and say `usage`."""
    fakes, publishers = [FakeUpstream(says(usage)) for _ in range(2)], [Publisher() for _ in range(2)]
    async with trio.open_nursery() as nursery:
        for fake in fakes:
            await nursery.start(fake.run)
        configs = [
            UpstreamConfig(url=fake.url, kv_events=publisher.endpoint, tokenizer=str(TINY))
            for fake, publisher in zip(fakes, publishers, strict=True)
        ]
        try:
            async with open_served(*configs) as served:
                for publisher in publishers:
                    await publisher.wait_subscribed()
                yield served, fakes, publishers
        finally:
            for publisher in publishers:
                publisher.close()
        nursery.cancel_scope.cancel()


async def wait_known(served: Served, index: int, num_blocks: int) -> None:
    while list(served.pool)[index].num_blocks_known != num_blocks:
        await trio.sleep(0.005)


async def complete(served: Served, **fields: Any) -> dict[str, Any]:
    fields = {"model": "far", "prompt": PROMPT, "max_tokens": 2} | fields
    response = await served.client.post("/v1/completions", json=fields)
    assert response.status_code == 200
    usage: dict[str, Any] = response.json()["usage"]
    return usage


async def test_prompts_follow_their_blocks() -> None:
    """A request goes to the upstream that has its prefix in its cache, as long as it has it."""
    async with open_publishing(BARE) as (served, fakes, publishers):
        publishers[1].store(PROMPT)
        await wait_known(served, 1, 3)
        for _ in range(3):
            await complete(served)
        assert [len(fake.asked) for fake in fakes] == [0, 3]
        assert {record.router_estimate for record in served.journal.closed} == {48}
        publishers[1].publish(["AllBlocksCleared"])
        await wait_known(served, 1, 0)
        await complete(served)
        assert served.journal.closed[-1].router_estimate in (0, None), "the prefix must not be known anywhere"
        num_asked = [len(fake.asked) for fake in fakes]
        publishers[0].store(PROMPT)
        await wait_known(served, 0, 3)
        await complete(served)
        assert [len(fake.asked) for fake in fakes] == [num_asked[0] + 1, num_asked[1]]


async def test_estimate_is_told_only_to_who_asks() -> None:
    """If an upstream counts no cached tokens, the record has an estimate, and clients that ask see it; counters do not
    include it."""
    async with open_publishing(BARE) as (served, _, publishers):
        publishers[0].store(PROMPT)
        await wait_known(served, 0, 3)
        assert await complete(served) == BARE
        asked = await complete(served, return_cached_tokens_details=True)
        assert asked == BARE | {"prompt_tokens_details": {"cached_tokens_estimate": 48}}
        assert [record.cached for record in served.journal.closed] == [Estimate(48)] * 2
        counters = served.counters()
        assert counters["prompt_tokens_total"] == 100 and counters.get("prefix_cache_hits_total", 0) == 0


async def test_estimate_never_replaces_a_count() -> None:
    """If the upstream counts cached tokens, its count is reported and booked, also for clients that ask for details."""
    async with open_publishing(USAGE) as (served, _, publishers):
        publishers[0].store(PROMPT)
        await wait_known(served, 0, 3)
        assert await complete(served, return_cached_tokens_details=True) == USAGE
        (record,) = served.journal.closed
        assert (record.cached, record.router_estimate) == (Known(16), 48)


async def test_salted_prompts_have_no_estimate() -> None:
    """Blocks with the same tokens and another salt do not count for a salted prompt."""
    async with open_publishing(BARE) as (served, _, publishers):
        publishers[0].store(PROMPT)
        await wait_known(served, 0, 3)
        await complete(served, cache_salt="s")
        (record,) = served.journal.closed
        assert record.cached == UNKNOWN and record.router_estimate is None
