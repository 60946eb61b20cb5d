"""Scheduling policies and limits in whole runtimes: which request is served first, which waits, which is refused."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from quipu.actors.messages.outcomes import ErrorKind, Outcome
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import Answer, Client, num_passes, small_runtime, text_of


async def order_of_first_tokens(client: Client, requests: list[tuple[list[int], dict[str, object]]]) -> list[int]:
    """Send requests while another one occupies the engine, and return the order of their first tokens."""
    order: list[int] = []

    async def one(index: int, prompt: list[int], fields: dict[str, object]) -> None:
        ticket = client.open(prompt, max_tokens=2, **fields)
        await ticket.start()
        await ticket.mailbox.peek()
        order.append(index)
        ticket.leave()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.ask, prompt_of(20, 99))
        await trio.sleep(0.005)
        for index, (prompt, fields) in enumerate(requests):
            nursery.start_soon(one, index, prompt, fields)
            await trio.testing.wait_all_tasks_blocked(0.0001)
    return order


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [2, 1, 3, 0])])
async def test_order_of_admission(autojump_clock: trio.abc.Clock, policy: str, order: list[int]) -> None:
    """`fcfs` goes by arrival; `priority` by the request's number, lowest first, then by arrival."""
    priorities = [5, 1, -3, 1]
    async with small_runtime(max_num_seqs=1, scheduling_policy=policy) as client:
        requests = [(prompt_of(20, i), {"priority": priority}) for i, priority in enumerate(priorities)]
        assert await order_of_first_tokens(client, requests) == order
        await trio.sleep(1)
        client.assert_at_rest()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_victims(autojump_clock: trio.abc.Clock, policy: str) -> None:
    """When blocks run out the newest sequence is preempted; under `priority` the one with the highest number."""
    answers: dict[int, Answer] = {}
    async with small_runtime(
        num_blocks=13, max_model_len=192, scheduling_policy=policy, watermark=0.0, enable_prefix_caching=False
    ) as client:

        async def ask(index: int, priority: int) -> None:
            answers[index] = await client.ask(prompt_of(60, index), max_tokens=60, priority=priority)

        async with trio.open_nursery() as nursery:
            for index, priority in enumerate((9, 0)):
                nursery.start_soon(ask, index, priority)
                await trio.testing.wait_all_tasks_blocked(0.0001)
        client.assert_at_rest()
    victim = 0 if policy == "priority" else 1
    assert answers[victim].record.recomputed_tokens > 0
    assert answers[1 - victim].record.recomputed_tokens == 0
    for index, answer in answers.items():
        assert answer.texts[0] == text_of(continuation(prompt_of(60, index), 60))


async def waiting_time_of_warm_prompts(policy: str) -> float:
    """Return a tenant's mean wait for occasional cached prompts while another sends long uncached ones."""
    warm = prompt_of(160, 1)
    waits: list[float] = []
    async with small_runtime(
        Dials(step_seconds=0.01), num_blocks=900, max_num_batched_tokens=128, scheduling_policy=policy
    ) as client:
        await client.ask(warm, domain="patient")

        async def flood(index: int) -> None:
            await client.ask(prompt_of(900, 100 + index), domain="greedy", max_tokens=2)

        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(flood, index)
            await trio.sleep(0.05)
            for _ in range(6):
                began = trio.current_time()
                answer = await client.ask([*warm, 300], domain="patient", max_tokens=1)
                waits.append(trio.current_time() - began)
                assert answer.record.cached_tokens == 160
        client.assert_at_rest()
    return sum(waits) / len(waits)


async def test_fair_to_warm_prompts(autojump_clock: trio.abc.Clock) -> None:
    """Under `fair` one tenant's uncached prompts do not starve another's cached ones; under `fcfs` they do."""
    fair, fcfs = await waiting_time_of_warm_prompts("fair"), await waiting_time_of_warm_prompts("fcfs")
    assert fair <= 0.05, "a cached prompt must wait only for a step or two, and its own"
    assert fcfs > 4 * fair


async def test_fair_shares_uncached_work(autojump_clock: trio.abc.Clock) -> None:
    """Two tenants with equal uncached work alternate, however many requests one of them has queued."""
    ended: list[str] = []
    async with small_runtime(num_blocks=600, max_num_seqs=2, scheduling_policy="fair") as client:

        async def ask(tenant: str, seed: int) -> None:
            await client.ask(prompt_of(200, seed), domain=tenant, max_tokens=2)
            ended.append(tenant)

        async with trio.open_nursery() as nursery:
            for index in range(10):
                nursery.start_soon(ask, "many", index)
            await trio.testing.wait_all_tasks_blocked(0.0001)
            for index in range(3):
                nursery.start_soon(ask, "few", 50 + index)
        client.assert_at_rest()
    last_of_few = max(at for at, tenant in enumerate(ended) if tenant == "few")
    assert last_of_few <= 8, ended


async def test_long_prefill_threshold(autojump_clock: trio.abc.Clock) -> None:
    """A long prompt runs in small chunks while others run, and in whole budgets while it is alone."""
    prompt = prompt_of(600, 1)
    passes: dict[bool, int] = {}
    for alone in (True, False):
        async with small_runtime(long_prefill_token_threshold=32) as client, trio.open_nursery() as nursery:
            if not alone:
                nursery.start_soon(
                    client.ask,
                    prompt_of(20, 2),
                )
                nursery.start_soon(lambda client=client: client.ask(prompt_of(20, 3), max_tokens=200))
                await trio.sleep(0.1)
            before = num_passes(client.engine.executor)
            answer = await client.ask(prompt, max_tokens=1)
            passes[alone] = num_passes(client.engine.executor) - before
            assert answer.texts[0] == text_of(continuation(prompt, 1))
    assert passes[True] <= 4
    assert passes[False] >= 600 // 32


@pytest.mark.parametrize("limit", [{"max_waiting_requests": 3}, {"max_waiting_tokens": 70}])
async def test_waiting_limits(autojump_clock: trio.abc.Clock, limit: dict[str, int]) -> None:
    """A request beyond the limits is refused at once and never admitted; queued ones are served."""
    answers: list[Answer] = []
    async with small_runtime(max_num_seqs=1, **limit) as client:

        async def ask(index: int) -> None:
            answers.append(await client.ask(prompt_of(20, index)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, 0)
            await trio.sleep(0.005)
            for index in range(1, 9):
                nursery.start_soon(ask, index)
        client.assert_at_rest()
    refused = [answer for answer in answers if answer.error is not None]
    assert len(refused) == 5 and len(answers) == 9
    for answer in refused:
        assert answer.error is not None and answer.error.kind is ErrorKind.OVERLOADED
        assert answer.record.outcome is Outcome.REJECTED
        assert answer.record.cached_tokens is None


async def test_deadline(autojump_clock: trio.abc.Clock) -> None:
    """A request that exceeds its deadline fails with what was done, queued or running, and frees its blocks."""
    async with small_runtime(max_num_seqs=1) as client:
        running, queued = client.open(prompt_of(20, 1), max_tokens=500), client.open(prompt_of(20, 2))
        await running.start()
        await queued.start()
        await trio.sleep(0.2)
        running.expire(0.2)
        queued.expire(0.2)
        await trio.sleep(0.1)
        assert running.mailbox.closed is not None and queued.mailbox.closed is not None
        assert running.mailbox.closed.record.outcome is Outcome.FAILED
        assert running.mailbox.closed.record.completion_tokens > 5
        assert queued.mailbox.closed.record.outcome is Outcome.REJECTED
        assert queued.mailbox.closed.record.cached_tokens is None
        for ticket in (running, queued):
            assert ticket.mailbox.closed is not None and ticket.mailbox.closed.error is not None
            assert ticket.mailbox.closed.error.kind is ErrorKind.TIMEOUT
            ticket.expire(0.2)  # a second call changes nothing
            ticket.leave()
        await trio.sleep(0.1)
        client.assert_at_rest()


async def test_salt_subdivides_the_domain(autojump_clock: trio.abc.Clock) -> None:
    """A salt shares only with the same salt of the same tenant."""
    prompt = prompt_of(50, 1)
    async with small_runtime() as client:
        cached = [
            (await client.ask(prompt, domain=domain, cache_salt=salt)).record.cached_tokens
            for domain, salt in [("a", "s"), ("a", ""), ("a", "s"), ("b", "s"), ("as", ""), ("a", "t"), ("b", "s")]
        ]
        client.assert_at_rest()
    assert cached == [0, 0, 48, 0, 0, 0, 48]


async def test_sharing_costs_two_steps_at_most(autojump_clock: trio.abc.Clock) -> None:
    """A new request waits for blocks that are being computed, but not for a whole long prompt."""
    prompt = prompt_of(900, 1)
    async with small_runtime(max_num_batched_tokens=64, num_blocks=200) as client:
        answers: list[Answer] = []

        async def ask(tail: int) -> None:
            answers.append(await client.ask([*prompt, tail], max_tokens=1))

        async with trio.open_nursery() as nursery:
            for tail in (1, 2, 3):
                nursery.start_soon(ask, tail)
        client.assert_at_rest()
    assert all(answer.error is None for answer in answers)
    assert not any(answer.record.disputed for answer in answers)
    computed = sum(answer.record.computed_tokens for answer in answers)
    assert computed < 3 * 901
