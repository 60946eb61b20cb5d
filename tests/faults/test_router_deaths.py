"""The router is killed, at any message and in the middle of handling it: every request is served, and counted once.

Its successors continue from the route store, and know exactly what the engines have cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.router.dispatch import Dispatch
from quipu.actors.router.paired_prompts import PairedPrompts
from quipu.actors.router.pairs import PairPolicy
from quipu.actors.router.resuming import Resuming
from quipu.actors.router.routing import Routing
from tests.actors.key_reader import committed_in
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, small_runtime, text_of
from tests.traps.wire import samples, settle

NUM_REQUESTS = 12
TURNS = 2
NUM_TOKENS = BLOCK - 6
"""Of an answer: with its prompt, a whole number of blocks."""
POINTS: dict[str, tuple[type, str]] = {
    "at a prompt": (Dispatch, "handle_prompt"),
    "at news": (Dispatch, "handle_news"),
    "at a choice": (Routing, "route"),
    "at keys": (Routing, "on_stored"),
    "at a computed span": (Routing, "on_computed"),
    "at an end": (Routing, "drop"),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Write no tracebacks, which take longer than everything else."""
    with capture_logs():
        yield


class RouterKilledError(Exception):
    """Raised on purpose by these tests."""


class Killing:
    """Raises at every other call of a method, before it or after it."""

    def __init__(self, method: Callable[..., Any], *, before: bool) -> None:
        self.method = method
        self.before = before
        self.num_calls = self.num_kills = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.num_calls += 1
        kills = self.num_calls % 2 == 1
        self.num_kills += kills
        if kills and self.before:
            raise RouterKilledError
        result = self.method(*arguments, **named)
        if kills:
            raise RouterKilledError
        return result


async def serve(client: Client, num_others: int = 0) -> None:
    """Serve many conversations at once, and check every answer and what the router knows afterwards."""

    async def converse(index: int) -> None:
        prompt = prompt_of(4 * BLOCK + 6, index)
        for _ in range(TURNS):
            answer = await client.ask(prompt, max_tokens=NUM_TOKENS, n=1 + index % 2)
            tokens = continuation(prompt, NUM_TOKENS)
            assert answer.error is None
            assert set(answer.texts.values()) == {text_of(tokens)}
            record = answer.record
            assert record.outcome is Outcome.FINISHED and not record.disputed
            assert record.completion_tokens == NUM_TOKENS * (1 + index % 2)
            prompt = [*prompt, *tokens]

    async with trio.open_nursery() as nursery:
        for index in range(NUM_REQUESTS):
            nursery.start_soon(converse, index)
    await settle(client)
    routes = client.runtime.route_store
    for status, engine in zip(client.runtime.desk.engines(), client.engines, strict=True):
        slot = routes.engines[status.engine_id].slot
        assert routes.routing.index.keys_of(slot) == committed_in(engine.block_manager.pool)
    found = samples(client)
    assert found['requests_total{outcome="finished"}'] == NUM_REQUESTS * TURNS + num_others
    assert found["usage_disputed_total"] == 0


CASES = [*((point, True) for point in POINTS), ("at keys", False), ("at a computed span", False)]


@pytest.mark.parametrize(("point", "before"), CASES)
async def test_killed_everywhere(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, point: str, before: bool
) -> None:
    """With a death at every other message of a kind, before or in the middle of its handling, all are served."""
    owner, name = POINTS[point]
    kill = Killing(getattr(owner, name), before=before)
    monkeypatch.setattr(owner, name, lambda *arguments, **named: kill(*arguments, **named))
    async with small_runtime(num_engines=2) as client:
        await serve(client)
        assert client.runtime.desk.actor_restarts()["router"] == kill.num_kills >= NUM_REQUESTS // 2


PAIR_POINTS: dict[str, tuple[type, str]] = {
    "at a plan": (PairPolicy, "plan"),
    "at a pair": (PairedPrompts, "add"),
    "at an arrival": (PairedPrompts, "arrive"),
    "at a peer": (Resuming, "peer_for"),
}
PAIR_CASES = [*((point, True) for point in PAIR_POINTS), ("at a pair", False), ("at an arrival", False)]


@pytest.mark.parametrize(("point", "before"), PAIR_CASES)
async def test_killed_between_two_engines(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch, point: str, before: bool
) -> None:
    """The same where one engine computes prompts and others continue them: none is sent twice, and no load is left."""
    owner, name = PAIR_POINTS[point]
    kill = Killing(getattr(owner, name), before=before)
    monkeypatch.setattr(owner, name, lambda *arguments, **named: kill(*arguments, **named))
    roles = (EngineRole.PREFILL, EngineRole.DECODE, EngineRole.DECODE)
    async with small_runtime(num_engines=3, engine_roles=roles, prefill_local_tokens=0, has_peers=True) as client:
        await serve(client)
        assert client.runtime.desk.actor_restarts()["router"] == kill.num_kills >= NUM_REQUESTS // 2
        routes = client.runtime.route_store
        loads = routes.routing.loads
        assert not routes.pairs and not loads.blocks.any() and not loads.running.any()


async def test_prompt_that_always_kills(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that always kills the router goes to the next engine in turn; it and all others are served."""
    poison = prompt_of(70, 66)
    route = Routing.route

    def die_of_poison(self: Routing, keys: Any, num_tokens: int, *rest: Any, **named: Any) -> Any:
        if num_tokens == len(poison) + 1:
            raise RouterKilledError
        return route(self, keys, num_tokens, *rest, **named)

    monkeypatch.setattr(Routing, "route", die_of_poison)
    async with small_runtime(num_engines=2) as client:

        async def ask_poison() -> None:
            answer = await client.ask([*poison, 7], max_tokens=4)
            assert answer.texts[0] == text_of(continuation([*poison, 7], 4))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve, client, 1)
            nursery.start_soon(ask_poison)
        assert client.runtime.desk.actor_restarts()["router"] == 2
