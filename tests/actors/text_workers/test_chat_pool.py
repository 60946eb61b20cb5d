"""Chats rendered in processes: the same text as in this process, and hostile templates.

The tests use real processes and the real clock, so deadlines are generous.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from quipu.actors.fleet.processes.child import command_of
from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPart, ChatPrompt, ContentMark, ToolMark
from quipu.actors.shared.checkpoint import CheckpointError
from quipu.actors.shared.fair_queue import QueueFull
from quipu.actors.text_workers import chat_pool
from quipu.actors.text_workers.chat_pool import MAX_WORKERS_PER_TENANT, ChatPool
from quipu.actors.text_workers.chat_process import MODULE
from quipu.actors.text_workers.chat_wire import PIECE_CHARACTERS, PIECE_ITEMS
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.chat_template import ChatTooLong, RenderedChat, TemplateError
from quipu.actors.tokenizer.template_source import TemplateSource
from tests.actors.thread_shortage import Shortage
from tests.e2e.launcher import launch_engine
from tests.processes import eventually, has_ended

PATIENCE_S = 100.0
SAID = "{{ messages[0].content }}"
SLOW = (
    "{% if messages[0].content == 'slow' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}" + SAID
)
"""Loops forever for one chat."""
SHOWN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
    "{% endfor %}{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for d in documents or [] %}{{ d | tojson }}{% endfor %}{{ flavour }}{{ bos_token }}"
)
SHORT = CacheTtl.FIVE_MINUTES
PARTS = (ChatPart(0, None, "system", 0, 11), ChatPart(1, 0, "user", 1, 9), ChatPart(2, None, "user", 1, 99))


def chat(content: str, **fields: Any) -> ChatPrompt:
    return ChatPrompt(({"role": "user", "content": content},), **fields)


@asynccontextmanager
async def pool_of(
    source: str, timeout_s: float = PATIENCE_S, tool_source: str | None = None
) -> AsyncIterator[ChatPool]:
    pool = ChatPool(TemplateSource("here", source, {"bos_token": "<s>"}, tool_source), timeout_s)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            await nursery.start(pool.run)
            yield pool
            nursery.cancel_scope.cancel()
    assert pool.worker_ids == []


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have workers forked by the launcher of servers: an interpreter for each takes a tenth of a second to start."""
    start, of_worker = subprocess.Popen, command_of(MODULE)

    def start_or_fork(command: Any, **options: Any) -> Any:
        return (launch_engine if command == of_worker else start)(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start_or_fork)


@pytest.fixture
def one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep one worker ready instead of two, for tests that need no second one."""
    monkeypatch.setattr(chat_pool, "QUICK_WORKERS", 1)


async def render(pool: ChatPool, prompt: ChatPrompt, tenant: str = "", max_characters: int = 10**7) -> RenderedChat:
    return await pool.render(prompt, tenant, max_characters)


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "It is.", "parameters": {"big": 1 << 70}}}


@pytest.mark.usefixtures("one_worker")
async def test_thread_to_start_a_worker_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread is free for a moment to start a process, the pool waits."""
    shortage = Shortage(monkeypatch, *[RuntimeError("can't start new thread")] * 3)
    async with pool_of(SHOWN) as pool:
        assert (await render(pool, chat("Hello"))).text
    assert not shortage.errors


@pytest.mark.usefixtures("one_worker")
async def test_same_result_as_in_this_process() -> None:
    """Texts and positions of marks are the same, for short chats and for ones sent in many pieces."""
    call = {"id": "1", "function": {"name": "f", "arguments": {"x": [1, None, 1.5, True, "é"]}}}
    messages = (
        {"role": "system", "content": "Be brief. ✓"},
        {"role": "user", "content": "é" * (2 * PIECE_CHARACTERS + 1)},
        *({"role": "user", "content": str(at)} for at in range(PIECE_ITEMS * 2 + 3)),
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "🦙", "tool_call_id": "1"},
    )
    marks = (ToolMark(SHORT, 0), ContentMark(SHORT, 1, 5), CallMark(SHORT, len(messages) - 2, 1))
    chats = [
        chat("Hello"),
        chat("Hello", continue_final=True, add_generation_prompt=False),
        chat("Hello", template_kwargs={"flavour": [1, {"a": "b"}]}),
        chat("Hello", documents=({"title": "t", "text": "x"}, {"text": "y"})),
        ChatPrompt(messages, tools=(tool("a"), tool("b")), marks=marks),
        ChatPrompt(messages, tools=(tool("a"),), marks=marks[:1], parts=PARTS, locates_parts=True),
    ]
    async with pool_of(SHOWN) as pool:
        inline = InlineRenderer(TemplateSource("here", SHOWN, {"bos_token": "<s>"}))
        for prompt in chats:
            rendered = await render(pool, prompt)
            assert rendered == await inline.render(prompt, "", 10**7)
            assert bool(rendered.part_ends) is prompt.locates_parts
        with pytest.raises(ChatTooLong) as raised:
            await render(pool, chat("x" * 1000), max_characters=1000)
        assert raised.value.num_characters > 1000
        assert len((await render(pool, chat("x" * 50), max_characters=1000)).text) < 1000


async def test_template_for_tools(one_worker: None) -> None:
    """A second template renders chats with tools."""
    async with pool_of("default", tool_source="{{ tools | length }} tools") as pool:
        assert (await render(pool, chat("Hello"))).text == "default"
        assert (await render(pool, chat("Hello", tools=(tool("a"),)))).text == "1 tools"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if messages[0].content == 'x' %}{{ (messages|length) / 0 }}{% endif %}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{% if messages[0].content == 'x' %}{{ m() }}{% endif %}", "recursion"),
        ("{% if messages[0].content == 'x' %}{{ 'a' * (10 ** 11 * messages|length) }}{% endif %}", "MemoryError"),
        (
            "{% if messages[0].content == 'x' %}{% set n = namespace(x='a') %}{% for i in range(60) %}"
            "{% set n.x = n.x * 16 %}{% endfor %}{% endif %}",
            "MemoryError",
        ),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.at.all }}", "has no attribute"),
        ("{{ messages | sum }}", "unsupported operand"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
@pytest.mark.usefixtures("one_worker")
async def test_templates_that_fail(monkeypatch: pytest.MonkeyPatch, source: str, reason: str) -> None:
    """Whatever a template raises is the chat's TemplateError, and its worker goes on."""
    monkeypatch.setattr(chat_pool, "SLOW_S", PATIENCE_S)  # a worker that is slow for once would be replaced
    async with pool_of(source) as pool:
        before = pool.worker_ids
        for _ in range(2):
            with pytest.raises(TemplateError, match=reason):
                await render(pool, chat("x"))
        assert pool.worker_ids == before


@pytest.mark.usefixtures("one_worker")
async def test_chats_that_cannot_be_rendered() -> None:
    """Lone surrogates, deep nesting and non-JSON values each raise TemplateError."""
    deep: dict[str, Any] = {}
    for _ in range(990):
        deep = {"a": deep}
    deeper: dict[str, Any] = deep
    for _ in range(5000):
        deeper = {"a": deeper}
    for source in (SHOWN, SAID):
        async with pool_of(source) as pool:
            for value in (deep, deeper, {"a": "\ud800"}, {"a": object()}):
                call = {"id": "1", "function": {"name": "f", "arguments": value}}
                message = {"role": "assistant", "content": "", "tool_calls": [call]}
                with pytest.raises(TemplateError):
                    await render(pool, ChatPrompt((message,)))
            with pytest.raises(TemplateError, match="Unicode"):
                await render(pool, chat("\ud800"))
            assert "Hello" in (await render(pool, chat("Hello"))).text


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (messages | length + 10) ** (messages | length + 99999999) }}",
    ],
)
@pytest.mark.usefixtures("one_worker")
async def test_endless_template_is_killed(endless: str) -> None:
    """At the time limit the chat fails and its process is killed, even if it never leaves C code."""
    source = "{% if messages[0].content == 'x' %}" + endless + "{% endif %}"
    async with pool_of(source, timeout_s=1.0) as pool:
        before = set(pool.worker_ids)
        with pytest.raises(TemplateError, match="took longer than 1 seconds"):
            await render(pool, chat("x"))
        while before <= set(pool.worker_ids):
            await trio.sleep(0.01)
        (gone,) = before - set(pool.worker_ids)
        while not has_ended(gone):
            await trio.sleep(0.01)
        is_rendered = False
        while not is_rendered:
            try:
                await render(pool, chat("y"))
                is_rendered = True
            except TemplateError as error:  # on a busy machine even this may take longer
                assert "took longer" in str(error)


async def test_leaving_client_ends_its_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat whose client has left is killed soon after; if it ends by itself in time, its process is kept."""
    async with pool_of(SLOW, timeout_s=600) as pool:
        before = set(pool.worker_ids)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(render, pool, chat("slow"))
            while not pool.num_busy:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        while before <= set(pool.worker_ids):
            await trio.sleep(0.01)
        (gone,) = before - set(pool.worker_ids)
        while not has_ended(gone):
            await trio.sleep(0.01)
        while len(pool.worker_ids) < chat_pool.QUICK_WORKERS:
            await trio.sleep(0.01)
        monkeypatch.setattr(chat_pool, "CANCEL_GRACE_S", PATIENCE_S)
        monkeypatch.setattr(chat_pool, "SLOW_S", PATIENCE_S)  # or a process that is slow once is replaced
        before = set(pool.worker_ids)
        for _ in range(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(render, pool, chat("quick"))
                await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
        assert (await render(pool, chat("quick"))).text == "quick"
        assert set(pool.worker_ids) == before


async def test_client_that_leaves_before_its_worker_begins() -> None:
    """A chat that a worker was given, but has not begun, is ended as well when its client leaves."""
    async with pool_of(SLOW, timeout_s=PATIENCE_S * 10) as pool:
        before = set(pool.worker_ids)
        with trio.CancelScope() as client:

            def leave_at_once() -> None:
                dispatch()
                client.cancel()

            dispatch, pool._dispatch = pool._dispatch, leave_at_once
            try:
                await render(pool, chat("slow"))
            finally:
                pool._dispatch = dispatch
        assert client.cancelled_caught
        while before <= set(pool.worker_ids):
            await trio.sleep(0.01)


async def test_slow_chats_do_not_block_others() -> None:
    """While a tenant has one slow chat less than its limit, its other chats are rendered; other tenants' always are."""
    async with pool_of(SLOW, timeout_s=600) as pool, trio.open_nursery() as nursery:
        for _ in range(MAX_WORKERS_PER_TENANT - 1):
            nursery.start_soon(render, pool, chat("slow"), "a")
        for _ in range(5):
            assert (await render(pool, chat("quick"), "a")).text == "quick"
        nursery.start_soon(render, pool, chat("slow"), "a")
        nursery.start_soon(render, pool, chat("slow"), "a")
        for _ in range(5):
            assert (await render(pool, chat("quick"), "b")).text == "quick"
        nursery.cancel_scope.cancel()


async def test_idle_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that were started for slow chats end when they are not needed."""
    monkeypatch.setattr(chat_pool, "IDLE_S", 0.05)
    async with pool_of(SLOW, timeout_s=600) as pool:
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(render, pool, chat("slow"), "a")
            while len(pool.worker_ids) < 5:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
        while len(pool.worker_ids) != chat_pool.QUICK_WORKERS:
            await trio.sleep(0.01)
        assert (await render(pool, chat("quick"))).text == "quick"


async def test_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat beyond the limit is refused at once; a cancelled one leaves the queue."""
    monkeypatch.setattr(chat_pool, "MAX_WAITING", 4)
    async with pool_of(SLOW, timeout_s=600) as pool, trio.open_nursery() as nursery:
        for num_busy in range(1, MAX_WORKERS_PER_TENANT + 1):
            nursery.start_soon(render, pool, chat("slow"), "a")
            while pool.num_busy < num_busy:
                await trio.sleep(0.01)
        async with trio.open_nursery() as waiting:
            for _ in range(2):
                waiting.start_soon(render, pool, chat("quick"), "a")
            while pool.num_waiting < 2:
                await trio.sleep(0.01)
            with pytest.raises(QueueFull):
                await render(pool, chat("quick"), "a")
            assert (await render(pool, chat("quick"), "b")).text == "quick"
            waiting.cancel_scope.cancel()
        assert pool.num_waiting == 0
        nursery.cancel_scope.cancel()


async def test_killed_worker_fails_one_chat() -> None:
    """A chat whose worker dies fails; later ones get other workers."""
    async with pool_of(SLOW, timeout_s=600) as pool, trio.open_nursery() as nursery:
        failed = trio.Event()

        async def fail() -> None:
            with pytest.raises(TemplateError, match="ended the process"):
                await render(pool, chat("slow"))
            failed.set()

        nursery.start_soon(fail)
        before = pool.worker_ids
        while pool.num_busy < 1 or len(pool.worker_ids) <= len(before):  # a worker is known to be slow
            await trio.sleep(0.01)
        for process_id in before:
            os.kill(process_id, signal.SIGKILL)
        await failed.wait()
        assert (await render(pool, chat("quick"))).text == "quick"


async def test_workers_that_are_killed_while_idle() -> None:
    """Chats go to other workers, and one whose client leaves meanwhile is gone."""
    async with pool_of(SAID, timeout_s=600) as pool:
        while len(pool.worker_ids) < chat_pool.QUICK_WORKERS:
            await trio.sleep(0.01)
        killed = pool.worker_ids
        for process_id in killed:
            os.kill(process_id, signal.SIGKILL)
        eventually(lambda: all(map(has_ended, killed)), "the workers have ended")
        texts: list[str] = []

        async def say(text: str) -> None:
            texts.append((await render(pool, chat(text))).text)

        async with trio.open_nursery() as leaving:
            leaving.start_soon(render, pool, chat("left"))
            await trio.testing.wait_all_tasks_blocked()
            leaving.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            for text in "abc":
                nursery.start_soon(say, text)
        assert sorted(texts) == ["a", "b", "c"] and not pool.num_waiting
        assert not set(killed) & set(pool.worker_ids)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "does not compile"),
        ("{{ messages", "does not compile"),
    ],
)
@pytest.mark.parametrize("is_for_tools", [False, True])
@pytest.mark.usefixtures("one_worker")
async def test_templates_that_do_not_compile(source: str, reason: str, is_for_tools: bool) -> None:
    """A template that does not compile raises CheckpointError at startup."""
    with pytest.raises(BaseExceptionGroup) as raised:
        async with pool_of("" if is_for_tools else source, timeout_s=0.5, tool_source=source if is_for_tools else None):
            raise AssertionError("the template must not be accepted")
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, CheckpointError) and reason in str(error) and "here" in str(error)


@pytest.mark.parametrize(
    "source",
    ["{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 3 ** 999999999 }}"],
)
@pytest.mark.usefixtures("one_worker")
async def test_endless_templates_compile(source: str) -> None:
    """Compiling a template at startup does not run it: the checkpoint is served, and each of its chats fails."""
    async with pool_of(source, timeout_s=0.2) as pool:
        with pytest.raises(TemplateError, match=r"longer than 0\.2 seconds"):
            await render(pool, chat("x"))


async def test_every_waiting_chat_gets_its_turn() -> None:
    """If a tenant has more slow chats than it may have workers, each is answered, even if no other chat arrives."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    async with pool_of(endless, timeout_s=0.2) as pool:
        reasons: list[str] = []

        async def ask() -> None:
            with pytest.raises(TemplateError) as raised:
                await render(pool, chat("x"))
            reasons.append(str(raised.value))

        async with trio.open_nursery() as nursery:
            for _ in range(MAX_WORKERS_PER_TENANT + 1):
                nursery.start_soon(ask)
        assert len(reasons) == MAX_WORKERS_PER_TENANT + 1
        assert pool.num_waiting == 0


async def test_no_template() -> None:
    """A checkpoint without a template is served, except for chats."""
    async with trio.open_nursery() as nursery:
        pool = ChatPool(None, 1.0)
        await nursery.start(pool.run)
        with pytest.raises(TemplateError, match="no chat template"):
            await render(pool, chat("x"))
        nursery.cancel_scope.cancel()


PARENT = """
import sys, trio
from quipu.actors.text_workers.chat_pool import ChatPool
from quipu.actors.tokenizer.template_source import TemplateSource
from quipu.actors.messages.prompts import ChatPrompt

async def main():
    pool = ChatPool(TemplateSource("here", sys.argv[1], {}), 600)
    async with trio.open_nursery() as nursery:
        await nursery.start(pool.run)
        nursery.start_soon(pool.render, ChatPrompt(({"role": "user", "content": "slow"},)), "", 1000)
        while len(pool.worker_ids) < 3:
            await trio.sleep(0.01)
        print(*pool.worker_ids, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_their_parent(how: signal.Signals, tmp_path: Path) -> None:
    """Workers end with their parent even if they are busy, and even if it had no time to end them."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, SLOW], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    with process:
        workers = [int(word) for word in process.stdout.readline().split()]
        assert len(workers) == 3 and not any(map(has_ended, workers))
        process.send_signal(how)
        process.wait(PATIENCE_S)
    eventually(lambda: all(map(has_ended, workers)), "the workers end")
