"""The whole of quipu on one event loop, over HTTP, with the reference backend and the tiny checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio

from quipu.actors.engine.engine import LoopHost
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.wiring import Runtime
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.runtimes import open_with_kept_vocabulary, runtime_config, serving_info
from tests.traps.wire import COMPLETIONS, body, prompt_of
from tests.web.asgi_client import Client as HttpClient


@attrs.define
class Server:
    http: HttpClient
    runtime: Runtime
    defaults: dict[str, Any]
    """Default fields of every request."""

    async def ask(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Send one completion, which must succeed, and return the response."""
        exchange, answer = await self.http.post(COMPLETIONS, body(prompt, **{**self.defaults, **fields}))
        assert exchange.status == 200, answer
        return dict(answer)

    async def ask_beside_others(self, prompt: list[int], *, num_others: int = 30, **fields: Any) -> dict[str, Any]:
        """Send one completion while others, some of which share its beginning, are served."""
        answers: list[dict[str, Any]] = []

        async def one(index: int) -> None:
            await self.ask(
                prompt[: index % 5 * 16] + prompt_of(10 + index, seed=100 + index), max_tokens=20, seed=index
            )

        async def this() -> None:
            await trio.sleep(0.02)
            answers.append(await self.ask(prompt, **fields))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(this)
            for index in range(num_others):
                nursery.start_soon(one, index)
        return answers[0]


@asynccontextmanager
async def reference_runtime(defaults: dict[str, Any], **changes: Any) -> AsyncIterator[Server]:
    config = runtime_config(**{"executor": "reference", "max_num_seqs": 32, "num_blocks": 256, **changes})
    async with open_with_kept_vocabulary(
        config, serving_info(config), lambda _: LoopHost(config.engine), make_renderer=InlineRenderer
    ) as runtime:
        with trio.fail_after(100):
            while not runtime.desk.health().is_ready:
                await trio.sleep(0.01)
            yield Server(HttpClient(make_app(runtime.desk, AppOptions(domain="tenant"))), runtime, defaults)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
