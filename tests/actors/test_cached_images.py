"""Chats with images in a whole runtime: what is cached of them, and what becomes of them when engines die."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from quipu.actors.messages.images import IMAGE_MARK, EncodedImage
from quipu.actors.messages.prompts import CacheTtl, ChatPrompt, ContentMark
from tests.kernels.transformers_runner.seeing_models import FAMILIES, NUM_TOKENS
from tests.runtimes import Client, kill_engine, small_runtime
from tests.seeing import SHOWN, TOKENS, VOCAB_SIZE, drawn_url, make_seeing_checkpoint

TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing_checkpoint(tmp_path_factory.mktemp("seeing"), family)


@asynccontextmanager
async def seeing_runtime(folder: Path, num_engines: int = 1) -> AsyncIterator[Client]:
    fields = {"model_path": str(folder), "vocab_size": VOCAB_SIZE, "num_engines": num_engines}
    async with small_runtime(**fields) as client:
        yield client


def chat(*seeds: int) -> ChatPrompt:
    images = tuple(EncodedImage(drawn_url(seed).partition(",")[2], "messages[0]") for seed in seeds)
    content = TEXT + "".join(f"{IMAGE_MARK} then {TEXT}" for _ in seeds)
    marks = (ContentMark(CacheTtl.FIVE_MINUTES, 0, len(TEXT) + 1),)
    return ChatPrompt(({"role": "user", "content": content},), images=images, marks=marks)


async def test_choices_and_breakpoints(folder: Path) -> None:
    """Every choice sees the images, and all but the first find them cached; a breakpoint behind one is behind all of
    its tokens; counts of tokens include them."""
    async with seeing_runtime(folder) as client:
        answer = await client.ask(chat(1, 2), n=3, max_tokens=4)
        assert answer.error is None and len(set(answer.texts.values())) == 1 and len(answer.texts) == 3
        job = await client.ask(chat(1, 2), max_tokens=4)
        num_prompt = answer.record.prompt_tokens
        assert num_prompt is not None and job.record.cached_tokens == (num_prompt - 1) // 16 * 16
        alone = await client.ask(chat(), max_tokens=4)
        assert alone.record.prompt_tokens is not None
        assert num_prompt > alone.record.prompt_tokens + 2 * NUM_TOKENS
        other = await client.ask(chat(1, 3), max_tokens=4)
        assert other.record.cached_tokens is not None and job.record.cached_tokens > other.record.cached_tokens
        assert not any(record.disputed for record in client.records or [])
        client.assert_at_rest()


async def test_engine_dies(folder: Path) -> None:
    """A chat about images goes on where it was on another engine, where the same images then hit."""
    async with seeing_runtime(folder, num_engines=2) as client:
        ticket = client.open(chat(1), max_tokens=30, n=2)
        await ticket.start()
        await ticket.mailbox.get()
        (index,) = [index for index, engine in enumerate(client.engines) if engine.batcher.sequences]
        kill_engine(client, index)
        while not (closed := ticket.mailbox.closed):
            await ticket.mailbox.get()
        ticket.leave()
        assert closed.error is None and closed.record.num_engine_deaths == 1
        assert closed.record.completion_tokens == 60 and not closed.record.disputed
        again = await client.ask(chat(1), max_tokens=4)
        prompt_tokens = closed.record.prompt_tokens
        assert prompt_tokens is not None and again.record.cached_tokens == (prompt_tokens - 1) // 16 * 16
        other = await client.ask(chat(2), max_tokens=4)
        assert other.record.cached_tokens is not None and 0 < other.record.cached_tokens < prompt_tokens - NUM_TOKENS
        with trio.fail_after(60):
            while not client.runtime.desk.health().is_ready:
                await trio.sleep(0.01)


async def test_placeholders_without_images(folder: Path, family: str) -> None:
    """A chat whose text has a placeholder, and no image, shares no block with a chat that has one."""
    async with seeing_runtime(folder) as client:
        seen = await client.ask(chat(1), max_tokens=4)
        part = TOKENS[family]["image_token"]
        written = SHOWN[family].replace(part, part * NUM_TOKENS)
        text = ChatPrompt(({"role": "user", "content": f"{TEXT}{written} then {TEXT}"},))
        told = await client.ask(text, max_tokens=4)
        assert told.record.prompt_tokens == seen.record.prompt_tokens
        assert 0 < (told.record.cached_tokens or 0) < 48
