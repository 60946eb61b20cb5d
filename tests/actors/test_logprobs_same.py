"""The same prompt cold, warm, in chunks, beside 30 others: the same text and the same logprobs, to the bit.

The whole of quipu in one loop, over HTTP, on the reference backend with the demo checkpoint.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from tests.traps.wire import COMPLETIONS, body, prompt_of
from tests.web.fakes import Client as HttpClient

from houses import house_config, serving_info
from quipu.actors.engine import LoopHost
from quipu.actors.wiring import open_house
from quipu.web.app import make_app
from quipu.web.options import AppOptions

PROMPT = prompt_of(70, seed=5)
ASKED = {"max_tokens": 12, "temperature": 1.0, "seed": 11, "logprobs": 5}


@attrs.define
class Server:
    http: HttpClient

    async def ask(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        exchange, answer = await self.http.post(COMPLETIONS, body(prompt, **{**ASKED, **fields}))
        assert exchange.status == 200, answer
        return dict(answer)

    async def ask_in_a_crowd(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """While 30 others, some of which begin alike, are served."""
        answers: list[dict[str, Any]] = []

        async def one(index: int) -> None:
            await self.ask(
                PROMPT[: index % 5 * 16] + prompt_of(10 + index, seed=100 + index), max_tokens=20, seed=index
            )

        async def this() -> None:
            await trio.sleep(0.02)
            answers.append(await self.ask(prompt, **fields))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(this)
            for index in range(30):
                nursery.start_soon(one, index)
        return answers[0]


@asynccontextmanager
async def reference_house(**changes: Any) -> AsyncIterator[Server]:
    config = house_config(**{"executor": "reference", "max_num_seqs": 32, "num_blocks": 256, **changes})
    async with open_house(config, serving_info(config), LoopHost(config.engine)) as house:
        with trio.fail_after(100):
            while not house.desk.health().is_ready:
                await trio.sleep(0.01)
            yield Server(HttpClient(make_app(house.desk, AppOptions(domain="tenant"))))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_outputs() -> None:
    """Text and logprobs of what is drawn, with a seed at temperature 1."""
    async with reference_house() as server:
        cold, warm = await server.ask(PROMPT), await server.ask(PROMPT)
        crowded = await server.ask_in_a_crowd(PROMPT)
    async with reference_house(max_num_batched_tokens=23) as server:
        chunked = await server.ask_in_a_crowd(PROMPT)
    assert (cached(cold), cached(warm), cached(crowded)) == (0, 64, 64)
    assert len(set(cold["choices"][0]["logprobs"]["token_logprobs"])) > 6, "logprobs that say something"
    assert warm["choices"] == crowded["choices"] == chunked["choices"] == cold["choices"]


async def test_prompts() -> None:
    """Those of the prompt, which is never read from the cache, and of what follows it."""
    fields = {"echo": True, "prompt_logprobs": 7}
    async with reference_house() as server:
        cold = await server.ask(PROMPT, **fields)
        warm, plain = await server.ask(PROMPT, **fields), await server.ask(PROMPT)
        crowded = await server.ask_in_a_crowd(PROMPT, **fields)
    async with reference_house(max_num_batched_tokens=23, num_blocks=40, max_model_len=600) as server:
        chunked = await server.ask_in_a_crowd(PROMPT, **fields)
    assert (cached(cold), cached(warm), cached(plain), cached(crowded), cached(chunked)) == (0, 0, 64, 0, 0)
    assert warm["choices"] == crowded["choices"] == chunked["choices"] == cold["choices"]
    (echoed,), (alone,) = cold["choices"], plain["choices"]
    assert echoed["text"].endswith(alone["text"])
    for name, values in alone["logprobs"].items():
        if name != "text_offset":
            assert echoed["logprobs"][name][len(PROMPT) :] == values
    assert len(echoed["prompt_logprobs"]) == len(PROMPT)
