"""Faults of vLLM's runner under a whole engine: what it diverges in, runs out of, or computes wrongly.

Every request ends as it would on any other executor, and no count is wrong. Collected with `QUIPU_TEST_EXECUTOR=vllm`:
the engines share one backend, on the tiny model in float32, in which texts do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import structlog.testing
import torch
import trio

from quipu.actors.engine.scheduler.completion import NOT_FINITE
from quipu.actors.messages.outcomes import ErrorKind, Outcome
from tests.faults.deadly_engines import Deaths, Output, ask, open_deadly, settle
from tests.prompts import prompt_of
from tests.runtimes import Client, value_of
from tests.vllm_runner.fake_over_vllm import FakeOverVllm, problems
from tests.vllm_runner.shared_vllm import shared_vllm
from tests.vllm_runner.vllm_backends import SIZE, vllm_marks

pytestmark = vllm_marks

PROMPT = prompt_of(2 * SIZE + 10, seed=5)
FIELDS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "logprobs": 0}


@asynccontextmanager
async def open_vllm(**changes: Any) -> AsyncIterator[Client]:
    """Open a runtime on vLLM's runner."""
    async with open_deadly(Deaths(), executor="vllm", eos_token_ids=(), **changes) as client:
        yield client


def runner() -> Any:
    """Return vLLM's runner."""
    return vars(shared_vllm().backend)["_runner"]


@contextmanager
def before_sampling(act: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `act` with the logits of each pass, before anything is drawn."""
    sampler = runner().sampler

    def sample(logits: torch.Tensor, sampling_metadata: Any) -> Any:
        act(logits)
        return sampler(logits, sampling_metadata)

    runner().sampler = sample
    try:
        yield
    finally:
        runner().sampler = sampler


def move_on() -> None:
    runner().input_batch.num_computed_tokens_cpu[0] += 1


def add_a_block() -> None:
    runner().input_batch.block_table[0].num_blocks_per_row[0] += 1


def swap_blocks() -> None:
    table = runner().input_batch.block_table[0].block_table.np
    table[0, [0, 1]] = table[0, [1, 0]]


def replace_last_block() -> None:
    table = runner().input_batch.block_table[0]
    table.block_table.np[0, table.num_blocks_per_row[0] - 1] += 1


def feed_another_token() -> None:
    runner().input_ids.cpu[0] += 1


def rename() -> None:
    vars(runner().input_batch)["_req_ids"][0] = "another"


COLUMNS: dict[str, tuple[Callable[[], None], str]] = {
    "requests": (rename, "has requests"),
    "positions": (move_on, "other positions"),
    "lengths": (add_a_block, "other lengths of block tables"),
    "last blocks": (replace_last_block, "other last blocks"),
    "tokens": (feed_another_token, "other input tokens"),
}


async def undisturbed() -> Output:
    async with open_vllm() as client:
        return await ask(client, PROMPT, **FIELDS)


CASES = [*((column, at) for column in COLUMNS for at in (1, 4)), ("tables", 1)]


@pytest.mark.parametrize(("column", "at"), CASES)
async def test_diverged_runner_ends_the_engine(column: str, at: int) -> None:
    """Whatever it has otherwise, at an admission or in a decode, nothing is drawn: the engine dies with the reason, and
    the next one goes on. Whole tables are compared at admissions only."""
    diverge, message = COLUMNS.get(column, (swap_blocks, "other blocks of request"))
    wanted, num_passes = await undisturbed(), 0
    async with open_vllm() as client:

        def act(logits: torch.Tensor) -> None:
            nonlocal num_passes
            num_passes += 1
            if num_passes == at:
                diverge()

        with before_sampling(act), structlog.testing.capture_logs() as lines:
            found = await ask(client, PROMPT, **FIELDS)
            await settle(client)
        assert value_of(client.runtime.metrics.usage_disputed) == 0
    (died,) = (line for line in lines if line["event"] == "engine.died")
    assert "RunnerDiverged: vLLM's runner" in died["reason"] and message in died["reason"]
    assert found.record.num_engine_deaths == 1 and not found.record.disputed
    assert (found.token_ids, found.usage) == (wanted.token_ids, wanted.usage)


async def test_nan_fails_its_request_alone() -> None:
    """A row whose logits hold NaN fails with the reason; the request beside it gets its text."""
    wanted, outputs = await undisturbed(), dict[str, Output]()
    async with open_vllm() as client:

        def act(logits: torch.Tensor) -> None:
            for row, length in enumerate(runner().input_batch.num_computed_tokens_cpu[: len(logits)]):
                if length == 5:  # only the short prompt's first decode is there
                    logits[row, 100] = torch.nan

        async def one(name: str, prompt: list[int]) -> None:
            outputs[name] = await ask(client, prompt, **FIELDS)

        with before_sampling(act):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one, "good", PROMPT)
                nursery.start_soon(one, "bad", prompt_of(5, seed=6))
        await settle(client)
    bad = outputs["bad"]
    assert bad.error is not None and bad.error.message == NOT_FINITE
    assert bad.record.outcome is Outcome.FAILED
    # none of them, if both passes were over before the loop had read the first one's token
    assert bad.record.completion_tokens == len(bad.token_ids[0]) <= 1
    assert (outputs["good"].token_ids, outputs["good"].usage) == (wanted.token_ids, wanted.usage)


SHORTAGES = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"),
    MemoryError(),
]


@contextmanager
def room_for(num_tokens: int, error: BaseException) -> Iterator[list[int]]:
    """Have passes over more tokens raise in the middle of vLLM's. Yields the sizes of those that did."""
    too_large = list[int]()
    forward = getattr(runner(), "_model_forward")  # noqa: B009 - a method of vLLM's

    def run(*arguments: Any, **named: Any) -> Any:
        size = len(named["positions"])
        if size > num_tokens:
            too_large.append(size)
            raise error
        return forward(*arguments, **named)

    with mock.patch.object(runner(), "_model_forward", run):
        yield too_large


@pytest.mark.parametrize("error", SHORTAGES, ids=["torch on GPUs", "torch on CPUs", "Python"])
async def test_pass_without_memory_is_divided(error: BaseException) -> None:
    """A pass that finds no memory is run in smaller parts: the text, the counts and the engine are the same."""
    wanted = await undisturbed()
    async with open_vllm() as client:
        with room_for(30, error) as too_large:
            found = await ask(client, PROMPT, **FIELDS)
        await settle(client)
        assert client.runtime.desk.health().incarnation == 1
    assert too_large and found.error is None
    assert (found.token_ids, found.usage) == (wanted.token_ids, wanted.usage)
    assert found.record.num_engine_deaths == found.record.recomputed_tokens == 0 and not found.record.disputed


async def test_request_that_never_fits_is_refused() -> None:
    """A request whose smallest pass finds no memory fails with that reason, and the engine goes on."""
    async with open_vllm() as client:
        with room_for(0, SHORTAGES[0]):
            failed = await ask(client, PROMPT, **FIELDS)
        await settle(client)
        after = await ask(client, PROMPT, **FIELDS)
        await settle(client)
    assert failed.error is not None and failed.error.kind is ErrorKind.OVERLOADED
    assert after.error is None and after.record.cached_tokens == 0, "what a failed pass wrote is not found"


async def test_blocks_are_watched() -> None:
    """The comparison with a cold pass, on which traps and fault tests rely here, sees a block with other contents."""
    async with open_deadly(Deaths(), eos_token_ids=()) as client:
        backend = client.engine.executor.backend
        assert isinstance(backend, FakeOverVllm)
        await ask(client, PROMPT, **FIELDS)
        await settle(client)
        assert problems == []
        for block in range(1, backend.memory_plan.num_blocks):
            whole = backend.allocate_on_host(1)
            backend.read_blocks([block], whole)
            whole[-4096:-4092] = np.float32(3.0).tobytes()  # of vLLM's part, which comes last
            backend.write_blocks([block], whole)
        again = await ask(client, [*PROMPT[: 2 * SIZE], *prompt_of(9, seed=9)], **FIELDS)
        await settle(client)
    assert again.error is not None and "vLLM's logits" in again.error.message
    assert problems and all("differ" in problem for problem in problems)
    problems.clear()
