"""Engines that lose their connection and come back: all of quipu in one loop, with engines that read their KV."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.scheduler import ResetPrefixCache
from quipu.actors.router.key_index import DIGEST_BYTES
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.rejoining_host import RejoiningHost
from tests.runtimes import BLOCK, Answer, Client, most_tokens, small_runtime, text_of
from tests.traps.wire import settle


def num_tokens() -> int:
    """Return the length of an answer that takes about forty steps."""
    return 20 * (most_tokens.get() + 1)


def host_of(client: Client, index: int = 0) -> RejoiningHost:
    host = client.runtime.hosts[index]
    assert isinstance(host, RejoiningHost)
    return host


def assert_router_knows(client: Client) -> None:
    """Assert that the router's index has exactly the keys that each engine has committed."""
    routes = client.runtime.route_store
    for engine_id in client.runtime.hosts:
        kept = host_of(client, engine_id).kept
        assert kept is not None
        known = routes.routing.index.keys_of(routes.engines[engine_id].slot)
        assert known == {key[:DIGEST_BYTES] for key in kept.block_manager.pool.state().committed_keys()}


async def ask_all(client: Client, cuts: list[float]) -> list[Answer]:
    """Ask for twelve answers, and cut the first engine's connection at these times."""
    answers: dict[int, Answer] = {}

    async def ask(index: int) -> None:
        answers[index] = await client.ask(prompt_of(70, index), max_tokens=num_tokens(), n=1 + index % 2)

    async def cut(at: float) -> None:
        await trio.sleep(at)
        host_of(client).cut()

    async with trio.open_nursery() as nursery:
        for index in range(12):
            nursery.start_soon(ask, index)
        for at in cuts:
            nursery.start_soon(cut, at)
    await settle(client)
    return [answers[index] for index in range(12)]


@pytest.mark.parametrize("num_blocks", [24, 120], ids=["preempting", "roomy"])
@pytest.mark.parametrize("cuts", [[0.005], [0.13], [0.237], [0.1, 0.3, 0.5]], ids=str)
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_requests_go_on(
    autojump_clock: trio.abc.Clock, cuts: list[float], num_blocks: int, num_engines: int
) -> None:
    """Wherever the connection is cut, the answers are the same, each token comes once, and the accounts add up."""
    num_blocks = num_blocks * num_tokens() // 40
    changes = {"num_blocks": num_blocks, "max_model_len": 320, "num_engines": num_engines}
    async with small_runtime(make_host=RejoiningHost, **changes) as client:
        engines = client.engines
        for index, answer in enumerate(await ask_all(client, cuts)):
            expected = text_of(continuation(prompt_of(70, index), num_tokens()))
            assert answer.error is None and set(answer.texts.values()) == {expected}
            assert not answer.record.disputed and answer.record.prompt_tokens == 70
            assert answer.record.completion_tokens == num_tokens() * (1 + index % 2)
        assert client.engines == engines, "none was loaded again"
        assert client.runtime.desk.engines()[0].deaths == len(cuts)
        assert client.runtime.desk.health().incarnation == num_engines + len(cuts)
        assert_router_knows(client)


async def test_cache_is_kept(autojump_clock: trio.abc.Clock) -> None:
    """A prompt cached before the cut is a hit after the engine has rejoined, and the router expects it at once."""
    async with small_runtime(make_host=RejoiningHost) as client:
        await client.ask(prompt_of(4 * BLOCK + 1))
        host_of(client).cut()
        await trio.sleep(1)
        assert client.runtime.desk.health().incarnation == 2
        assert_router_knows(client)
        assert len(client.runtime.route_store.routing.index.keys_of(client.runtime.route_store.engines[0].slot)) >= 4
        answer = await client.ask(prompt_of(4 * BLOCK + 1))
        assert answer.record.cached_tokens == 4 * BLOCK and not answer.record.disputed
        await settle(client)


@pytest.mark.parametrize("is_lost", [True, False])
async def test_reset_on_its_way(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, is_lost: bool) -> None:
    """A reset that was on its way when the connection was cut is made once the engine is back, and no other is."""
    async with small_runtime(make_host=RejoiningHost) as client:
        await client.ask(prompt_of(4 * BLOCK + 1))
        kept = host_of(client).kept
        assert kept is not None
        with monkeypatch.context() as cut_off:
            receive = kept.receive

            async def receive_others(message: Any) -> None:
                if not isinstance(message, ResetPrefixCache):
                    await receive(message)

            if is_lost:
                cut_off.setattr(kept, "receive", receive_others)
            client.runtime.desk.reset_prefix_cache()
            await trio.sleep(0.1)
            before = await client.ask(prompt_of(4 * BLOCK + 1))
            assert before.record.cached_tokens == (4 * BLOCK if is_lost else 0)
            host_of(client).cut()
            await trio.sleep(0.001)
        await trio.sleep(1)
        assert client.runtime.desk.health().incarnation == 2
        after = await client.ask(prompt_of(4 * BLOCK + 1))
        assert after.record.cached_tokens == (0 if is_lost else 4 * BLOCK) and not after.record.disputed
        await settle(client)
        assert_router_knows(client)
