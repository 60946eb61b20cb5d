"""Trap: a hit on a lower tier is counted when it is found, not when its blocks have come.

Then a load that fails, or whose client leaves meanwhile, has been counted, and perhaps been told and billed. Here a hit
counts when the blocks are on the device and have been read; until then nothing is known of the request.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from quipu.actors.messages.outcomes import Outcome
from quipu.kernels.fake import Dials
from tests.fake_oracle import continuation
from tests.faults.tiered_runtime import SMALL, stored
from tests.journals import KeptJournal
from tests.runtimes import BLOCK, Client, read_answer, small_runtime, text_of
from tests.traps.lower_tier import ASKED, TIER, break_loads, push_out, tiers_of
from tests.traps.wire import COMPLETIONS, STREAMED, body, over_http, prompt_of, samples, settle
from tests.web.api.anthropic.messages_api import PATH, stream, text, total

PROMPT = [*prompt_of(10 * BLOCK, seed=1), 300]
"""Ten blocks that can be reused."""
COUNTED = ("prompt_tokens_total", "prefix_cache_hits_total", 'cached_tokens_total{tier="host"}')

DISK = 'cached_tokens_total{tier="disk"}'


def counted(client: Client) -> list[float]:
    found = samples(client)
    return [found[name] for name in COUNTED]


async def slow_loads(client: Client) -> None:
    """Have the prompt on the host alone, and let loads take a second from now on."""
    await client.ask(PROMPT)
    await push_out(client)
    client.dials.move_seconds = 1.0


async def test_counted_when_it_has_come(autojump_clock: trio.abc.Clock) -> None:
    """While blocks are being loaded, no counter and no answer includes them; then all do, and agree."""
    async with small_runtime(**TIER) as client:
        await slow_loads(client)
        before = counted(client)
        http = over_http(client)
        told: list[Any] = []

        async def ask() -> None:
            told.append(await http.post(COMPLETIONS, body(PROMPT, **ASKED)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.9)
            assert counted(client) == before and not told, "the load is not over"
            assert samples(client)["num_requests_waiting"] == 1
        await settle(client)
        after = counted(client)
    details = told[0][1]["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 10 * BLOCK and details["cached_tokens_by_tier"] == tiers_of(host=10 * BLOCK)
    assert [now - then for now, then in zip(after, before, strict=True)] == [len(PROMPT), 10 * BLOCK, 10 * BLOCK]


@pytest.mark.parametrize("leaves", [False, True])
async def test_disk_of_an_earlier_engine(leaves: bool, tmp_path: Path, autojump_clock: trio.abc.Clock) -> None:
    """Blocks that an earlier engine has stored on a disk count once they have come, and for nobody who has left."""
    disk = {**SMALL, "kv_disk": str(tmp_path / "kv"), "kv_disk_size": 4 << 20}
    async with small_runtime(**disk) as client:
        await client.ask(PROMPT)
        await stored(client)
    async with small_runtime(Dials(move_seconds=1.0), **disk) as client:
        before = samples(client)
        ticket = client.open(PROMPT)
        await ticket.start()
        await trio.sleep(0.9)
        during = samples(client)
        assert all(during[name] == before[name] for name in (*COUNTED, DISK)), "the load is not over"
        if leaves:
            ticket.leave()
            await trio.sleep(5)
        else:
            answer = await read_answer(ticket)
            ticket.leave()
            assert answer.record.cached_by_tier == tiers_of(disk=10 * BLOCK)
        await settle(client)
        after = samples(client)
    assert after[DISK] - before[DISK] == (0 if leaves else 10 * BLOCK)
    assert after["usage_disputed_total"] == 0


async def test_client_leaves_during_the_load(autojump_clock: trio.abc.Clock) -> None:
    """If a request ends before its blocks arrive, its cached tokens are unknown, and no counter has them."""
    journal = KeptJournal()
    async with small_runtime(journal=journal, **TIER) as client:
        await slow_loads(client)
        before = counted(client)
        ticket = client.open(PROMPT)
        await ticket.start()
        await trio.sleep(0.5)
        ticket.leave()
        await trio.sleep(5)
        await settle(client)
        after = counted(client)
        again = await client.ask(PROMPT)
        await settle(client)
    left = next(record for record in journal.closed if record.outcome is Outcome.CANCELLED)
    assert left.cached_tokens is None and left.cached_by_tier is None
    assert after == before
    # what was loaded for nobody is on the device now, and a hit there
    assert again.record.cached_by_tier == tiers_of(device=10 * BLOCK)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_failed_load_is_computed(is_streamed: bool, autojump_clock: trio.abc.Clock) -> None:
    """Blocks that were found but not loaded are computed: no client, counter or record has them as cached."""
    async with small_runtime(**TIER) as client:
        await client.ask(PROMPT)
        await push_out(client)
        before = counted(client)
        mend = break_loads(client)
        http = over_http(client)
        if is_streamed:
            _, chunks = await http.stream(COMPLETIONS, body(PROMPT, **ASKED, **STREAMED))
            usage, said = chunks[-2]["usage"], "".join(chunk["choices"][0]["text"] for chunk in chunks[:-2])
        else:
            _, answer = await http.post(COMPLETIONS, body(PROMPT, **ASKED))
            usage, said = answer["usage"], answer["choices"][0]["text"]
        await settle(client)
        failed = samples(client)
        mend()
        await push_out(client, seed=60)
        again = await client.ask(PROMPT)
        await settle(client)
    assert said == text_of(continuation(PROMPT, 8))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["prompt_tokens_details"]["cached_tokens_by_tier"] == tiers_of()
    assert [failed[name] for name in COUNTED] == [before[0] + len(PROMPT), *before[1:]]
    assert failed['kv_tier_failed_load_blocks_total{reason="failed",tier="host"}'] == 10
    assert failed["usage_disputed_total"] == 0
    assert again.record.cached_by_tier == tiers_of(host=10 * BLOCK), "a copy that was not at fault is kept"


async def test_messages(autojump_clock: trio.abc.Clock) -> None:
    """In the Messages API the parts add up to the prompt in every event, whether the blocks arrive or not."""
    system = [text("The cords are counted, every one of them. " * (9 * BLOCK // 16))]
    request: dict[str, Any] = {
        "model": "demo", "max_tokens": 6, "temperature": 0, "system": system,
        "messages": [{"role": "user", "content": "what?"}],
    }  # fmt: skip
    async with small_runtime(**TIER) as client:
        http = over_http(client)
        _, first = await http.post(PATH, request)
        size = total(first["usage"])
        hit = (size - 1) // BLOCK * BLOCK
        read = []
        for is_broken in (False, True):
            for is_streamed in (False, True):
                await push_out(client, seed=50 + 20 * is_broken + 10 * is_streamed)
                mend = break_loads(client) if is_broken else lambda: None
                before = samples(client)
                if is_streamed:
                    _, events = await stream(http, request)
                    usages = [events[0]["message"]["usage"], events[-2]["usage"]]
                else:
                    usages = [(await http.post(PATH, request))[1]["usage"]]
                mend()
                await settle(client)
                after = samples(client)
                assert [total(usage) for usage in usages] == [size] * len(usages)
                (told,) = {usage["cache_read_input_tokens"] for usage in usages}
                counter = 'cached_tokens_total{tier="host"}'
                assert after[counter] - before[counter] == told, "all of it was on the host, or none came"
                read.append(told)
        assert samples(client)["usage_disputed_total"] == 0
    assert hit > 5 * BLOCK
    assert read == [hit, hit, 0, 0]
