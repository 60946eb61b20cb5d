"""`AsyncLLM`: an engine for programs under trio or asyncio.

    async with AsyncLLM("demo") as llm:
        async for output in llm.generate("A quipu is"):
            ...                                             # what there is so far, and at last everything
        output = await llm.chat([{"role": "user", "content": "Hello"}])

What must always hold: the caller's event loop never blocks on the engine; a request whose caller is cancelled, or no
longer reads, is aborted at once and holds nothing after the engine's next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread
import trio

from quipu.actors.wiring import Runtime

from .direct_request import RunningRequest, read_request
from .engine_thread import Call, EngineThread, be_quiet
from .llm import Message, Prompt, render_metrics
from .model_settings import resolve_settings
from .outputs import RequestOutput, output_of
from .sampling_params import SamplingParams

T = TypeVar("T")


class AsyncLLM:
    """A model, for programs under trio or asyncio. An async context manager: the engine runs within its block.

    `settings` are the flags of `quipu serve`, with underscores. Usage records are kept if `data_dir` is one of them.
    Raises CheckpointError, LedgerError and ValueError for settings that cannot be used, and TypeError for unknown ones;
    entering the block raises EngineError if the engine cannot be started.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        be_quiet()
        self._thread = EngineThread(resolve_settings(model, settings))

    async def __aenter__(self) -> Self:
        self._thread.start()
        try:
            await _ended(self._thread.ready)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._stop()

    async def _stop(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.stop)

    async def metrics(self) -> str:
        """Return all metrics in the Prometheus text format. Raises EngineError."""
        return await _ended(self._thread.submit(render_metrics).future)

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **fields: Any) -> OutputStream:
        """Continue a prompt. `fields` are further fields of `POST /v1/completions`.

        Nothing is sent before the stream is read or awaited, which raises RequestError and EngineError.
        """
        params = sampling_params or SamplingParams()
        ids_or_text = prompt if isinstance(prompt, str) else list(prompt)
        return OutputStream(self._thread, {"prompt": ids_or_text, **params.fields(is_chat=False), **fields})

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **fields: Any
    ) -> OutputStream:
        """Answer a conversation. `fields` are further fields of `POST /v1/chat/completions`.

        Nothing is sent before the stream is read or awaited, which raises RequestError and EngineError.
        """
        params = sampling_params or SamplingParams()
        conversation = [dict(message) for message in messages]
        return OutputStream(self._thread, {"messages": conversation, **params.fields(is_chat=True), **fields})


class OutputStream:
    """The outputs of one request: `async for` yields them as they grow, `await` returns the complete one.

    Outputs that the reader has no time for are left out: each is everything so far, and the last one, whose `finished`
    is true, comes always. A stream that nobody refers to any more ends its request, and `aclose` ends it at once.
    """

    def __init__(self, thread: EngineThread, body: Mapping[str, Any]) -> None:
        self._thread = thread
        self._body = body
        self._call: Call[RequestOutput] | None = None
        self._state: _State | None = None
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        call, state = self._begin()
        step = self._thread.submit(state.wait_change)
        try:
            output = await _ended(step.future)
            if output is None:
                self._is_over = True
                return await _ended(call.future)
        except BaseException:
            self._thread.cancel(step)
            self._abort()
            raise
        return output

    def __await__(self) -> Generator[Any, Any, RequestOutput]:
        return self._whole().__await__()

    async def _whole(self) -> RequestOutput:
        call, _ = self._begin()
        try:
            return await _ended(call.future)
        except BaseException:
            self._abort()
            raise

    async def aclose(self) -> None:
        """End the request, if it has not ended."""
        self._abort()
        await anyio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._abort()

    def __del__(self) -> None:
        self._abort()

    def _begin(self) -> tuple[Call[RequestOutput], _State]:
        if self._call is None or self._state is None:
            self._state = _State(self._body)
            self._call = self._thread.submit(self._state.run)
        return self._call, self._state

    def _abort(self) -> None:
        self._is_over = True
        if self._call is not None and not self._call.future.done():
            self._thread.cancel(self._call)


class _State:
    """A stream's request, in the thread of the actors."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._running: RunningRequest | None = None
        self._changed = trio.Event()
        self._seen = 0
        self._has_ended = False

    async def run(self, runtime: Runtime) -> RequestOutput:
        """Have the request answered. Raises RequestError."""
        try:
            asked = await read_request(runtime.desk, self._body)
            self._running = RunningRequest(asked, self._wake)
            return output_of(asked.request_id, await self._running.run(runtime.desk))
        finally:
            self._has_ended = True
            self._wake()

    async def wait_change(self, runtime: Runtime) -> RequestOutput | None:
        """Return the output once there is more than the last time; None once the request has ended."""
        while not self._has_ended:
            running = self._running
            if running is not None and running.version > self._seen:
                self._seen = running.version
                return running.so_far()
            self._changed = trio.Event()
            await self._changed.wait()
        return None

    def _wake(self) -> None:
        self._changed.set()


async def _ended(future: Future[T]) -> T:
    """Wait for a future of another thread, under trio or asyncio, and return its result."""
    done = anyio.Event()
    wake = _waker(done.set)
    future.add_done_callback(lambda _: wake())
    await done.wait()
    return future.result()


def _waker(function: Callable[[], object]) -> Callable[[], None]:
    """Return what has a function called in this event loop, from any thread, as long as the loop runs."""
    if trio.lowlevel.in_trio_run():
        token = trio.lowlevel.current_trio_token()

        def wake_trio() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(function)

        return wake_trio
    loop = asyncio.get_running_loop()

    def wake_asyncio() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(function)

    return wake_asyncio
