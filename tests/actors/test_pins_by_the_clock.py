"""`cache_control` in a whole runtime, with a mock clock: pinned prefixes stay as long as requested and block no
request.

There are 63 usable blocks, half of which may be pinned unless a test says otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
import structlog
import trio
import trio.testing

from tests.runtimes import BLOCK, Client, small_runtime
from tests.traps.wire import over_http, samples, settle
from tests.web.api.anthropic.messages_api import PATH, text, total

TTL_S = {"5m": 300, "1h": 3600}
USER = {"role": "user", "content": "what?"}
KNOTS = "The cords are counted, every one of them. " * 12


def mark(ttl: str) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", "ttl": ttl}}


def request(*system: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "demo",
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "system": [*system],
        "messages": [USER],
    }


class Chat:
    """A client of the Messages API that also fills the cache with unrelated prompts."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.http = over_http(client)
        self._num_fillers = 0

    async def usage(self, *system: dict[str, Any]) -> dict[str, Any]:
        exchange, answer = await self.http.post(PATH, request(*system))
        assert exchange.status == 200, answer
        usage: dict[str, Any] = answer["usage"]
        return usage

    async def fill(self) -> None:
        """Use more blocks than there are, but never so many at once that a pin has to yield."""
        for _ in range(8):
            self._num_fillers += 1
            ids = [(self._num_fillers * 7 + i * i) % 3000 + 300 for i in range(12 * BLOCK)]
            await self.client.ask(ids, max_tokens=1)

    def sample(self, name: str) -> float:
        return samples(self.client)[name]


async def test_marked_prefix_survives_other_prompts(autojump_clock: trio.abc.Clock) -> None:
    """A marked prefix survives, and an unmarked prompt that was used more recently does not. The next request reads as
    many tokens as were created, whatever follows the mark."""
    async with small_runtime() as client:
        chat = Chat(client)
        cold = await chat.usage(text(KNOTS, **mark("5m")))
        created = cold["cache_creation_input_tokens"]
        assert created % BLOCK == 0 and created > 5 * BLOCK
        assert chat.sample('kv_blocks{state="pinned"}') == created / BLOCK
        plain = await chat.usage(text("Nobody wants this kept. " + KNOTS))
        assert plain["cache_creation_input_tokens"] == 0
        await chat.fill()
        warm = await chat.usage(text(KNOTS, **mark("5m")), text("And now for something else. " * 3))
        assert (warm["cache_read_input_tokens"], warm["cache_creation_input_tokens"]) == (created, 0)
        again = await chat.usage(text("Nobody wants this kept. " + KNOTS))
        assert again["cache_read_input_tokens"] < BLOCK * 2
        assert chat.sample("pins_yielded_total") == 0
        await settle(client)


@pytest.mark.parametrize("ttl", ["5m", "1h"])
@pytest.mark.parametrize("marked_again", [True, False])
async def test_hit_refreshes_a_pin(ttl: str, marked_again: bool, autojump_clock: trio.abc.Clock) -> None:
    """Every hit restarts the ttl, marked or not; an expired prefix is like any other."""
    async with small_runtime() as client:
        chat = Chat(client)
        created = (await chat.usage(text(KNOTS, **mark(ttl))))["cache_creation_input_tokens"]
        for _ in range(3):
            await trio.sleep(TTL_S[ttl] - 2)
            await chat.fill()
            usage = await chat.usage(text(KNOTS, **(mark(ttl) if marked_again else {})))
            assert usage["cache_read_input_tokens"] >= created
        await trio.sleep(TTL_S[ttl] + 1)
        await chat.fill()
        assert chat.sample('kv_blocks{state="pinned"}') == 0
        assert (await chat.usage(text(KNOTS)))["cache_read_input_tokens"] == 0
        await settle(client)


async def test_nested_marks_have_their_own_ttl(autojump_clock: trio.abc.Clock) -> None:
    """With an hour for the first part and five minutes for both, only the first is cached ten minutes later."""
    first, second = text(KNOTS, **mark("1h")), text(KNOTS, **mark("5m"))
    async with small_runtime() as client:
        chat = Chat(client)
        cold = await chat.usage(first, second)
        split = cold["cache_creation"]
        assert split["ephemeral_1h_input_tokens"] > 0 < split["ephemeral_5m_input_tokens"]
        await trio.sleep(290)
        await chat.fill()
        assert (await chat.usage(first, second))["cache_read_input_tokens"] >= cold["cache_creation_input_tokens"]
        await trio.sleep(600)
        await chat.fill()
        late = await chat.usage(first, second)
        assert late["cache_read_input_tokens"] == split["ephemeral_1h_input_tokens"]
        assert late["cache_creation"] == {**split, "ephemeral_1h_input_tokens": 0}
        await settle(client)


@pytest.mark.parametrize("settings", [{"max_pinned_share": 0.0}, {"enable_prefix_caching": False}])
async def test_nothing_is_created_without_pins(settings: dict[str, Any], autojump_clock: trio.abc.Clock) -> None:
    """Without a share for pins, or without a cache, written tokens count as plain input."""
    async with small_runtime(**settings) as client:
        chat = Chat(client)
        usage = await chat.usage(text(KNOTS, **mark("5m")))
        assert usage["cache_creation_input_tokens"] == usage["cache_read_input_tokens"] == 0
        assert usage["input_tokens"] == total(usage) > 5 * BLOCK
        await settle(client)


async def test_tokens_beyond_the_share_are_not_created(autojump_clock: trio.abc.Clock) -> None:
    """Tokens up to the last mark that fits are created; the rest is written and is plain input. The record says so."""
    async with small_runtime(max_pinned_share=0.2) as client:
        chat = Chat(client)
        usage = await chat.usage(text(KNOTS, **mark("5m")), text(KNOTS, **mark("5m")))
        created = usage["cache_creation_input_tokens"]
        assert 0 < created <= 0.2 * 63 * BLOCK < total(usage)
        assert usage["input_tokens"] == total(usage) - created
        assert chat.sample('kv_blocks{state="pinned"}') == created / BLOCK
        none = await chat.usage(text("Another tenant, as it were. " + KNOTS, **mark("1h")))
        assert none["cache_creation_input_tokens"] == 0
        assert (await chat.usage(text(KNOTS), text(KNOTS)))["cache_read_input_tokens"] > created
        await settle(client)


@pytest.mark.parametrize("num_prompt_blocks", [40, 60])
async def test_pins_yield_before_requests_wait(num_prompt_blocks: int, autojump_clock: trio.abc.Clock) -> None:
    """A request that needs every block is served at once.

    Pins yield as many blocks as its admission, and later its rows, need.
    """
    async with small_runtime() as client:
        chat = Chat(client)
        await chat.usage(text(KNOTS, **mark("1h")))
        await chat.usage(text("More of it. " + KNOTS, **mark("5m")))
        pinned = chat.sample('kv_blocks{state="pinned"}')
        with structlog.testing.capture_logs() as logs:
            prompt = [300 + i for i in range(num_prompt_blocks * BLOCK)]
            num_outputs = (63 - num_prompt_blocks) * BLOCK
            answer = await client.ask(prompt, max_tokens=num_outputs, ignore_eos=True)
        assert answer.record.completion_tokens == num_outputs
        yielded = [line for line in logs if line["event"] == "pins.yielded"]
        assert sum(line["num_pins"] for line in yielded) == chat.sample("pins_yielded_total") == 2
        assert len(yielded) == (2 if num_prompt_blocks == 40 else 1), "pins must yield only when blocks are needed"
        assert chat.sample("num_preemptions_total") == 0
        assert pinned > 0 == chat.sample('kv_blocks{state="pinned"}')
        assert chat.sample('kv_blocks{state="used"}') == 0
        await settle(client)


async def test_reset_drops_pins(autojump_clock: trio.abc.Clock) -> None:
    """Pinned prefixes are dropped with everything else and can be created again."""
    async with small_runtime() as client:
        chat = Chat(client)
        cold = await chat.usage(text(KNOTS, **mark("5m")))
        client.runtime.desk.reset_prefix_cache()
        assert await chat.usage(text(KNOTS, **mark("5m"))) == cold
        await settle(client)
