"""Prefill and decode on different engines, all of quipu in one loop: whichever engine dies, whenever it does, texts and
client numbers are the same, each position has one first coverage, and nothing stays held.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.engine.block_manager.reservation import BlockManager
from quipu.actors.messages.block_manager import Reserve
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.scheduler import Granted
from quipu.actors.request_desk.health import DrainMode
from tests.fake_oracle import continuation
from tests.prompts import prompt_of
from tests.runtimes import (
    BLOCK,
    Answer,
    Client,
    assert_nothing_routed,
    full_blocks,
    kill_engine,
    small_runtime,
    text_of,
)
from tests.traps.wire import samples, settle

MAX_TOKENS = 12
PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
COMMON = prompt_of(3 * BLOCK, seed=99)
PROMPTS = [[*COMMON, *prompt_of(50 + 7 * number, seed=number)] for number in range(5)]
CHOICES = (1, 2, 1, 3, 1)


def apart(*roles: EngineRole, **changes: Any) -> dict[str, Any]:
    return {
        "num_engines": len(roles),
        "engine_roles": roles,
        "prefill_local_tokens": 0,
        "has_peers": True,
        "num_blocks": 96,
        "restart_backoff_s": 0.01,
        **changes,
    }


@attrs.define
class Killer:
    """Makes an engine's KV-block manager raise in its grant of some number, as a broken invariant would."""

    at: int
    """0: never."""
    num_grants: int = 0

    def watch(self, manager: BlockManager) -> None:
        grant = manager.grant

        def grant_or_die(reserve: Reserve, now: float = 0.0) -> Granted:
            self.num_grants += 1
            if self.num_grants == self.at:
                raise RuntimeError("a block table cannot be trusted")
            return grant(reserve, now)

        setattr(manager, "grant", grant_or_die)  # noqa: B010 - mypy lets no method be assigned


async def ask_all(client: Client) -> list[Answer]:
    """Ask for a common beginning alone, then for all prompts at once."""
    answers: dict[int, Answer] = {}

    async def ask(number: int) -> None:
        answers[number] = await client.ask(PROMPTS[number], max_tokens=MAX_TOKENS, n=CHOICES[number])

    await client.ask([*COMMON, 7], max_tokens=1)
    async with trio.open_nursery() as nursery:
        for number in range(len(PROMPTS)):
            nursery.start_soon(ask, number)
    await trio.sleep(1)  # a copy that is under way holds its blocks
    await settle(client)
    return [answers[number] for number in range(len(PROMPTS))]


def assert_right(answers: list[Answer]) -> None:
    for prompt, choices, answer in zip(PROMPTS, CHOICES, answers, strict=True):
        assert answer.error is None
        assert set(answer.texts.values()) == {text_of(continuation(prompt, MAX_TOKENS))}
        record = answer.record
        assert (record.outcome, record.disputed) == (Outcome.FINISHED, False)
        assert (record.prompt_tokens, record.completion_tokens) == (len(prompt), choices * MAX_TOKENS)
        assert record.computed_tokens + record.restored_tokens <= choices * len(prompt)


async def run_once(side: int, at: int, *roles: EngineRole) -> tuple[int, list[Answer]]:
    """Serve all prompts while the engine `side` dies in its grant `at`; return how many grants it made."""
    killer = Killer(at)
    async with small_runtime(**apart(*roles)) as client:
        killer.watch(client.engines[side].block_manager)
        answers = await ask_all(client)
        assert_right(answers)
        await trio.sleep(120)  # nobody waits for a peer any longer
        client.assert_at_rest()
        await assert_nothing_routed(client)
        assert not client.runtime.route_store.pairs
        for engine in client.engines:
            tiers = engine.block_manager.tiers
            assert tiers is not None and not tiers.loads.are_under_way and not engine.block_manager.lending.num_blocks
        counters = samples(client)
        assert counters["usage_disputed_total"] == 0
        total = sum(answer.record.moved_tokens for answer in answers)
        assert sum(num for name, num in counters.items() if name.startswith("moved_tokens_total")) == total
    return killer.num_grants, answers


async def test_numbers_of_a_pair(autojump_clock: trio.testing.MockClock) -> None:
    """The prefill side's hits are told, the transfer is none, and each prompt is moved to the decode side once."""
    _, answers = await run_once(0, 0, PREFILL, DECODE)
    for prompt, choices, answer in zip(PROMPTS, CHOICES, answers, strict=True):
        record = answer.record
        assert record.cached_tokens == len(COMMON)
        assert (record.engine, record.decode_engine) == (0, 1)
        assert 0 < record.moved_tokens <= choices * full_blocks(len(prompt))
        # the end of a prompt that fills no block, by each choice
        assert record.recomputed_tokens <= choices * BLOCK
        assert record.restored_tokens + record.computed_tokens + choices * len(COMMON) >= len(prompt)


@pytest.mark.covering
@pytest.mark.parametrize("side", [0, 1], ids=["prefill", "decode"])
@pytest.mark.parametrize("roles", [(PREFILL, DECODE), (PREFILL, DECODE, DECODE)], ids=["pair", "three"])
async def test_killed_at_every_grant(
    side: int, roles: tuple[EngineRole, ...], autojump_clock: trio.testing.MockClock
) -> None:
    """Whenever either side dies, each answer is complete, and the client's numbers are those of a first admission."""
    num_grants, undisturbed = await run_once(side, 0, *roles)
    assert num_grants > 5
    for at in range(1, num_grants + 1):
        _, answers = await run_once(side, at, *roles)
        if side == 1:
            cached = [answer.record.cached_tokens for answer in answers]
            assert cached == [answer.record.cached_tokens for answer in undisturbed], at


async def test_decode_side_full(autojump_clock: trio.testing.MockClock) -> None:
    """A decode side without room for what was prefilled serves one after the other, and all of it right."""
    async with small_runtime(**apart(PREFILL, DECODE, num_blocks=20, max_model_len=15 * BLOCK)) as client:
        answers = await ask_all(client)
        assert_right(answers)
        client.assert_at_rest()


async def test_nobody_left_to_decode(autojump_clock: trio.testing.MockClock) -> None:
    """If the only engine of a side is removed, the other one does everything."""
    for gone in (0, 1):
        async with small_runtime(**apart(PREFILL, DECODE)) as client:
            client.runtime.desk.control.drain(gone, DrainMode.HAND_OVER)
            await trio.sleep(1)
            answers = await ask_all(client)
            assert_right(answers)
            assert {answer.record.decode_engine for answer in answers} == {None}


@pytest.mark.parametrize("mode", [DrainMode.MOVE, DrainMode.HAND_OVER])
async def test_drained_while_it_runs(mode: DrainMode, autojump_clock: trio.testing.MockClock) -> None:
    """Running sequences that move take their blocks along; those that are handed over find none at another engine."""
    async with small_runtime(**apart(EngineRole.MIXED, EngineRole.MIXED)) as client:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await client.ask(PROMPTS[0], max_tokens=60))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.2)
            (busy,) = (engine.engine_id for engine in client.runtime.desk.pool if engine.num_running)
            client.runtime.desk.control.drain(busy, mode)
        await settle(client)
        (answer,) = answers
        assert answer.texts[0] == text_of(continuation(PROMPTS[0], 60))
        assert not answer.record.disputed
        # the block in which the prompt ends has been filled by the output
        assert answer.record.moved_tokens == (len(PROMPTS[0]) if mode is DrainMode.MOVE else 0)
        assert (answer.record.recomputed_tokens > len(PROMPTS[0])) == (mode is DrainMode.HAND_OVER)


async def test_clients_leave_at_any_time(autojump_clock: trio.testing.MockClock) -> None:
    """Whenever a client leaves, nothing of its request stays on either side."""
    async with small_runtime(**apart(PREFILL, DECODE)) as client:
        for step in range(40):
            ticket = client.open(PROMPTS[step % 5], max_tokens=MAX_TOKENS, n=1 + step % 3)
            with trio.move_on_after(0.003 * step):
                await ticket.start()
                while True:
                    await ticket.mailbox.get()
            ticket.leave()
        await settle(client)
        await trio.sleep(120)
        client.assert_at_rest()
        await assert_nothing_routed(client)
        for engine in client.engines:
            tiers = engine.block_manager.tiers
            assert tiers is not None and not tiers.loads.are_under_way and not engine.block_manager.lending.num_blocks


async def test_dead_decode_side_finds_blocks_at_its_peer(autojump_clock: trio.testing.MockClock) -> None:
    """What the prefill side still holds is fetched once more by the engine that continues for a dead one."""
    async with small_runtime(**apart(PREFILL, DECODE, DECODE, restart_backoff_s=60.0)) as client:
        answers: list[Answer] = []

        async def ask() -> None:
            answers.append(await client.ask(PROMPTS[0], max_tokens=200))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.3)
            (busy,) = (engine.engine_id for engine in client.runtime.desk.pool if engine.num_running)
            assert busy in (1, 2)
            kill_engine(client, busy)
        (answer,) = answers
        assert answer.texts[0] == text_of(continuation(PROMPTS[0], 200))
        record = answer.record
        assert (record.num_engine_deaths, record.disputed) == (1, False)
        assert record.moved_tokens == 2 * full_blocks(len(PROMPTS[0])), "it was moved to the first, and to the second"
        assert (record.engine, record.decode_engine) == (0, 3 - busy)
