"""`AsyncLLM`: the same under trio and asyncio, and a caller that is cancelled leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from quipu import AsyncLLM, EngineError, RequestError, SamplingParams
from quipu.actors.ledger.reconciling import reconcile
from tests.web.library.library_metrics import held_in

BACKENDS = ("trio", "asyncio")
LONG = SamplingParams(max_tokens=1500, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, temperature=0)


@asynccontextmanager
async def slow_engine(**settings: Any) -> AsyncIterator[AsyncLLM]:
    """Open an engine whose steps take long enough to be seen from outside."""
    with anyio.fail_after(60):
        async with AsyncLLM("demo", executor="fake", fake_step_seconds=0.002, **settings) as llm:
            yield llm


async def wait_idle(llm: AsyncLLM) -> None:
    """Wait until no account is open and no sequence is left."""
    while held_in(await llm.metrics()):
        await anyio.sleep(0.002)


async def stream_then_await(llm: AsyncLLM) -> None:
    outputs = [output async for output in llm.generate([7] * 20, SHORT)]
    last = outputs[-1]
    assert last.finished and not any(output.finished for output in outputs[:-1])
    assert len(last.outputs[0].token_ids) == 5 and last.usage is not None and last.usage.prompt_tokens == 20
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(lengths)
    for output in outputs:
        assert last.outputs[0].text.startswith(output.outputs[0].text)
    again = await llm.generate([7] * 20, SHORT)
    assert again.outputs[0].text == last.outputs[0].text and again.num_cached_tokens == 16
    answer = await llm.chat([{"role": "user", "content": "Hi"}], SHORT)
    assert answer.finished


async def many_at_once(llm: AsyncLLM) -> None:
    async def ask(number: int) -> None:
        output = await llm.generate([number + 1] * 4, SamplingParams(max_tokens=number % 4 + 1))
        assert len(output.outputs[0].token_ids) == number % 4 + 1

    async with anyio.create_task_group() as group:
        for number in range(30):
            group.start_soon(ask, number)


async def cancelled_while_awaiting(llm: AsyncLLM) -> None:
    with anyio.CancelScope() as scope:

        async def cancel_when_running() -> None:
            while not held_in(await llm.metrics()):
                await anyio.sleep(0.002)
            scope.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel_when_running)
            await llm.generate("A cord.", LONG)
    assert scope.cancelled_caught
    await wait_idle(llm)


async def cancelled_while_streaming(llm: AsyncLLM) -> None:
    with anyio.CancelScope() as scope:
        async for _ in llm.generate("A cord.", LONG):
            scope.cancel()
    assert scope.cancelled_caught
    await wait_idle(llm)


async def left_loop(llm: AsyncLLM) -> None:
    async for _ in llm.generate("A cord.", LONG):
        break
    gc.collect()
    await wait_idle(llm)


async def closed_stream(llm: AsyncLLM) -> None:
    stream = llm.generate("A cord.", LONG)
    assert not (await anext(stream)).finished
    await stream.aclose()
    await wait_idle(llm)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def invalid_requests(llm: AsyncLLM) -> None:
    with pytest.raises(RequestError) as raised:
        await llm.generate("A cord.", SamplingParams(top_p=7))
    assert raised.value.param == "top_p"
    with pytest.raises(RequestError) as raised:
        async for _ in llm.chat([{"role": "nobody", "content": "Hi"}]):
            pass
    assert raised.value.param == "messages[0].role"
    assert (await llm.generate("A cord.", SHORT)).finished


CASES: list[Callable[[AsyncLLM], Awaitable[None]]] = [
    stream_then_await,
    many_at_once,
    cancelled_while_awaiting,
    cancelled_while_streaming,
    left_loop,
    closed_stream,
    invalid_requests,
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_cases(backend: str) -> None:
    """Streams grow to the whole output; cancelling, leaving and closing free everything; errors name the field."""

    async def run() -> None:
        async with slow_engine() as llm:
            for case in CASES:
                await case(llm)
                await wait_idle(llm)

    anyio.run(run, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaving_the_block(backend: str, tmp_path: Path) -> None:
    """The end of the block ends what is still running with EngineError, and records it; nobody can ask any more."""
    errors: list[Any] = []

    async def run() -> None:
        async with anyio.create_task_group() as group:
            async with slow_engine(data_dir=tmp_path) as llm:
                stream = llm.generate("A cord.", LONG)
                await anext(stream)

                async def read_on() -> None:
                    with pytest.raises(EngineError, match="stopped") as raised:
                        async for _ in stream:
                            pass
                    errors.append(raised.value)

                group.start_soon(read_on)
                await anyio.lowlevel.checkpoint()
        with pytest.raises(EngineError, match="stopped"):
            await llm.generate("A cord.", SHORT)

    anyio.run(run, backend=backend)
    assert len(errors) == 1
    (account,) = reconcile(data_dir=tmp_path)
    assert account.agrees and account.num_open == 0
    counted = {line.name: line.ledger for line in account.lines}
    assert counted['requests_total{outcome="cancelled"}'] == 1 and counted["generation_tokens_total"] > 0


def test_engine_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entering the block raises why the engine cannot start."""

    async def run() -> None:
        with pytest.raises(EngineError, match="vllm"):
            async with AsyncLLM("demo", executor="vllm", block_size=32):
                pass

    anyio.run(run, backend="asyncio")
