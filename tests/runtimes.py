"""Runtimes for tests: all of quipu in one event loop, on the KV-reading fake executor.

`Client` acts as a handler: it opens a request, reads its mailbox to the end and leaves. A correct engine answers with
`quipu.kernels.fake.continuation`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any
from unittest import mock

import attrs
import trio
import trio.testing
from prometheus_client.registry import Collector

from quipu.actors import wiring
from quipu.actors.accountant.actor import Accountant
from quipu.actors.accountant.journal import Journal, NoJournal
from quipu.actors.config.engine_config import EngineConfig
from quipu.actors.config.engine_roles import EngineRole
from quipu.actors.config.pooling_config import Task
from quipu.actors.config.runtime_config import RuntimeConfig
from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.detokenizer.decoder import Decoder
from quipu.actors.detokenizer.output_format import choose_format
from quipu.actors.engine.engine import Engine, LoopHost, loop_hosts
from quipu.actors.engine.executor import loading
from quipu.actors.engine.executor.step_runner import Executor
from quipu.actors.messages.handler import Closed, Delta, ScoredDelta, Started
from quipu.actors.messages.outcomes import RequestError
from quipu.actors.messages.prompts import Prompt, TokenPrompt
from quipu.actors.messages.sampling import SamplingParams
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.request_desk.interface import ServingInfo, VectorInfo
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.shared.checkpoint import DEMO
from quipu.actors.shared.tokenizers_library import load_library
from quipu.actors.text_workers import renderer
from quipu.actors.text_workers.renderer import InlineRenderer, MakeRenderer
from quipu.actors.tokenizer.actor import TokenizerActor
from quipu.actors.tokenizer.chat_template import ChatTemplate
from quipu.actors.tokenizer.encoder import load_encoder
from quipu.actors.tokenizer.template_source import read_template
from quipu.actors.wiring import Runtime, open_runtime
from quipu.kernels.fake import Dials, FakeBackend
from quipu.kernels.fake_scores import VECTOR_SIZE
from tests.actors.engine.block_manager.block_checks import check_manager
from tests.fake_oracle import continuation
from tests.tiny import BLOCK, BLOCK_BYTES, TINY, full_blocks

__all__ = ["BLOCK", "BLOCK_BYTES", "full_blocks"]

MAX_MODEL_LEN = 63 * BLOCK
PAIR = (EngineRole.PREFILL, EngineRole.DECODE)
num_engines = ContextVar("num_engines", default=1)
"""How many engines a small runtime has if its test does not say."""
engines_apart = ContextVar("engines_apart", default=False)
"""Whether a small runtime prefills on one engine and decodes on another, likewise."""
most_tokens = ContextVar("most_tokens", default=int(os.environ.get("QUIPU_TEST_MOST_TOKENS", "1")))
"""The most tokens that a sequence yields in a step of a small runtime, likewise."""


class SeenRecords(NoJournal):
    """Keeps the closed records in memory, and lets clients wait for none."""

    def __init__(self) -> None:
        self.records: list[UsageRecord] = []

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        self.records.append(record)
        release()


def num_passes(executor: Executor) -> int:
    """Return how many passes the fake backend of `executor` has run."""
    assert isinstance(executor.backend, FakeBackend)
    return executor.backend.num_passes


def runtime_config(**changes: Any) -> RuntimeConfig:
    """Make the config of a small runtime, with 63 usable blocks by default; `changes` by field name."""
    engine_fields = {field.name for field in attrs.fields(EngineConfig)}
    engine = {
        "model_path": str(TINY),
        "executor": "fake",
        "dtype": "auto",
        "load_format": "auto",
        "block_size": BLOCK,
        "num_blocks": 64,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 16 * BLOCK,
        "eos_token_ids": (),
        "fake_step_seconds": 0.0,
        "fake_most_tokens": most_tokens.get(),
        "step_overhead_tokens": 0,  # even small prompts wait for one another
        "kv_load": "always",  # not what is faster just then
    }
    runtime: dict[str, Any] = {"model_names": ("demo",), "vocab_size": 4096, "kv_dtype": "fake"}
    runtime["num_engines"] = num_engines.get()
    if engines_apart.get() and "num_engines" not in changes:
        engine["has_peers"] = True
        runtime |= {"num_engines": 2, "engine_roles": PAIR, "prefill_local_tokens": 0}
    for name, value in changes.items():
        (engine if name in engine_fields else runtime)[name] = value
    return RuntimeConfig(engine=EngineConfig(**engine), **runtime)


def serving_info(config: RuntimeConfig) -> ServingInfo:
    return ServingInfo(
        model_names=config.model_names,
        created=0,
        max_model_len=config.engine.max_model_len,
        block_size=config.engine.block_size,
        num_blocks=config.engine.num_blocks,
        vocab_size=config.vocab_size,
        settings={"speculative": config.engine.speculative, "max_num_seqs": config.engine.max_num_seqs},
        task=Task(config.engine.task),
        vectors=VectorInfo(VECTOR_SIZE, None) if config.engine.task == Task.EMBED else VectorInfo(),
    )


@attrs.frozen
class Answer:
    """Everything that one request returned."""

    texts: dict[int, str]
    reasons: dict[int, str]
    started: list[Started]
    record: UsageRecord
    error: RequestError | None
    vectors: dict[int, bytes] = attrs.field(factory=dict)
    """By prompt, where they were asked for."""


@attrs.define
class Client:
    runtime: Runtime
    config: RuntimeConfig
    dials: Dials
    records: list[UsageRecord] | None = None
    """All that were closed, unless the test has a journal of its own."""

    @property
    def engine(self) -> Engine:
        return self.engines[0]

    @property
    def engines(self) -> list[Engine]:
        """The running engines, in the order of their ids."""
        return [host.engine for host in self.runtime.hosts.values() if isinstance(host, LoopHost) and host.engine]

    def encode(self, *prompts: list[int] | Prompt, n: int = 1, max_tokens: int | None = 8, **fields: Any) -> Encode:
        names = ("temperature", "seed", "ignore_eos", "stop_token_ids", "logprobs", "dimensions")
        sampling = {name: fields.pop(name) for name in names if name in fields}
        return Encode(
            request_id=self.runtime.desk.new_request_id(),
            prompts=tuple(TokenPrompt(tuple(p)) if isinstance(p, list) else p for p in prompts),
            num_choices=n,
            max_tokens=max_tokens,
            sampling=SamplingParams(max_tokens=1, **{"temperature": 0.0, **sampling}),
            **{
                "stop": (),
                "include_stop": False,
                "skip_special_tokens": True,
                "domain": "tenant",
                "prompt_param": "prompt",
                "max_tokens_param": "max_tokens",
                **fields,
            },
        )

    def open(self, *prompts: list[int] | Prompt, **fields: Any) -> OpenRequest:
        return self.runtime.desk.open(self.encode(*prompts, **fields), "test")

    async def ask(self, *prompts: list[int] | Prompt, **fields: Any) -> Answer:
        ticket = self.open(*prompts, **fields)
        try:
            await ticket.start()
            return await read_answer(ticket)
        finally:
            ticket.leave()

    def assert_at_rest(self) -> None:
        """Assert that nothing is open, held, queued or tracked, and every invariant of the blocks holds."""
        assert self.runtime.entry_store.num_open_accounts == 0
        assert self.runtime.desk.num_open_requests == 0
        assert self.runtime.desk.num_live_sequences == 0
        assert not self.runtime.text_store.tracked and not self.runtime.text_store.prompts
        assert not self.runtime.text_store.deferred and not self.runtime.text_store.pending
        assert not self.runtime.job_store.pending
        for engine in self.engines:
            manager = engine.block_manager
            check_manager(manager)
            assert manager.allocations == {}
            assert manager.pins.num_marks == 0
            assert manager.pool.num_free + manager.pool.num_pinned_only + 1 == self.config.engine.num_blocks
            assert engine.batcher.sequences == {}
            assert engine.batcher.num_groups == 0


async def assert_nothing_routed(client: Client) -> None:
    """Assert that the router keeps nothing of any sequence once it has heard of the end of the last one."""
    await trio.testing.wait_all_tasks_blocked()
    routes = client.runtime.route_store
    assert not routes.sequences and not routes.prefilling and not routes.groups
    assert not routes.prompts and not routes.unrouted and not routes.unrouted_resumed
    assert len(routes.routing.sent) == 0


def value_of(metric: Collector) -> float:
    """Return the value of a counter or a gauge, summed over engines and other labels."""
    (family,) = metric.collect()
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def kill_engine(client: Client, index: int = 0) -> None:
    """Make an engine's KV-block manager raise at its next message, as a broken invariant would."""

    def die(*_: object) -> None:
        raise RuntimeError("a block table cannot be trusted")

    setattr(client.engines[index].block_manager, "grant", die)  # noqa: B010 - mypy lets no method be assigned


async def read_answer(ticket: OpenRequest) -> Answer:
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    started: list[Started] = []
    vectors: dict[int, bytes] = {}
    while True:
        for event in await ticket.mailbox.get():
            match event:
                case Started():
                    started.append(event)
                case Delta():
                    assert event.index not in reasons, "a choice continued after its finish reason"
                    texts[event.index] = texts.get(event.index, "") + event.text
                    if event.finish_reason is not None:
                        reasons[event.index] = event.finish_reason.value
                    if isinstance(event, ScoredDelta) and event.of_prompt is not None and event.of_prompt.vector:
                        assert event.index not in vectors, "a vector was sent twice"
                        vectors[event.index] = event.of_prompt.vector
                case Closed():
                    return Answer(texts, reasons, started, event.record, event.error, vectors)


kept_library, kept_encoder, kept_decoder = cache(load_library), cache(load_encoder), cache(Decoder)
kept_source, kept_format = cache(read_template), cache(choose_format)
"""Kept because these take several times as long as the rest of a small runtime, and are immutable."""
KEPT = frozenset(map(str, (TINY, DEMO)))
"""Checkpoints that no test changes."""


@cache
def _kept_template(source: str, variables: frozenset[tuple[str, str]], tool_source: str | None) -> ChatTemplate:
    return ChatTemplate(source, dict(variables), tool_source)


def kept_template(
    source: str, variables: Mapping[str, str], tool_source: str | None, *, lists_parts: bool
) -> ChatTemplate:
    """Return a compiled template, which has no state. No checkpoint that is kept reads images."""
    assert not lists_parts
    return _kept_template(source, frozenset(variables.items()), tool_source)


@asynccontextmanager
async def open_with_kept_vocabulary(*arguments: Any, **options: Any) -> AsyncIterator[Runtime]:
    """Open a runtime; the files of the tiny and of the demo model are read only once for all runtimes."""
    kept: dict[str, Callable[..., object]] = {}
    if arguments[0].engine.model_path in KEPT:
        kept = {
            "load_library": kept_library,
            "load_encoder": kept_encoder,
            "Decoder": kept_decoder,
            "read_template": kept_source,
        }
        if vars(wiring)["choose_format"] is choose_format:  # otherwise a test has replaced it
            kept["choose_format"] = kept_format
    async with AsyncExitStack() as stack:
        with ExitStack() as patches:
            if kept:
                patches.enter_context(mock.patch.multiple(wiring, **kept))
                patches.enter_context(mock.patch.object(renderer, "ChatTemplate", kept_template))
            runtime = await stack.enter_async_context(open_runtime(*arguments, **options))
        yield runtime


def load_with_kept_vocabulary(config: EngineConfig) -> Executor:
    """Load an executor; the files of the tiny and of the demo model are read only once for all engines."""
    if config.model_path not in KEPT:
        return loading.load_executor(config)
    with mock.patch.object(loading, "load_library", kept_library):
        return loading.load_executor(config)


@asynccontextmanager
async def small_runtime(
    dials: Dials | None = None,
    *,
    make_host: Callable[..., LoopHost] = LoopHost,
    journal: Journal | None = None,
    make_accountant: Callable[..., Accountant] = Accountant,
    make_tokenizer: Callable[..., TokenizerActor] = TokenizerActor,
    make_detokenizer: Callable[..., Detokenizer] = Detokenizer,
    make_renderer: MakeRenderer = InlineRenderer,
    encode_apart: bool = False,
    **changes: Any,
) -> AsyncIterator[Client]:
    """Open a runtime on the fake executor, in this loop. `dials` apply to every engine that it starts.

    `make_host` is given the engine's config and the function that loads its executor. Chats are rendered in this
    process, unless `make_renderer` says otherwise.
    """
    config = runtime_config(**changes)
    dials = dials or Dials(step_seconds=0.01)
    seen = SeenRecords() if journal is None else None

    def load(engine: EngineConfig) -> Executor:
        executor = load_with_kept_vocabulary(engine)
        assert isinstance(executor.backend, FakeBackend)
        dials.most_tokens = max(dials.most_tokens, engine.fake_most_tokens)
        executor.backend.dials = dials
        return executor

    def make_any(_: int) -> LoopHost:
        return make_host(config.engine, load)

    hosts = loop_hosts(config.engine, load) if make_host is LoopHost else make_any
    async with open_with_kept_vocabulary(
        config,
        serving_info(config),
        hosts,
        journal=journal or seen,
        make_accountant=make_accountant,
        make_tokenizer=make_tokenizer,
        make_detokenizer=make_detokenizer,
        make_renderer=make_renderer,
        encode_apart=encode_apart,
    ) as runtime:
        while not runtime.desk.health().is_ready or any(engine.ready is None for engine in runtime.desk.engines()):
            await trio.lowlevel.checkpoint()
        yield Client(runtime, config, dials, None if seen is None else seen.records)


def text_of(token_ids: list[int]) -> str:
    """Return the complete text that a client sees for token ids."""
    decoder = kept_decoder(kept_library(TINY)).make_decoder(skip_special_tokens=True, prompt_tail=())
    return "".join(map(decoder.push, token_ids)) + decoder.flush()


async def eventually(look: Callable[[], bool], what: str, within_s: float = 60.0) -> None:
    """Wait until `look` returns true, outside of trio's mock clocks."""
    with trio.move_on_after(within_s):
        while not look():
            await trio.sleep(0.02)
        return
    raise AssertionError(f"never: {what}")


def assert_served(answer: Answer, prompt: list[int], max_tokens: int) -> None:
    """Check the text, the counts and the record of a complete answer."""
    expected = text_of(continuation(prompt, max_tokens))
    assert answer.error is None and set(answer.texts.values()) == {expected}
    assert not answer.record.disputed
    assert answer.record.prompt_tokens == len(prompt) and answer.record.completion_tokens == max_tokens
