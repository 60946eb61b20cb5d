"""Prompts of any size in the tokenizer: refused early, served in turn, and released as soon as possible."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import trio
import trio.testing
from tokenizers import models

from quipu.actors.messages.outcomes import ErrorKind
from quipu.actors.messages.prompts import ChatPrompt, TextPrompt
from quipu.actors.request_desk.interface import DeskClosed, PromptRefused
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.shared.block_keys import chain_keys
from quipu.actors.shared.fair_queue import QueueFull
from quipu.actors.shared.tokenizers_library import Library
from quipu.actors.text_workers.lanes import Lanes
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.chat_template import RenderedChat, TemplateError
from quipu.actors.tokenizer.prompt_sizes import SHORT_BYTES
from tests.actors.tokenizer.tokenizer_kinds import save, tiny
from tests.runtimes import Answer, read_answer, small_runtime
from tests.tiny import TINY

PATIENCE_S = 60.0
LONG = "It's a knotted cord. " * (SHORT_BYTES // 20)
CODE = "context_length_exceeded"
ROOMY: dict[str, Any] = {"num_blocks": 4000, "max_model_len": 50_000, "max_num_batched_tokens": 50_000}
"""Settings with which a long text fits, and is computed in one step: these tests are about what happens before."""
NO_ENCODER: Any = None
NUM_THREADS = Lanes(1, 1, NO_ENCODER).long.max_per_tenant
"""How many of one tenant's long texts are encoded at the same time."""


def chat(content: str) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": content},))


class Gate:
    """Block threads that encode long texts until the test opens the gate."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.held: list[str] = []
        self.started: list[tuple[str, list[str]]] = []
        """The beginning of each text, and of the texts that had been encoded when it was."""
        done: list[str] = []
        encode = Library.encode

        def encode_behind(library: Library, text: str, **limits: Any) -> object:
            beginning = text[:20]
            self.started.append((beginning, [*done]))
            if len(text) >= SHORT_BYTES // 2:
                self.held.append(beginning)
                assert self.opened.wait(PATIENCE_S)
            result = encode(library, text, **limits)
            done.append(beginning)
            return result

        monkeypatch.setattr(Library, "encode", encode_behind)

    @property
    def num_inside(self) -> int:
        return len(self.held)

    async def holds(self, count: int) -> None:
        while self.num_inside < count:
            await trio.sleep(0.001)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    it = Gate(monkeypatch)
    yield it
    it.opened.set()


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is tokenized from now on."""

    def encode(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be tokenized")

    monkeypatch.setattr(Library, "_encode", encode)


# ---------------------------------------------------------------- prompts that do not fit


@pytest.mark.parametrize("text", ["x" * 200_000, "é" * 200_000, "🦙 " * 100_000])
async def test_too_long_text_is_not_tokenized(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """A text, a chat and a count get a 400 with a lower bound on the number of tokens."""
    num_tokens = len(tiny().encode_batch_fast([text])[0])
    async with small_runtime() as client:
        forbid_encoding(monkeypatch)
        longest = client.config.engine.max_model_len
        for prompt, fields in ((TextPrompt(text), {}), (chat(text), {}), (TextPrompt(text), {"echo": True})):
            answer = await client.ask(prompt, **fields)
            assert answer.error is not None and answer.error.kind is ErrorKind.INVALID
            assert answer.error.code == CODE and answer.error.param == "prompt"
            bound = int(answer.error.message.split("at least ")[1].split()[0])
            assert longest < bound <= num_tokens
        for prompt in (TextPrompt(text), chat(text)):
            with pytest.raises(PromptRefused) as raised:
                await client.runtime.desk.count_tokens(prompt, "messages", "tenant")
            assert raised.value.error.code == CODE and raised.value.error.param == "messages"
        client.assert_at_rest()


async def test_too_long_system_message_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the system message alone is too long, the error names its field."""
    async with small_runtime() as client:
        forbid_encoding(monkeypatch)
        prompt = ChatPrompt(({"role": "system", "content": "x" * 200_000}, {"role": "user", "content": "hello"}))
        answer = await client.ask(prompt, system_param="system")
        assert answer.error is not None and answer.error.param == "system" and "at least" in answer.error.message


async def test_too_many_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many ids are refused before they or the request's other prompts are processed."""
    read: list[object] = []
    async with small_runtime() as client:
        monkeypatch.setattr(
            "quipu.actors.text_workers.pooled_encoder.decode_prompt", lambda *args, **_: read.append(args)
        )
        monkeypatch.setattr(Library, "_encode", lambda *args: read.append(args))
        longest = client.config.engine.max_model_len
        for ids in ([5] * longest, [5] * 1_000_000):
            answer = await client.ask(TextPrompt("short"), ids, echo=True)
            assert answer.error is not None and answer.error.code == CODE
            assert f"has {len(ids)} tokens" in answer.error.message
        assert read == []
        client.assert_at_rest()


async def test_vocabulary_without_a_bound(tmp_path: Path) -> None:
    """If any number of characters can become one token, no text is refused by its length."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    save(tokenizer, tmp_path, "{{ messages[0].content }}")
    for name in ("config.json", "generation_config.json"):
        if (TINY / name).exists():
            (tmp_path / name).write_bytes((TINY / name).read_bytes())
    async with small_runtime(model_path=str(tmp_path)) as client:
        answer = await client.ask(TextPrompt("x" * 500_000))
        assert answer.error is None and answer.record.prompt_tokens == 1


async def test_counting_beyond_the_context() -> None:
    """A text that might fit by its bytes is counted, even if it turns out too long."""
    async with small_runtime() as client:
        longest = client.config.engine.max_model_len
        text = "a cord " * longest
        counted = await client.runtime.desk.count_tokens(TextPrompt(text), "messages")
        assert counted == len(tiny().encode(text).ids) > longest


# ---------------------------------------------------------------- waiting


async def test_short_request_does_not_wait_for_long_ones(gate: Gate) -> None:
    """While a tenant's sixteen long texts wait, its short texts and chats are served."""
    async with small_runtime(**ROOMY) as client, trio.open_nursery() as nursery:
        answers: list[Answer] = []

        async def ask_long() -> None:
            answers.append(await client.ask(TextPrompt(LONG), max_tokens=1))

        for _ in range(16):
            nursery.start_soon(ask_long)
        await gate.holds(1)
        with trio.fail_after(PATIENCE_S):
            for prompt in (TextPrompt("a cord " * 100), chat("a cord " * 100), TextPrompt("a cord " * 1000)):
                assert (await client.ask(prompt)).error is None
            assert await client.runtime.desk.count_tokens(chat("a cord"), "messages", "tenant") > 0
        assert answers == []
        gate.opened.set()
        with trio.fail_after(PATIENCE_S):
            while len(answers) < 16:
                await trio.sleep(0.01)
        assert all(answer.error is None for answer in answers)


async def test_tenant_cannot_take_all_threads(gate: Gate) -> None:
    """One tenant's long texts leave threads for another's."""
    async with small_runtime(**ROOMY) as client, trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(client.ask, TextPrompt("a" + LONG))
        await gate.holds(1)
        nursery.start_soon(lambda: client.ask(TextPrompt("b" + LONG), domain="another"))
        with trio.fail_after(PATIENCE_S):
            while not any(text.startswith("b") for text, _ in gate.started):
                await trio.sleep(0.001)
        gate.opened.set()


async def test_long_texts_of_one_tenant_are_served_in_order(gate: Gate) -> None:
    """A text is encoded once all earlier ones of its tenant have been, except those in the tenant's other threads."""
    async with small_runtime(**ROOMY) as client, trio.open_nursery() as nursery:
        tickets = [client.open(TextPrompt(f"{at} {LONG}"), max_tokens=1) for at in range(12)]
        gate.opened.set()
        gate.started.clear()
        for ticket in tickets:
            await ticket.start()
        for ticket in tickets:
            nursery.start_soon(read_answer, ticket)
        with trio.fail_after(PATIENCE_S):
            while len(gate.started) < 12:
                await trio.sleep(0.01)
        for text, done in gate.started:
            earlier = set(range(int(text.split()[0])))
            assert len(earlier - {int(one.split()[0]) for one in done}) < NUM_THREADS
    for ticket in tickets:
        ticket.leave()


async def test_queue_is_bounded(gate: Gate) -> None:
    """A request beyond the limit gets a 503."""
    async with small_runtime(**ROOMY, max_encode_waiting=4) as client, trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(client.ask, TextPrompt(LONG))
        await gate.holds(1)
        await trio.testing.wait_all_tasks_blocked(0.02)
        answer = await client.ask(TextPrompt(LONG))
        assert answer.error is not None and answer.error.kind is ErrorKind.OVERLOADED
        with pytest.raises(PromptRefused) as raised:
            await client.runtime.desk.count_tokens(TextPrompt(LONG), "messages", "tenant")
        assert raised.value.error.kind is ErrorKind.OVERLOADED
        gate.opened.set()


async def test_full_queue_of_the_renderer() -> None:
    """If too many chats wait the client gets a 503; if the template refuses a chat, a 400."""

    def refuse(prompt: ChatPrompt) -> None:
        raise {"crowd": QueueFull, "odd": TemplateError}[prompt.messages[0]["content"]]("no")

    def make_renderer(template: Any, timeout_s: float) -> InlineRenderer:
        return InlineRenderer(template, before=refuse)

    async with small_runtime(make_renderer=make_renderer) as client:
        for content, kind in (("crowd", ErrorKind.OVERLOADED), ("odd", ErrorKind.INVALID)):
            answer = await client.ask(chat(content))
            assert answer.error is not None and answer.error.kind is kind


async def test_others_are_served_between_the_texts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tenant's text is served between the 512 texts of one request."""
    served: list[str] = []
    encode = Library.encode

    def watched(library: Library, text: str, **limits: Any) -> object:
        served.append(text[:5])
        return encode(library, text, **limits)

    monkeypatch.setattr(Library, "encode", watched)
    texts = [TextPrompt("many " + "a cord " * 100) for _ in range(512)]
    async with small_runtime(**ROOMY) as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: client.ask(*texts, max_tokens=1))
            while not served:
                await trio.sleep(0.001)
            answer = await client.ask(TextPrompt("short" + "a cord " * 500), domain="another")
            assert answer.error is None and served.index("short") < 512
        client.assert_at_rest()


# ---------------------------------------------------------------- leaving


class Text(str):
    """A text that can be weakly referenced."""


def with_weakref(make: Callable[[str], Any], text: str) -> tuple[Any, weakref.ref[Text]]:
    kept = Text(text)
    return make(kept), weakref.ref(kept)


async def test_client_that_leaves_while_waiting(gate: Gate) -> None:
    """A client's texts are freed as soon as it leaves, or when the thread that encodes one has ended."""
    async with small_runtime(**ROOMY) as client:
        tickets: list[OpenRequest] = []
        refs: list[weakref.ref[Text]] = []
        calls: list[int] = []
        for at in range(8):
            prompt, ref = with_weakref(TextPrompt, f"{at}" + LONG)
            ticket = client.open(prompt)
            ticket.when_encoded(lambda at=at: calls.append(at))
            del prompt
            await ticket.start()
            tickets.append(ticket)
            refs.append(ref)
        await gate.holds(NUM_THREADS)
        await trio.testing.wait_all_tasks_blocked(0.02)
        running = [at for at in range(8) if any(text.startswith(f"{at}It") for text, _ in gate.started)]
        for ticket in tickets:
            ticket.leave()
        await trio.testing.wait_all_tasks_blocked(0.02)
        gc.collect()
        assert [at for at, ref in enumerate(refs) if ref() is not None] == running
        assert sorted(calls) == [at for at in range(8) if at not in running]
        gate.opened.set()
        with trio.fail_after(PATIENCE_S):
            while any(ref() is not None for ref in refs) or len(calls) < 8:
                await trio.sleep(0.01)
        assert sorted(calls) == list(range(8)) and gate.num_inside == len(running)
        await trio.testing.wait_all_tasks_blocked(0.02)
        client.assert_at_rest()


async def test_count_whose_client_leaves(gate: Gate) -> None:
    """If a client leaves, its count stops, and no longer counts as an open request."""
    async with small_runtime(**ROOMY, max_open_requests=3) as client:
        desk = client.runtime.desk
        async with trio.open_nursery() as nursery:
            prompt, ref = with_weakref(chat, LONG)
            for _ in range(3):
                nursery.start_soon(desk.count_tokens, prompt, "messages", "tenant")
            del prompt
            await gate.holds(NUM_THREADS)
            with pytest.raises(DeskClosed):
                await desk.count_tokens(chat("x"), "messages")
            with pytest.raises(DeskClosed):
                client.open([1, 2, 3])
            num_begun = gate.num_inside
            nursery.cancel_scope.cancel()
        client.open([1, 2, 3]).leave()
        assert await desk.count_tokens(chat("x"), "messages") > 0
        gate.opened.set()
        with trio.fail_after(PATIENCE_S):
            while ref() is not None:
                await trio.sleep(0.01)
        assert gate.num_inside == num_begun
        assert desk.num_open_requests == 0


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("length", [100, 30_000, SHORT_BYTES * 2])
@pytest.mark.parametrize("make", [TextPrompt, chat])
async def test_text_is_released_after_encoding(make: Callable[[str], Any], length: int) -> None:
    """Nothing refers to the text once it is encoded, even while its output is generated."""
    async with small_runtime(num_blocks=8000, max_model_len=100_000, token_cache_bytes=0) as client:
        prompt, ref = with_weakref(make, ("a cord " * length)[:length])
        ticket = client.open(prompt, max_tokens=20_000)
        del prompt
        encoded = trio.Event()
        ticket.when_encoded(encoded.set)
        try:
            with trio.fail_after(PATIENCE_S):
                await ticket.start()
                await encoded.wait()
                await ticket.mailbox.peek()
                while ref() is not None:  # the thread that has encoded it may have to end
                    await trio.sleep(0.001)
                    gc.collect()
            assert ticket.mailbox.closed is None
        finally:
            ticket.leave()
        await trio.testing.wait_all_tasks_blocked(0.02)


async def test_when_encoded_is_called_once() -> None:
    """A callback is called once, whether the request is submitted, refused or left; a late one is called at once."""
    async with small_runtime() as client:

        async def num_calls(*prompts: Any, start: bool = True, leave: bool = False, **fields: Any) -> int:
            calls: list[int] = []
            ticket = client.open(*prompts, **fields)
            ticket.when_encoded(lambda: calls.append(1))
            if start:
                await ticket.start()
            if leave:
                ticket.leave()
            else:
                assert not start or (await read_answer(ticket)) is not None
            ticket.leave()
            await trio.testing.wait_all_tasks_blocked(0.01)
            late: list[int] = []
            ticket.when_encoded(lambda: late.append(1))
            assert late == [1]
            return len(calls)

        assert await num_calls([1, 2, 3]) == 1
        assert await num_calls([1, 2, 3], [4], n=3) == 1
        assert await num_calls(TextPrompt("a cord " * 1000), TextPrompt("b" * 3000)) == 1
        assert await num_calls(chat("a cord")) == 1
        assert await num_calls([]) == 1
        assert await num_calls([1] * 5000) == 1
        assert await num_calls(TextPrompt("x" * 500_000)) == 1
        assert await num_calls([1, 2, 3], start=False) == 1
        assert await num_calls([1, 2, 3], leave=True) == 1
        assert await num_calls(TextPrompt("a cord " * 1000), leave=True) == 1
        assert await num_calls(chat("a cord"), leave=True) == 1
        client.assert_at_rest()


async def test_cancelled_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that never reached the tokenizer is released when its client leaves."""
    async with small_runtime(encode_slots=1) as client:
        calls: list[int] = []
        ticket = client.open([1, 2, 3])
        ticket.when_encoded(lambda: calls.append(1))
        with trio.CancelScope() as scope:
            scope.cancel()
            await ticket.start()
        ticket.leave()
        assert calls == [1]
        await trio.testing.wait_all_tasks_blocked(0.01)
        client.assert_at_rest()


# ---------------------------------------------------------------- other


async def test_block_keys_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys are the same as computed at once."""
    monkeypatch.setattr("quipu.actors.tokenizer.actor.HASHED_BLOCKS", 2)
    submitted: list[Any] = []
    async with small_runtime() as client:
        put = client.runtime.desk.sequences.put

        def keep(item: Any, request: Any) -> None:
            submitted.append(item)
            put(item, request)

        monkeypatch.setattr(client.runtime.desk.sequences, "put", keep)
        for length in (1, 16, 31, 32, 33, 64, 65, 200):
            ids = list(range(300, 300 + length))
            assert (await client.ask(ids, max_tokens=1)).error is None
            submit = submitted[-1]
            assert submit.block_keys == chain_keys(submit.root_key, ids, client.config.engine.block_size)


async def test_short_requests_are_served_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests encoded on the event loop never overtake one another."""
    async with small_runtime() as client:
        submitted: list[int] = []
        put = client.runtime.desk.sequences.put

        def keep(item: Any, request: Any) -> None:
            submitted.append(item.sampling.seed)
            put(item, request)

        monkeypatch.setattr(client.runtime.desk.sequences, "put", keep)
        prompts = [TextPrompt("a cord " * 200), [5, 6], TextPrompt("a")] * 4
        tickets = [client.open(prompt, max_tokens=1, seed=at) for at, prompt in enumerate(prompts)]
        for ticket in tickets:
            await ticket.start()
        for ticket in tickets:
            await read_answer(ticket)
            ticket.leave()
        assert submitted == list(range(len(prompts)))


async def test_rendered_chat_that_is_too_long() -> None:
    """A chat whose template writes more than the context can hold is refused as too long."""

    class Verbose:
        def __init__(self, template: Any, timeout_s: float) -> None:
            self._inline = InlineRenderer(template)

        async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            task_status.started()

        async def render(self, prompt: ChatPrompt, tenant: str, max_characters: int) -> RenderedChat:
            return await self._inline.render(chat("x" * (max_characters + 1)), tenant, max_characters)

    async with small_runtime(make_renderer=Verbose) as client:
        answer = await client.ask(chat("x"))
        assert answer.error is not None and answer.error.code == CODE and "at least" in answer.error.message
