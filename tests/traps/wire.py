"""Helpers of the traps: the real application over a real runtime, its counters, and a runtime that must preempt."""

from __future__ import annotations

import math
import re
from typing import Any

import attrs
import trio
import trio.testing

from quipu.actors.response_store.response_store import ResponseStore
from quipu.web.app import make_app
from quipu.web.batches.batch_service import BatchService
from quipu.web.options import AppOptions
from tests.pair_books import check_counters
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, Client, assert_nothing_routed
from tests.web.asgi_client import Client as HttpClient

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    """Make a greedy completion request."""
    return {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}


def over_http(
    client: Client, store: ResponseStore | None = None, batches: BatchService | None = None, **options: Any
) -> HttpClient:
    """Return the real application in front of `client`'s runtime, for the same tenant.

    Without heartbeats: a mock clock jumps to the first one while a thread tokenizes.
    """
    options = {"domain": "tenant", "heartbeat_s": math.inf, **options}
    return HttpClient(make_app(client.runtime.desk, AppOptions(**options), store=store, batches=batches))


def samples(client: Client) -> dict[str, float]:
    """Return /metrics by name and labels, without the model's name, summed over engines: `prompt_tokens_total`."""
    found: dict[str, float] = {}
    for line in client.runtime.desk.render_metrics().decode().splitlines():
        if line.startswith("quipu:") and "_created" not in line:
            name, value = line.removeprefix("quipu:").rsplit(" ", 1)
            name = re.sub(r'(model_name|engine)="[^"]*",?', "", name).replace(",}", "}").removesuffix("{}")
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def settle(client: Client) -> None:
    """Wait until everything that was started has ended, and assert that nothing is left.

    With several engines, the counters of each are what the records say, also of what was moved to it.
    """
    desk = client.runtime.desk
    with trio.fail_after(60):
        while client.runtime.entry_store.num_open_accounts or desk.num_live_sequences or desk.num_open_requests:
            await trio.sleep(0.01)
    await assert_nothing_routed(client)
    client.assert_at_rest()
    if client.records is not None and client.runtime.desk.pool.was_ever_several:
        check_counters(client, client.records)


TIGHT = {"num_blocks": 12, "max_model_len": 11 * BLOCK, "watermark": 0.0}
"""A runtime for `run_preempted_requests`: 11 usable blocks."""
SHARED = prompt_of(2 * BLOCK, seed=99)
"""The beginning of every prompt of `run_preempted_requests`."""


@attrs.frozen
class PreemptedRun:
    prompts: list[list[int]]
    answers: list[Answer]
    num_tokens: int
    counters: list[dict[str, float]]
    """The samples of /metrics before and after; if asked for, also at every hundredth of a second between."""


async def run_preempted_requests(client: Client, *, watches_counters: bool = False) -> PreemptedRun:
    """Run three requests that begin with two cached blocks and together outgrow a `TIGHT` runtime.

    The first is spared; the others are preempted, one of them several times. When they are admitted again they find at
    least as many cached tokens as at first, and up to more than their prompts have, since their own outputs are cached
    as well.
    """
    await client.ask([*SHARED, 300], max_tokens=1)
    num_tokens = 4 * BLOCK + 6
    prompts = [SHARED + prompt_of(6 + 5 * index, seed=index) for index in range(3)]
    answers: dict[int, Answer] = {}
    counters = [samples(client)]

    async def one(index: int) -> None:
        await trio.sleep(index / 1000)
        answers[index] = await client.ask(prompts[index], max_tokens=num_tokens)

    async def watch() -> None:
        while len(answers) < len(prompts):
            counters.append(samples(client))
            await trio.sleep(0.01)

    async with trio.open_nursery() as nursery:
        if watches_counters:
            nursery.start_soon(watch)
        for index in range(3):
            nursery.start_soon(one, index)
    counters.append(samples(client))
    assert counters[-1]["num_preemptions_total"] > 0, "the runtime must be too small for all requests"
    return PreemptedRun(prompts, [answers[index] for index in range(3)], num_tokens, counters)
