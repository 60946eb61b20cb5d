"""Blocks that are stored in host memory and loaded again: how they are reported, and what happens when that fails."""

from __future__ import annotations

import attrs
import pytest
import structlog
import trio
import trio.testing

from quipu.actors.engine.engine import Engine
from quipu.actors.engine.executor.loading import load_executor
from quipu.actors.engine.mover.actor import LOAD_TIMEOUT_S
from quipu.actors.engine.mover.host_store import HostStore
from quipu.actors.messages.tiers import LoadFailure, Tier
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.tokenizer.submission import root_key_of
from quipu.kernels.fake import Dials
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, BLOCK_BYTES, Answer, Client, assert_served, read_answer, runtime_config, small_runtime
from tests.traps.wire import samples, settle

LONG = [*prompt_of(12 * BLOCK, seed=1), 300]
"""A prompt with twelve blocks that can be reused."""
TIER = {"num_blocks": 24, "max_model_len": 20 * BLOCK, "kv_host_memory": 100 * BLOCK_BYTES, "watermark": 0.0}
"""23 usable blocks on the device and 100 on the host."""


def slot_of(client: Client, index: int) -> int:
    """Return the slot in which the host keeps a block of `LONG`."""
    root = root_key_of(client.encode(LONG), client.config)
    key = chain_keys(root, LONG, BLOCK)[index]
    (slot,) = [at for at, header in enumerate(store_of(client).headers) if header is not None and header.key == key]
    return slot


def store_of(client: Client) -> HostStore:
    carrier = client.engine.carrier
    assert carrier is not None
    store = carrier.stores[Tier.HOST]
    assert isinstance(store, HostStore)
    return store


def host_tokens(answer: Answer) -> int:
    """Return how many of a prompt's tokens were loaded for it."""
    assert answer.record.cached_by_tier is not None
    return answer.record.cached_by_tier["host"]


def failed_loads(found: dict[str, float]) -> dict[str, float]:
    """Return the number of blocks that could not be loaded, by reason."""
    return {
        reason: found[f'kv_tier_failed_load_blocks_total{{reason="{reason}",tier="host"}}'] for reason in LoadFailure
    }


async def push_out(client: Client, seed: int = 50) -> None:
    """Send other prompts until every block that is now on the device has been evicted."""
    for other in range(3):
        await client.ask(prompt_of(14 * BLOCK, seed=seed + other), max_tokens=1)
        await trio.testing.wait_all_tasks_blocked()


async def ask_twice(client: Client) -> tuple[Answer, Answer]:
    """Send the long prompt, and again once it has been evicted again; check that both answers are right."""
    again = await client.ask(LONG)
    await push_out(client, seed=60)
    third = await client.ask(LONG)
    await settle(client)
    for answer in (again, third):
        assert_served(answer, LONG, 8)
    return again, third


async def test_found_on_the_host(autojump_clock: trio.abc.Clock) -> None:
    """A prompt whose blocks have been evicted is loaded, is counted by tier, and gets the same text."""
    async with small_runtime(**TIER) as client:
        first = await client.ask(LONG)
        await push_out(client)
        again = await client.ask(LONG)
        await settle(client)
        after = samples(client)
    for answer in (first, again):
        assert_served(answer, LONG, 8)
    assert first.record.cached_tokens == 0
    assert again.record.cached_tokens == 12 * BLOCK
    assert again.record.cached_by_tier == {"device": 0, "host": 12 * BLOCK, "disk": 0, "remote": 0, "unattributed": 0}
    assert after["usage_disputed_total"] == 0


async def test_flipped_bit(autojump_clock: trio.abc.Clock) -> None:
    """A block whose bytes have changed is detected; it and the blocks behind it are computed, and counted so."""
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        store_of(client).bytes[slot_of(client, 4) * BLOCK_BYTES + 9] ^= 4
        again, third = await ask_twice(client)
        after = samples(client)
    assert again.record.cached_by_tier is not None and again.record.cached_by_tier["host"] == 4 * BLOCK
    assert again.record.cached_tokens == 4 * BLOCK
    assert third.record.cached_tokens == 12 * BLOCK, "the wrong copy has not been replaced"
    assert after["usage_disputed_total"] == 0


async def test_block_of_another_prompt(autojump_clock: trio.abc.Clock) -> None:
    """A slot that holds another block, with that block's header, is a miss: chain keys are compared."""
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        store, slot, other = store_of(client), slot_of(client, 2), slot_of(client, 7)
        store.bytes[slot * BLOCK_BYTES : (slot + 1) * BLOCK_BYTES] = store.bytes[
            other * BLOCK_BYTES : (other + 1) * BLOCK_BYTES
        ]
        store.headers[slot] = store.headers[other]
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 2 * BLOCK


async def test_numerics_of_another_engine(autojump_clock: trio.abc.Clock) -> None:
    """A block with the right key that an engine with other numerics has computed is a miss."""
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        store, slot = store_of(client), slot_of(client, 0)
        header = store.headers[slot]
        assert header is not None
        store.headers[slot] = attrs.evolve(header, numerics="other")
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 0


@pytest.mark.parametrize("direction", ["read_blocks", "write_blocks"])
async def test_copy_that_raises(direction: str, autojump_clock: trio.abc.Clock) -> None:
    """A failed copy is logged; blocks that could not be stored or loaded are computed, and counted so."""

    def fail(*_: object) -> None:
        raise OSError("no such memory")

    with structlog.testing.capture_logs() as lines:
        async with small_runtime(**TIER) as client:
            backend = client.engine.executor.backend
            copy = getattr(backend, direction)
            if direction == "write_blocks":
                await client.ask(LONG)
                await push_out(client)
            setattr(backend, direction, fail)
            if direction == "read_blocks":
                await client.ask(LONG)
                await push_out(client)
            again = await client.ask(LONG)
            setattr(backend, direction, copy)
            await client.ask(LONG)
            await push_out(client, seed=60)
            third = await client.ask(LONG)
            await settle(client)
            after = samples(client)
    for answer in (again, third):
        assert_served(answer, LONG, 8)
    assert again.record.cached_tokens == 0
    assert third.record.cached_tokens == 12 * BLOCK
    assert after["usage_disputed_total"] == 0
    assert {line.get("error") for line in lines if line["event"] == "kv_move.failed"} == {"OSError: no such memory"}


async def test_others_overtake(autojump_clock: trio.abc.Clock) -> None:
    """While a prompt's blocks are loaded, requests that came later are served; choices and twins wait for one load."""
    dials = Dials(step_seconds=0.01)
    ended: list[str] = []
    answers: dict[str, Answer] = {}
    async with small_runtime(dials, **TIER) as client:

        async def ask(name: str, prompt: list[int], **fields: int) -> None:
            answers[name] = await client.ask(prompt, **fields)
            ended.append(name)

        await client.ask(LONG)
        await push_out(client)
        dials.move_seconds = 5.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "long", LONG)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(ask, "twin", LONG)
            nursery.start_soon(ask, "short", prompt_of(20, seed=9))
        dials.move_seconds = 0.0
        await settle(client)
    assert ended[0] == "short"
    for name in ("long", "twin"):
        assert_served(answers[name], LONG, 8)
        assert answers[name].record.cached_tokens == 12 * BLOCK
    by_tier = {name: answers[name].record.cached_by_tier or {} for name in ("long", "twin")}
    assert by_tier["long"]["host"] == by_tier["twin"]["device"] == 12 * BLOCK


async def test_emptied_slot(autojump_clock: trio.abc.Clock) -> None:
    """A block that is no longer on the host when its copy begins is computed, with the blocks behind it.

    It is counted as missing, and no longer expected there.
    """
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        store_of(client).headers[slot_of(client, 3)] = None
        again, third = await ask_twice(client)
        after = samples(client)
    assert again.record.cached_tokens == 3 * BLOCK
    assert third.record.cached_tokens == 12 * BLOCK
    assert failed_loads(after) == {"missing": 1, "corrupt": 0, "late": 0, "failed": 0}


async def test_load_that_hangs(autojump_clock: trio.abc.Clock) -> None:
    """After `LOAD_TIMEOUT_S` the prompts that wait for a load are computed instead.

    No other load begins behind it. Its blocks are not reused until it ends, and the blocks that it loaded can be found.
    """
    dials = Dials(step_seconds=0.01)
    other = prompt_of(14 * BLOCK, seed=50)
    answers: list[Answer] = []
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(dials, **{**TIER, "num_blocks": 48}) as client:

            async def ask(prompt: list[int]) -> None:
                answers.append(await client.ask(prompt))

            await client.ask(LONG)
            for seed in (50, 60):
                await push_out(client, seed)
            dials.move_seconds = 3 * LOAD_TIMEOUT_S
            begun = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, LONG)
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(ask, LONG)
            late_at = trio.current_time()
            await ask(other)
            assert trio.current_time() - late_at < 1, "it waited behind the load"
            host = client.engine.block_manager.tiers
            assert host is not None
            assert [len(table) for table in host.loads.tables()] == [12]
            await trio.sleep(3 * LOAD_TIMEOUT_S)
            assert not list(host.loads.tables())
            dials.move_seconds = 0.0
            again = await client.ask(other)
            await settle(client)
            after = samples(client)
    for answer, prompt in zip([*answers, again], (LONG, LONG, other, other), strict=True):
        assert_served(answer, prompt, 8)
    assert LOAD_TIMEOUT_S <= late_at - begun < LOAD_TIMEOUT_S + 1
    assert [host_tokens(answer) for answer in answers] == [0, 0, 0]
    assert failed_loads(after) == {"missing": 0, "corrupt": 0, "late": 12, "failed": 0}
    assert [line["num_waiting"] for line in lines if line["event"] == "kv_move.late"] == [2]
    assert after["usage_disputed_total"] == 0


async def test_client_leaves_during_a_load(autojump_clock: trio.abc.Clock) -> None:
    """Blocks that a load still writes are not reused until it is over; other requests get the right text meanwhile."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials, **TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        dials.move_seconds = 0.5
        ticket = client.open(LONG)
        await ticket.start()
        await trio.testing.wait_all_tasks_blocked()
        host = client.engine.block_manager.tiers
        assert host is not None and list(host.loads.tables()), "nothing is being loaded"
        ticket.leave()
        prompts = [prompt_of(5 * BLOCK, seed=70 + index) for index in range(4)]
        answers: dict[int, Answer] = {}

        async def ask(index: int) -> None:
            answers[index] = await client.ask(prompts[index], max_tokens=40)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(ask, index)
        await trio.sleep(1)
        await settle(client)
    for index, prompt in enumerate(prompts):
        assert_served(answers[index], prompt, 40)


@pytest.mark.parametrize("when", ["store", "load"])
async def test_reset_during_a_move(when: str, autojump_clock: trio.abc.Clock) -> None:
    """Blocks computed before a reset are not found after it, not even those that were being stored or loaded."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials, **TIER) as client:
        await client.ask(LONG)
        if when == "store":
            dials.move_seconds = 0.5
            await push_out(client)
            client.runtime.desk.reset_prefix_cache()
        else:
            await push_out(client)
            dials.move_seconds = 0.5
            ticket = client.open(LONG)
            await ticket.start()
            await trio.testing.wait_all_tasks_blocked()
            client.runtime.desk.reset_prefix_cache()
            waited = await read_answer(ticket)
            ticket.leave()
            assert_served(waited, LONG, 8)
            assert waited.record.cached_tokens == 0
        await trio.sleep(1)
        dials.move_seconds = 0.0
        if when == "store":
            again = await client.ask(LONG)
            assert_served(again, LONG, 8)
            assert again.record.cached_tokens == 0
        await settle(client)


async def test_first_step_fails_after_a_load(autojump_clock: trio.abc.Clock) -> None:
    """An admission that is undone and repeated counts the loaded blocks as loaded."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials, **TIER) as client:
        await client.ask(LONG)
        await push_out(client)
        dials.fail_steps = 1
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_by_tier is not None and again.record.cached_by_tier["host"] == 12 * BLOCK


async def test_mover_dies(autojump_clock: trio.abc.Clock) -> None:
    """An error in the mover itself ends the engine, as in any of its other parts; the next engine continues."""
    async with small_runtime(**TIER) as client:
        await client.ask(LONG)
        await push_out(client)

        def die(_: object) -> None:
            raise RuntimeError("the mover is broken")

        setattr(client.engine.carrier, "carry", die)  # noqa: B010 - mypy lets no method be assigned
        again = await client.ask(LONG)
        await settle(client)
    assert_served(again, LONG, 8)
    assert again.record.cached_tokens == 0


async def test_more_memory_than_there_is(autojump_clock: trio.abc.Clock) -> None:
    """A host tier of an impossible size is refused when the engine starts, naming the flag."""
    config = runtime_config(**{**TIER, "kv_host_memory": 1 << 60}).engine
    with pytest.raises(ValueError, match=r"--kv-host-memory 1073741824\.00GiB is more than is available"):
        Engine(config, load_executor(config))
    config = attrs.evolve(config, kv_host_memory=BLOCK_BYTES - 1)
    with pytest.raises(ValueError, match="holds no block"):
        Engine(config, load_executor(config))
