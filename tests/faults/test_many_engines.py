"""Several engines behind one accountant: they start, end, die and are drained, and requests are served as by one.

All of quipu in one loop, with engines that read their KV: a wrong block changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.engine.engine import LoopHost
from quipu.actors.fleet.supervisor import Death, EngineLink
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.request_desk.health import DrainMode, EngineState, LastEngine, UnknownEngine
from tests.fake_oracle import continuation
from tests.journals import KeptJournal
from tests.links import with_deliver
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, kill_engine, small_runtime, text_of, value_of
from tests.traps.wire import samples, settle

NUM_REQUESTS = 12
MAX_TOKENS = 40


async def ask_all(client: Client, disturb: Callable[[], object] = lambda: None) -> list[Answer]:
    """Send many requests at once, with one or two choices each, and disturb the engines while they run."""
    answers: dict[int, Answer] = {}

    async def ask(index: int) -> None:
        answers[index] = await client.ask(prompt_of(70, index), max_tokens=MAX_TOKENS, n=1 + index % 2)

    async with trio.open_nursery() as nursery:
        for index in range(NUM_REQUESTS):
            nursery.start_soon(ask, index)
        await trio.sleep(0.15)
        disturb()
    await settle(client)
    assert not any(client.runtime.desk.actor_restarts().values()), "an actor has died of what was done to the engines"
    return [answers[index] for index in range(NUM_REQUESTS)]


def assert_served(answers: Sequence[Answer]) -> None:
    """Assert that every answer is what a single engine that never fails would have written."""
    for index, answer in enumerate(answers):
        expected = text_of(continuation(prompt_of(70, index), MAX_TOKENS))
        assert answer.error is None, index
        assert set(answer.texts.values()) == {expected}, index
        assert answer.record.outcome is Outcome.FINISHED
        assert not answer.record.disputed
        assert answer.record.prompt_tokens == 70
        assert answer.record.completion_tokens == MAX_TOKENS * (1 + index % 2)


async def test_prompts_spread_and_come_back(autojump_clock: trio.abc.Clock) -> None:
    """New prompts go to both engines; a continued prompt goes where it is cached, and its usage says so."""
    async with small_runtime(num_engines=2) as client:
        assert_served(await ask_all(client))
        assert all(engine.block_manager.pool.num_cached for engine in client.engines), "both had something to do"
        for index in range(NUM_REQUESTS):
            answer = await client.ask([*prompt_of(70, index), 1, 2, 3], max_tokens=2)
            assert answer.record.cached_tokens == 64
        await settle(client)


@pytest.mark.parametrize("index", [0, 1])
async def test_each_engine_killed(autojump_clock: trio.abc.Clock, index: int) -> None:
    """The requests of a killed engine continue at once on the other one, and are counted once."""
    async with small_runtime(num_engines=2, restart_backoff_s=60.0) as client:
        engine = client.engines[index]
        answers = await ask_all(client, lambda: kill_engine(client, index))
        assert_served(answers)
        assert engine not in client.engines
        assert {answer.record.num_engine_deaths for answer in answers} == {0, 1}
        health = client.runtime.desk.health()
        assert health.is_ready and "1 of 2 engines are not ready" in health.detail
        states = [status.state for status in client.runtime.desk.engines()]
        assert states[index] is EngineState.DEAD and states[1 - index] is EngineState.READY
        found = samples(client)
        assert found['requests_resumed_total{same_numerics="true"}'] > 0
        await trio.sleep(61)
        assert [status.state for status in client.runtime.desk.engines()] == [EngineState.READY] * 2
        assert [status.deaths for status in client.runtime.desk.engines()] == [1 - index, index]


@pytest.mark.parametrize("mode", DrainMode)
async def test_drained(autojump_clock: trio.abc.Clock, mode: DrainMode) -> None:
    """A draining engine gets no new requests, finishes or hands over those it has, and is removed."""
    journal = KeptJournal()
    async with small_runtime(num_engines=2, journal=journal) as client:
        desk = client.runtime.desk
        assert_served(await ask_all(client, lambda: desk.control.drain(0, mode)))
        assert [status.engine_id for status in desk.engines()] == [1]
        assert len(client.engines) == 1
        assert not any(record.num_engine_deaths for record in journal.closed), "nothing has died"
        moved = [record for record in journal.closed if record.recomputed_tokens or record.restored_tokens]
        assert bool(moved) == (mode is not DrainMode.FINISH)
        with pytest.raises(UnknownEngine):
            desk.control.drain(0, mode)
        with pytest.raises(LastEngine):
            desk.control.drain(1, mode)
        assert (await client.ask(prompt_of(40, 77))).error is None


async def test_drain_that_takes_too_long(autojump_clock: trio.abc.Clock) -> None:
    """When the time for a drain is up, the remaining requests are handed over."""
    async with small_runtime(num_engines=2) as client:
        desk = client.runtime.desk
        assert_served(await ask_all(client, lambda: desk.control.drain(0, DrainMode.FINISH, 0.1)))
        assert [status.engine_id for status in desk.engines()] == [1]


async def test_drained_engine_that_dies(autojump_clock: trio.abc.Clock) -> None:
    """A draining engine that dies is not restarted, and its requests continue elsewhere."""
    async with small_runtime(num_engines=2) as client:
        desk = client.runtime.desk

        def disturb() -> None:
            desk.control.drain(0, DrainMode.FINISH)
            kill_engine(client, 0)

        assert_served(await ask_all(client, disturb))
        await trio.sleep(1)
        assert [status.engine_id for status in desk.engines()] == [1]


async def test_added_while_requests_run(autojump_clock: trio.abc.Clock) -> None:
    """An added engine serves later requests; engine ids are never reused."""
    async with small_runtime() as client:
        desk = client.runtime.desk
        assert_served(await ask_all(client, lambda: desk.control.add(2)))
        assert [(status.engine_id, status.state) for status in desk.engines()] == [(i, "ready") for i in range(3)]
        assert_served(await ask_all(client, lambda: desk.control.drain(1, DrainMode.HAND_OVER)))
        assert desk.control.add(1) == (3,)
        await trio.sleep(0.1)
        assert [status.engine_id for status in desk.engines()] == [0, 2, 3]
        assert len({status.incarnation for status in desk.engines()}) == 3


async def test_added_while_memory_is_short(autojump_clock: trio.abc.Clock) -> None:
    """Starting an engine is retried until there is enough memory, however often it fails."""
    starts = count()

    class Short(LoopHost):
        async def run(self, link: EngineLink) -> Death:
            if link.engine_id == 1 and next(starts) < 20:
                return Death("there was not enough memory to load it", is_shortage=True)
            return await super().run(link)

    async with small_runtime(make_host=Short) as client:
        client.runtime.desk.control.add(1)
        await trio.sleep(1)
        assert [engine.state for engine in client.runtime.desk.engines()] == [EngineState.READY, EngineState.DEAD]
        assert_served(await ask_all(client))
        await trio.sleep(100)
        assert [engine.state for engine in client.runtime.desk.engines()] == [EngineState.READY] * 2


@pytest.mark.parametrize("mode", list(DrainMode))
async def test_last_working_one_is_not_drained(autojump_clock: trio.abc.Clock, mode: DrainMode) -> None:
    """An engine is drained only when another one is ready, not one that may never be."""
    may_start = False

    class Short(LoopHost):
        async def run(self, link: EngineLink) -> Death:
            if link.engine_id == 1 and not may_start:
                return Death("there was not enough memory to load it", is_shortage=True)
            return await super().run(link)

    async with small_runtime(make_host=Short) as client:
        desk = client.runtime.desk
        desk.control.add(1)
        for _ in range(3):
            with pytest.raises(LastEngine):
                desk.control.drain(0, mode)
            with pytest.raises(LastEngine):
                desk.control.drain(0, DrainMode.HAND_OVER)
            await trio.sleep(10)
        assert_served(await ask_all(client))
        may_start = True
        await trio.sleep(10)
        assert_served(await ask_all(client, lambda: desk.control.drain(0, mode)))
        assert [status.engine_id for status in desk.engines()] == [1]


async def test_one_that_does_not_serve_is_removed(autojump_clock: trio.abc.Clock) -> None:
    """An engine that is not ready may be removed while another one is restarting."""

    class Short(LoopHost):
        async def run(self, link: EngineLink) -> Death:
            if link.engine_id == 1:
                return Death("there was not enough memory to load it", is_shortage=True)
            return await super().run(link)

    async with small_runtime(make_host=Short) as client:
        desk = client.runtime.desk
        desk.control.add(1)
        await trio.sleep(1)
        kill_engine(client, 0)
        await trio.testing.wait_all_tasks_blocked()
        desk.control.drain(1, DrainMode.HAND_OVER)
        await trio.sleep(10)
        assert [(status.engine_id, status.state) for status in desk.engines()] == [(0, EngineState.READY)]


async def test_last_one_removed_by_force(autojump_clock: trio.abc.Clock) -> None:
    """When the last engine is removed, open requests fail with a reason; another engine can be added afterwards."""
    async with small_runtime() as client:
        desk = client.runtime.desk
        with pytest.raises(LastEngine):
            desk.control.drain(0, DrainMode.HAND_OVER)
        answers = await ask_all(client, lambda: desk.control.drain(0, DrainMode.HAND_OVER, force=True))
        errors = [answer.error.message for answer in answers if answer.error is not None]
        assert errors and all("The last engine was removed" in error for error in errors)
        assert all(answer.error or answer.record.outcome is Outcome.FINISHED for answer in answers)
        assert desk.engines() == () and not desk.health().is_healthy
        desk.control.add(1)
        await trio.sleep(0.1)
        assert (await client.ask(prompt_of(40, 77))).error is None


async def test_one_that_keeps_dying(autojump_clock: trio.abc.Clock) -> None:
    """An engine that keeps dying is given up, and the other one serves everything."""

    class Stillborn(LoopHost):
        num_made = 0

        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)
            Stillborn.num_made += 1
            self.is_ill = Stillborn.num_made == 2

        async def run(self, link: EngineLink) -> Death:
            return Death("it was born dead") if self.is_ill and link.incarnation > 2 else await super().run(link)

    async with small_runtime(num_engines=2, make_host=Stillborn, max_restarts=3) as client:
        assert_served(await ask_all(client, lambda: kill_engine(client, 1)))
        await trio.sleep(30)
        status = client.runtime.desk.engines()[1]
        assert (status.state, status.detail) == (EngineState.DEAD, "it was born dead")
        assert client.runtime.desk.health().is_ready
        assert_served(await ask_all(client))
        client.runtime.desk.reset_prefix_cache()  # which this engine will never hear of
        await trio.sleep(0.1)
        client.runtime.desk.control.drain(1, DrainMode.HAND_OVER)
        await trio.sleep(0.1)
        assert [status.engine_id for status in client.runtime.desk.engines()] == [0]


def different_hosts(*, is_final: bool = False) -> Callable[..., LoopHost]:
    """Return a factory of hosts whose engines all compute different bits. `is_final`: none is restarted."""
    numbers = count()

    class Different(LoopHost):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.numerics = str(next(numbers))

        async def run(self, link: EngineLink) -> Death:
            async def with_numerics(messages: Sequence[object]) -> None:
                is_ready = bool(messages) and type(messages[0]).__name__ == "EngineReady"
                await link.deliver(
                    [attrs.evolve(m, numerics=self.numerics) for m in messages] if is_ready else messages
                )

            death = await super().run(with_deliver(link, with_numerics))
            return attrs.evolve(death, is_final=is_final)

    return Different


@pytest.mark.parametrize("resume_on", ["any", "same"])
async def test_other_numerics(autojump_clock: trio.abc.Clock, resume_on: str) -> None:
    """If the other engine computes other bits, a request continues there or waits for its own, as configured."""
    async with small_runtime(
        num_engines=2, make_host=different_hosts(), restart_backoff_s=5.0, resume_on=resume_on
    ) as client:
        started = trio.current_time()
        assert_served(await ask_all(client, lambda: kill_engine(client, 0)))
        waited = trio.current_time() - started > 5
        assert waited == (resume_on == "same")
        same = samples(client)['requests_resumed_total{same_numerics="true"}']
        assert (same > 0) == (resume_on == "same")


async def test_no_engine_with_the_same_numerics_is_left(autojump_clock: trio.abc.Clock) -> None:
    """Requests that may only continue with the same bits fail as soon as no such engine can come back."""
    async with small_runtime(num_engines=2, make_host=different_hosts(is_final=True), resume_on="same") as client:
        answers = await ask_all(client, lambda: kill_engine(client, 0))
        failed = [answer for answer in answers if answer.error is not None]
        assert 0 < len(failed) < NUM_REQUESTS
        for answer in failed:
            assert answer.record.fault is Fault.ENGINE_DIED and answer.record.outcome is Outcome.FAILED
            assert not answer.record.disputed
        left = client.open(prompt_of(70, 1))
        await left.start()
        await trio.testing.wait_all_tasks_blocked()
        left.leave()
        await settle(client)


@pytest.mark.parametrize("policy", ["prefix", "dynamo", "least-loaded", "round-robin", "random"])
async def test_policies_serve_alike(autojump_clock: trio.abc.Clock, policy: str) -> None:
    """The choice of the engine changes no text and no count except cached tokens."""
    async with small_runtime(num_engines=3, routing=policy) as client:
        assert_served(await ask_all(client))
        assert sum(engine.block_manager.pool.num_cached > 0 for engine in client.engines) > 1


async def test_estimates_stand_beside_counts(autojump_clock: trio.abc.Clock) -> None:
    """The record has the router's estimate, and a metric its error; only the engine's count is reported and billed."""
    async with small_runtime(num_engines=2) as client:
        first = await client.ask(prompt_of(70), max_tokens=2)
        again = await client.ask(prompt_of(70), max_tokens=2)
        for answer, num_expected in ((first, 0), (again, 64)):
            assert answer.record.router_estimate == answer.record.cached_tokens == num_expected
            assert answer.record.cached_tokens_estimate is None
        assert again.record.engine == first.record.engine in (0, 1)
        # the router does not hear of this: it expects the prompt where its blocks no longer are
        for engine in client.engines:
            engine.block_manager.pool.observers.clear()
            engine.block_manager.pool.reset()
        wrong = await client.ask(prompt_of(70), max_tokens=2)
        assert (wrong.record.router_estimate, wrong.record.cached_tokens) == (64, 0)
        found = samples(client)
        assert found["router_overlap_error_tokens_count"] == 3
        assert found["router_overlap_error_tokens_sum"] == 64
        assert found['cached_tokens_total{tier="device"}'] == found["prefix_cache_hits_total"] == 64


async def test_one_engine_has_no_estimates(autojump_clock: trio.abc.Clock) -> None:
    """With one engine there is nothing to choose, so records have no estimate."""
    async with small_runtime() as client:
        for _ in range(2):
            assert (await client.ask(prompt_of(70), max_tokens=2)).record.router_estimate is None
        assert samples(client)["router_overlap_error_tokens_count"] == 0


async def test_reset_reaches_all(autojump_clock: trio.abc.Clock) -> None:
    """After a reset no engine finds cached blocks."""
    async with small_runtime(num_engines=2) as client:
        await ask_all(client)
        client.runtime.desk.reset_prefix_cache()
        for index in range(NUM_REQUESTS):
            assert (await client.ask(prompt_of(70, index), max_tokens=2)).record.cached_tokens == 0
        await settle(client)


async def test_list_of_prompts(autojump_clock: trio.abc.Clock) -> None:
    """Prompts of a list are routed one by one, each with all its choices; the usage is their sum."""
    async with small_runtime(num_engines=2) as client:
        prompts = [prompt_of(70, index) for index in range(6)]
        answer = await client.ask(*prompts, n=2, max_tokens=8)
        assert answer.record.prompt_tokens == 6 * 70 and not answer.record.disputed
        for choice, text in answer.texts.items():
            assert text == text_of(continuation(prompts[choice // 2], 8))
        assert all(engine.block_manager.pool.num_cached for engine in client.engines)
        again = await client.ask(*prompts, n=2, max_tokens=8)
        assert again.record.cached_tokens == 6 * 64
        await settle(client)


async def test_books_over_engines(autojump_clock: trio.abc.Clock) -> None:
    """Counters are the sums over the records, whichever engine served them."""
    journal = KeptJournal()
    async with small_runtime(num_engines=2, journal=journal) as client:
        await ask_all(client)
        await ask_all(client, lambda: kill_engine(client, 0))
        records = journal.closed
        found = samples(client)

        def total(name: str) -> float:
            return sum(value for key, value in found.items() if key.partition("{")[0] == name)

        assert total("prompt_tokens_total") == sum(record.prompt_tokens or 0 for record in records)
        assert total("cached_tokens_total") == sum(record.cached_tokens or 0 for record in records)
        assert total("prefix_cache_hits_total") == sum(record.cached_tokens or 0 for record in records)
        assert total("generation_tokens_total") == sum(record.completion_tokens for record in records)
        assert total("usage_disputed_total") == 0
        assert value_of(client.runtime.metrics.open_accounts) == 0
