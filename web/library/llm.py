"""`LLM`: an engine for scripts. Each call blocks until all of its requests are answered.

What must always hold: outputs come in the order of the requests; what is invalid is refused before anything is
generated; Ctrl-C, or an error of one request, ends all requests of the call and leaves the engine ready for the next.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

import trio
from tqdm import tqdm

from quipu.actors.wiring import Runtime

from .direct_request import RunningRequest, read_request
from .engine_thread import EngineThread, be_quiet
from .library_errors import RequestError
from .model_settings import resolve_settings
from .outputs import RequestOutput, output_of
from .sampling_params import SamplingParams

Prompt = str | Sequence[int]
"""A text, or token ids."""
Message = Mapping[str, Any]
OVERLOADED: Final = 503
RETRY_S: Final = 0.1
"""How long a request waits that finds no room while others of its call are running."""
MAX_OPEN: Final = 512
"""Requests of one call that are open at once. The others wait for theirs to end."""


class LLM:
    """A model, for scripts.

        llm = LLM("demo")
        for output in llm.generate(["A quipu is", "Knots are"], SamplingParams(max_tokens=32)):
            print(output.outputs[0].text, output.usage)

    `settings` are the flags of `quipu serve`, with underscores. Usage records are kept if `data_dir` is one of them.
    Raises CheckpointError, LedgerError and ValueError for settings that cannot be used, TypeError for unknown ones, and
    EngineError if the engine cannot be started. Not to be used from an event loop: see `AsyncLLM`.
    """

    def __init__(self, model: str = "demo", **settings: Any) -> None:
        be_quiet()
        self._thread = EngineThread(resolve_settings(model, settings))
        self._close = weakref.finalize(self, self._thread.stop)
        self._close.atexit = False
        atexit.register(self._close)  # before the interpreter ends threads; `finalize` itself would be too late
        self._thread.start()
        try:
            self._thread.ready.result()
        except BaseException:
            self.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, each as a request of its own.

        `fields` are further fields of `POST /v1/completions`. A progress bar is shown on a terminal. Raises
        RequestError and EngineError.
        """
        several = _several(prompts)
        bodies = [
            {"prompt": prompt if isinstance(prompt, str) else list(prompt), **params.fields(is_chat=False), **fields}
            for prompt, params in zip(several, _for_each(sampling_params, len(several)), strict=True)
        ]
        return self._run(bodies, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        `fields` are further fields of `POST /v1/chat/completions`, such as `tools`, `response_format` and
        `chat_template_kwargs`. Raises RequestError and EngineError.
        """
        several: Any = [messages] if all(isinstance(message, Mapping) for message in messages) else messages
        bodies = [
            {"messages": [dict(message) for message in conversation], **params.fields(is_chat=True), **fields}
            for conversation, params in zip(several, _for_each(sampling_params, len(several)), strict=True)
        ]
        return self._run(bodies, use_tqdm=use_tqdm)

    def metrics(self) -> str:
        """Return all metrics in the Prometheus text format. Raises EngineError."""
        return self._thread.submit(render_metrics).future.result()

    def close(self) -> None:
        """End the engine. May be called any number of times; the end of the program does it, too."""
        self._close()
        atexit.unregister(self._close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _run(self, bodies: Sequence[Mapping[str, Any]], *, use_tqdm: bool) -> list[RequestOutput]:
        is_off = not (use_tqdm and sys.stderr.isatty())
        with tqdm(total=len(bodies), unit="req", file=sys.stderr, disable=is_off) as bar:
            call = self._thread.submit(partial(_answer_all, bodies, bar.update))
            try:
                answered = call.future.result()
            except BaseException:
                self._thread.cancel(call)
                raise
        return [output_of(request_id, body) for request_id, body in answered]


async def render_metrics(runtime: Runtime) -> str:
    return runtime.desk.render_metrics().decode()


async def _answer_all(
    bodies: Sequence[Mapping[str, Any]], on_ended: Callable[[int], object], runtime: Runtime
) -> list[tuple[str, bytes]]:
    """Return the id and the response's body of each request, in order. Raises RequestError."""
    desk = runtime.desk
    asked = []
    for number, body in enumerate(bodies):
        try:
            asked.append(await read_request(desk, body))
        except RequestError as error:
            if len(bodies) > 1:
                error.args = (f"request {number}: {error.message}",)
            raise
    answered: list[tuple[str, bytes]] = [("", b"")] * len(asked)
    waiting = iter(range(len(asked)))
    num_running = 0
    failures: list[Exception] = []

    async def answer_some() -> None:
        nonlocal num_running
        for number in waiting:
            while True:
                num_running += 1
                try:
                    answered[number] = (asked[number].request_id, await RunningRequest(asked[number]).run(desk))
                    break
                except RequestError as error:
                    if error.status != OVERLOADED or num_running == 1:
                        failures.append(error)
                        nursery.cancel_scope.cancel()
                        return
                    asked[number] = await read_request(desk, bodies[number])  # a new request, with a new id
                finally:
                    num_running -= 1
                await trio.sleep(RETRY_S)
            on_ended(1)

    async with trio.open_nursery() as nursery:
        for _ in range(min(MAX_OPEN, len(asked))):
            nursery.start_soon(answer_some)
    if failures:
        raise failures[0]
    return answered


def _several(prompts: Any) -> Sequence[Prompt]:
    """Return a list of prompts; one prompt is a list of one."""
    is_one = isinstance(prompts, str) or (len(prompts) > 0 and all(isinstance(item, int) for item in prompts))
    return [prompts] if is_one else list(prompts)


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, number: int) -> Iterable[SamplingParams]:
    """Return the parameters of each request. Raises ValueError if there is another number of them."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * number
    if len(params) != number:
        raise ValueError(f"there are {number} prompts and {len(params)} sampling parameters")
    return params
