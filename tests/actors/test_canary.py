"""The demo model as a canary: a wrong block in the prefix cache changes what it says about a document, and only that.

What must hold: wherever a block's contents come from (another document, what the block held before a reset, another
tenant), questions about facts in the block are answered wrongly, and questions about other facts as before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import attrs
import trio

from bench.demo_judges import is_right
from bench.demo_rows import long_document
from quipu.actors.engine.engine import LoopHost
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.batch import StepBatch
from quipu.kernels.demo.chat_encoder import ChatEncoder
from quipu.kernels.demo.text.chat_mixture import HELD_OUT
from quipu.kernels.demo.text.chats import Chat, user
from quipu.kernels.demo.text.facts import Fact
from quipu.kernels.demo.text.recall import Document, document_message
from quipu.kernels.kv_cache import KVCache
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.kernel_markers import MISSING
from tests.runtimes import BLOCK, open_with_kept_vocabulary, runtime_config, serving_info
from tests.traps.wire import COMPLETIONS
from tests.web.asgi_client import Client as HttpClient

EXECUTOR = "reference" if MISSING else "cpu"
NUM_DOCUMENTS = 4
NUM_ROUNDS = 4
"""How many blocks of each document are overwritten, one after another."""
NUM_BLOCKS = 1200


@attrs.define
class Reader:
    """Asks the demo model about documents, and knows the physical blocks of each."""

    http: HttpClient
    cache: KVCache
    encoder: ChatEncoder
    last_batch: list[StepBatch]

    async def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"model": "demo", "prompt": prompt, "temperature": 0, "max_tokens": 32, **fields}
        exchange, answer = await self.http.post(COMPLETIONS, body)
        assert exchange.status == 200, answer
        return dict(answer)

    def prompt(self, page: Page, question: str) -> str:
        return self.encoder.render(Chat("recall", [page.message, user(question)]), add_generation_prompt=True)

    async def read(self, page: Page, **fields: Any) -> None:
        """Have the document cached, and note its blocks."""
        await self.complete(self.prompt(page, "Hello!"), max_tokens=1, **fields)
        (page.blocks,) = self.last_batch[-1].block_tables

    async def are_right(self, asked: list[tuple[Page, Fact]], **fields: Any) -> list[bool]:
        """Ask all questions at once; each prompt but its question must come from the cache."""
        right: list[bool] = [False] * len(asked)

        async def ask(place: int, page: Page, fact: Fact) -> None:
            answer = await self.complete(self.prompt(page, fact.question(Random(place))), **fields)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= page.end // BLOCK * BLOCK
            right[place] = is_right(fact, answer["choices"][0]["text"])

        async with trio.open_nursery() as nursery:
            for place, (page, fact) in enumerate(asked):
                nursery.start_soon(ask, place, page, fact)
        return right

    def contents(self, block: int) -> list[Any]:
        """Return a copy of a block's keys and values in every layer."""
        return [tensor[block].clone() for layer in range(len(self.cache)) for tensor in self.cache[layer]]

    def overwrite(self, block: int, contents: list[Any]) -> None:
        """Write what `contents` returned into a block."""
        tensors = [tensor for layer in range(len(self.cache)) for tensor in self.cache[layer]]
        for tensor, content in zip(tensors, contents, strict=True):
            tensor[block] = content


@attrs.define(eq=False)
class Page:
    """A document in a prompt, and where the values of its facts are."""

    document: Document
    message: dict[str, Any]
    facts_of_block: dict[int, list[Fact]]
    """For each block of the prompt, by its place, the facts whose values are entirely in it."""
    end: int
    """Number of tokens up to the document's end."""
    blocks: list[int] = attrs.field(factory=list)
    """Physical block of each place."""

    @classmethod
    def draw(cls, seed: int, encoder: ChatEncoder) -> Page:
        random = Random(f"canary {HELD_OUT} {seed}")
        document = long_document(random, encoder)
        message = document_message(random, document)
        text = encoder.render(Chat("recall", [message]))
        offsets = encoder.tokenizer.encode(text, add_special_tokens=False).offsets
        facts_of_block: dict[int, list[Fact]] = {}
        position = 0
        for fact in document.facts:
            position = text.index(fact.statement, position) + len(fact.person)
            value = text.index(fact.value, position)
            places = [
                at for at, (left, right) in enumerate(offsets) if right > value and left < value + len(fact.value)
            ]
            if places[0] // BLOCK == (places[-1] + 1) // BLOCK:  # the token after it may know the value as well
                facts_of_block.setdefault(places[0] // BLOCK, []).append(fact)
        return cls(document, message, facts_of_block, len(offsets))


@asynccontextmanager
async def reading() -> AsyncIterator[Reader]:
    """Run the demo model in this event loop."""
    encoder = ChatEncoder()
    config = runtime_config(
        model_path=str(DEMO), executor=EXECUTOR, num_blocks=NUM_BLOCKS, max_model_len=2048, max_num_seqs=64,
        max_num_batched_tokens=2048, vocab_size=3072, eos_token_ids=(encoder.token_id("<|im_end|>"),),
    )  # fmt: skip
    host = LoopHost(config.engine)
    async with open_with_kept_vocabulary(
        config, serving_info(config), lambda _: host, make_renderer=InlineRenderer
    ) as runtime:
        with trio.fail_after(110):
            while not runtime.desk.health().is_ready:
                await trio.sleep(0.01)
            assert host.engine is not None
            backend: Any = host.engine.executor.backend
            batches: list[StepBatch] = []
            step = backend.step

            def step_and_note(batch: StepBatch) -> Any:
                batches[:] = [batch]
                return step(batch)

            backend.step = step_and_note
            yield Reader(
                HttpClient(make_app(runtime.desk, AppOptions(domain="tenant"))), backend.cache, encoder, batches
            )


def share(right: list[bool]) -> float:
    return sum(right) / len(right)


Contents = Callable[[Page, int], list[Any]]
"""Returns what to write into the block at a place of a page."""


async def check_wrong_blocks(reader: Reader, pages: list[Page], sources: dict[str, Contents], **fields: Any) -> None:
    """Overwrite blocks of each page, one after another, from each source, and check which answers change."""
    inside_before, outside_before = list[bool](), list[bool]()
    inside_after: dict[str, list[bool]] = {name: [] for name in sources}
    outside_after: dict[str, list[bool]] = {name: [] for name in sources}
    for turn in range(NUM_ROUNDS):
        random = Random(turn)
        inside: list[tuple[Page, Fact]] = []
        outside: list[tuple[Page, Fact]] = []
        places = []
        for page in pages:
            place = random.choice(sorted(page.facts_of_block)[turn::NUM_ROUNDS])
            places.append(place)
            inside += [(page, fact) for fact in page.facts_of_block[place]]
            far = [fact for at, facts in page.facts_of_block.items() if abs(at - place) > 2 for fact in facts]
            outside += [(page, fact) for fact in random.sample(far, 2)]
        inside_before += await reader.are_right(inside, **fields)
        outside_before += await reader.are_right(outside, **fields)
        kept = [reader.contents(page.blocks[place]) for page, place in zip(pages, places, strict=True)]
        for name, contents_for in sources.items():
            wrong = [contents_for(page, place) for page, place in zip(pages, places, strict=True)]
            for page, place, contents in zip(pages, places, wrong, strict=True):
                reader.overwrite(page.blocks[place], contents)
            inside_after[name] += await reader.are_right(inside, **fields)
            outside_after[name] += await reader.are_right(outside, **fields)
            for page, place, contents in zip(pages, places, kept, strict=True):
                reader.overwrite(page.blocks[place], contents)
    assert len(inside_before) >= NUM_DOCUMENTS * NUM_ROUNDS
    usual = share(inside_before + outside_before)
    assert usual >= 0.8, usual
    assert share(inside_before) >= 0.9 * usual
    for name in sources:
        assert share(inside_after[name]) <= 0.2, (name, share(inside_after[name]))
        assert abs(share(outside_after[name]) - share(outside_before)) <= 0.1, name


async def test_wrong_blocks() -> None:
    """A block with wrong contents changes answers, wherever they come from: a block of another document, or of the same
    one; what the block held before a reset, when it belonged to another document; another tenant's document."""
    async with reading() as reader:
        old = [Page.draw(100 + seed, reader.encoder) for seed in range(NUM_DOCUMENTS)]
        for page in old:
            await reader.read(page)
        before = {block: reader.contents(block) for page in old for block in page.blocks}
        exchange, _ = await reader.http.post("/reset_prefix_cache", b"")
        assert exchange.status == 200
        pages = [Page.draw(seed, reader.encoder) for seed in range(NUM_DOCUMENTS)]
        for page in pages:
            await reader.read(page, cache_salt="ours")
        used_again = [block for page in pages for block in page.blocks if block in before]
        assert len(used_again) > 100, "the pool must be so small that most blocks are used again"
        stale = next(iter(before.values()))
        theirs = [Page.draw(300 + seed, reader.encoder) for seed in range(NUM_DOCUMENTS)]
        for page in theirs:
            await reader.read(page, cache_salt="theirs")
        sources: dict[str, Contents] = {
            "of another document": lambda page, place: reader.contents(pages[pages.index(page) - 1].blocks[place]),
            "of the same document": lambda page, place: reader.contents(
                page.blocks[place + 9 if place < 40 else place - 9]
            ),
            "before a reset": lambda page, place: before.get(page.blocks[place], stale),
            "of another tenant": lambda page, place: reader.contents(theirs[pages.index(page)].blocks[place]),
        }
        await check_wrong_blocks(reader, pages, sources, cache_salt="ours")


async def test_wrong_position_changes_logprobs() -> None:
    """A block with the right tokens from another position changes the logprobs of an answer."""
    async with reading() as reader:
        page = Page.draw(0, reader.encoder)
        await reader.read(page)
        place, (fact, *_) = next(iter(sorted(page.facts_of_block.items())))
        prompt = reader.prompt(page, fact.question(Random(0)))

        async def logprobs() -> list[float]:
            answer = await reader.complete(prompt, logprobs=0)
            return list(answer["choices"][0]["logprobs"]["token_logprobs"])

        before = await logprobs()
        assert before == await logprobs()
        await reader.complete("<|endoftext|>" * BLOCK + prompt, max_tokens=1)
        (blocks,) = reader.last_batch[-1].block_tables
        reader.overwrite(page.blocks[place], reader.contents(blocks[place + 1]))
        assert before != await logprobs()
