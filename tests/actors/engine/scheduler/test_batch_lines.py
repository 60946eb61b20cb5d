"""Lines of batches run below every other request: they are admitted last, and give up places and blocks."""

from __future__ import annotations

import pytest
import trio

from quipu.kernels.fake import Dials
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, assert_served, eventually, small_runtime


async def run_lines_and_a_request(client: Client, lines: list[list[int]], request: list[int], at_once: int) -> None:
    """Start lines, then a request once as many as fit are running; check every answer, and that it came first."""
    ended: list[str] = []

    async def ask(name: str, prompt: list[int], num_tokens: int, *, is_batch: bool) -> None:
        answer = await client.ask(prompt, max_tokens=num_tokens, is_batch=is_batch, domain=name)
        assert_served(answer, prompt, num_tokens)
        ended.append(name)

    async with trio.open_nursery() as nursery:
        for index, prompt in enumerate(lines):
            nursery.start_soon(lambda name, prompt: ask(name, prompt, 40, is_batch=True), f"line {index}", prompt)
        state = client.engine.batcher.sequences
        await eventually(lambda: sum(s.num_admissions > 0 for s in state.values()) == at_once, "the lines run")
        await ask("request", request, 4, is_batch=False)
        assert ended == ["request"], "the request waited for a line"
    assert len(ended) == len(lines) + 1
    await eventually(lambda: not client.runtime.entry_store.num_open_accounts, "all accounts are closed")
    client.assert_at_rest()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
async def test_line_gives_up_its_place(policy: str) -> None:
    """A request that finds all places taken by lines gets one at the next step; the line goes on afterwards."""
    dials = Dials(step_seconds=0.01)
    async with small_runtime(dials, max_num_seqs=2, scheduling_policy=policy) as client:
        lines = [prompt_of(BLOCK, seed=seed) for seed in range(3)]
        await run_lines_and_a_request(client, lines, prompt_of(2 * BLOCK, seed=9), at_once=2)


async def test_line_gives_up_its_blocks() -> None:
    """A request that finds too few free blocks gets those of lines."""
    tight = {"num_blocks": 13, "max_model_len": 12 * BLOCK, "watermark": 0.0}
    async with small_runtime(Dials(step_seconds=0.01), **tight) as client:
        lines = [prompt_of(3 * BLOCK, seed=seed) for seed in range(2)]
        await run_lines_and_a_request(client, lines, prompt_of(9 * BLOCK, seed=9), at_once=2)


async def test_request_waits_for_no_prompt_of_a_line() -> None:
    """A line's long prompt, which takes many steps, is put off while a request waits to begin."""
    async with small_runtime(Dials(step_seconds=0.01), max_num_batched_tokens=BLOCK) as client:
        await run_lines_and_a_request(client, [prompt_of(40 * BLOCK, seed=1)], prompt_of(BLOCK, seed=9), at_once=1)


async def test_waiting_lines_come_last() -> None:
    """Of what waits for the only place, requests come before lines, however late they came."""
    ended: list[str] = []
    dials = Dials(step_seconds=1.0)  # while the others come
    async with small_runtime(dials, max_num_seqs=1) as client:

        async def ask(name: str, *, is_batch: bool) -> None:
            await client.ask(prompt_of(BLOCK, seed=len(name)), max_tokens=30, is_batch=is_batch)
            ended.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask("first", is_batch=False))
            await eventually(lambda: client.runtime.desk.num_live_sequences == 1, "the first runs")
            nursery.start_soon(lambda: ask("line", is_batch=True))
            await eventually(lambda: client.runtime.desk.num_live_sequences == 2, "the line waits")
            nursery.start_soon(lambda: ask("request", is_batch=False))
            await eventually(lambda: client.runtime.desk.num_live_sequences == 3, "the request waits")
            dials.step_seconds = 0.0
    assert ended == ["first", "request", "line"]
