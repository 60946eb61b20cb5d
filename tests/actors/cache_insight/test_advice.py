"""Advice: conversations with a flaw get it at the right message, others get none, and its memory and time are
bounded."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from random import Random

import pytest

from quipu.actors.cache_insight import advice_memory
from quipu.actors.cache_insight.advice_memory import MAX_PROMPT_MESSAGES, AdviceMemory, Bounded
from quipu.actors.cache_insight.advisor import Advisor
from quipu.actors.cache_insight.prompt_digests import Digester, without_times
from quipu.actors.messages.explanations import Advice, AdviceCode
from quipu.actors.messages.prompts import ChatPrompt
from tests.actors.cache_insight.advice_corpora import (
    MAKERS,
    Conversation,
    answer,
    blameless_conversations,
    reasoning_stripped,
    system,
    tools_reordered,
    user,
    volatile_prefix,
    words,
)
from tests.cpu_time import ATTEMPTS


class Clients:
    """Sends conversations to one advisor, as one tenant or several."""

    def __init__(self) -> None:
        self.reasoned: set[str] = set()
        self.advisor = Advisor(self.reasoned.__contains__)
        self._num_sent = 0

    def ask(self, chat: ChatPrompt, tenant: str = "acme", salt: str = "", *, reasoned: bool = False) -> list[Advice]:
        self._num_sent += 1
        name = f"req-{self._num_sent}"
        (advice,) = [one for one in self.advisor.slices(chat, tenant, f"{tenant}:{salt}", name) if one is not None]
        if reasoned:
            self.reasoned.add(name)
        return list(advice)

    def hold(self, conversation: Conversation, tenant: str = "acme") -> list[list[Advice]]:
        return [
            self.ask(chat, tenant, reasoned=index in conversation.answered_with_reasoning)
            for index, chat in enumerate(conversation.prompts)
        ]


@pytest.mark.parametrize("code", MAKERS)
def test_conversations_made_for_advice(code: AdviceCode) -> None:
    """Each of 20 conversations of one tenant gets its advice, at its message, and no other."""
    clients = Clients()
    for number in range(20):
        conversation = MAKERS[code](Random(f"{code} {number}"))
        given = {(advice.code, advice.message) for some in clients.hold(conversation) for advice in some}
        assert given == {(code, conversation.message)}, number


def test_no_advice_without_reason() -> None:
    """1,000 blameless conversations of 200 applications of one tenant get no advice."""
    clients = Clients()
    num_prompts = 0
    for number, conversation in enumerate(blameless_conversations(1000)):
        num_prompts += len(conversation.prompts)
        assert clients.hold(conversation) == [[]] * len(conversation.prompts), number
    assert num_prompts > 3000


@pytest.mark.parametrize("code", MAKERS)
def test_tenants_and_salts_are_apart(code: AdviceCode) -> None:
    """A prompt is never compared with those of another tenant or another salt."""
    for apart in ({"tenant": "t"}, {"salt": "s"}):
        clients = Clients()
        for number in range(5):
            conversation = MAKERS[code](Random(number))
            for index, chat in enumerate(conversation.prompts):
                ((name, value),) = apart.items()
                given = clients.ask(chat, reasoned=True, **{name: f"{value}{index}"})
                assert given == [], (number, index)


def test_message_of_the_clients_list() -> None:
    """The message's index is that in the client's list, even if the system prompt has a field of its own."""
    clients, conversation = Clients(), reasoning_stripped(Random(5))
    advice: list[Advice] = []
    for index, chat in enumerate(conversation.prompts):
        parts = tuple(
            type(part)(part.chat_message - 1 if part.chat_message else None, None, part.role, part.chat_message, 0)
            for part in chat.parts
        )
        moved = ChatPrompt(chat.messages, parts=parts)
        advice += clients.ask(moved, reasoned=index in conversation.answered_with_reasoning)
    assert [one.message for one in advice] == [1]
    clients, places = Clients(), []
    for chat in volatile_prefix(Random(1)).prompts:
        parts = tuple(type(part)(None, None, part.role, part.chat_message, 0) for part in chat.parts[:1])
        places += [one.message for one in clients.ask(ChatPrompt(chat.messages, parts=parts))]
    assert set(places) == {None}


def test_times_and_ids() -> None:
    """Words with digits and names of days and months are all equal; other words are not."""
    same = ("On Monday, 24 Nov 2026 12:05:09 we met.", "On Tue 1 December 2025 we met.", "On 3f9a-77 we met.")
    assert len({without_times(text) for text in same}) == 1
    assert without_times("On Monday we met.") != without_times("On Monday we meet.")


def test_times_in_long_texts() -> None:
    """In a text of any length, a time at its beginning is ignored, however long it is, and other words are not."""
    rest = " ".join(f"word{'x' * (number % 7)}" for number in range(20_000))
    texts = [f"At {now} {rest}" for now in ("12:05", "1:05:33.123456789 PM", "Monday")]
    assert len({without_times(text) for text in texts}) == 1
    assert without_times(f"By 12:05 {rest}") != without_times(texts[0]) != without_times(texts[0] + "!")


def test_memory_of_a_tenant_is_bounded() -> None:
    """Thousands of conversations leave a bounded number of digests; a tenant that floods displaces only its own."""
    random, clients = Random(1), Clients()
    kept = tools_reordered(random)
    assert clients.ask(kept.prompts[0], tenant="quiet") == []
    for number in range(1500):
        clients.ask(ChatPrompt((system(words(random)), user(f"{words(random)} {number}"), *[answer("x")] * 20)))
    memory = clients.advisor._memory.of("acme")  # noqa: SLF001 (what is kept is not public)
    assert memory.num_messages <= MAX_PROMPT_MESSAGES
    assert memory.num_messages == sum(len(one) for some in memory.prompts._values.values() for one in some)  # noqa: SLF001 -- likewise
    assert [advice.code for advice in clients.ask(kept.prompts[1], tenant="quiet")] == [AdviceCode.TOOLS_REORDERED]


def test_number_of_tenants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a maximum number of tenants, the one that was served longest ago is forgotten."""
    monkeypatch.setattr(advice_memory, "MAX_TENANTS", 2)
    memory = AdviceMemory()
    first = memory.of("a")
    memory.of("b")
    assert memory.of("a") is first
    memory.of("c")
    assert memory.of("a") is first
    bounded: Bounded[int] = Bounded(2)
    for key in (1, 2, 1, 3):
        bounded.put(key, key)
    assert [bounded.find(key) for key in (1, 2, 3)] == [1, None, 3] and len(bounded) == 2


def test_nothing_of_the_text_is_kept() -> None:
    """The memory has digests, numbers and roles, but no word of a prompt; the digests of two servers differ."""
    clients = Clients()
    clients.ask(ChatPrompt((system("secretword " * 20), user("secretword?"), answer("secretword " * 5)), parts=()))
    seen: set[int] = set()
    left: list[object] = [clients.advisor]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type(sys)):
            continue
        seen.add(id(one))
        assert not (isinstance(one, str | bytes) and "secret" in str(one))
        if isinstance(one, dict):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        elif type(one).__module__.startswith("quipu"):
            names = [*getattr(type(one), "__slots__", ()), *getattr(one, "__dict__", ())]
            left += [getattr(one, name) for name in names if hasattr(one, name)]
    assert Digester().digest(b"x") != Digester().digest(b"x")


LARGE: dict[str, Callable[[], ChatPrompt]] = {
    "10,000 messages": lambda: ChatPrompt(tuple(user(f"{number} " + "x" * 80) for number in range(10_000))),
    "8 MB": lambda: ChatPrompt((system("word 12 " * 1_000_000), user("Hi."))),
    "JSON": lambda: ChatPrompt(tuple(user('{"a": [' + "1," * 7000 + "1]}") for _ in range(500))),
    "tools": lambda: ChatPrompt((user("Hi."),), tools=({"function": {"parameters": [{"a": 1}] * 400_000}},)),
    "keys": lambda: ChatPrompt((user("Hi."),), tools=({"function": {f"k{number}": 1 for number in range(400_000)}},)),
    "arguments": lambda: ChatPrompt(
        (user("Hi."), answer("", tool_calls=[{"function": {"arguments": {"a": "x" * 8_000_000}}}]))
    ),
    "no words": lambda: ChatPrompt((system("x" * 8_000_000), user("字" * 2_000_000))),
}


def slices_s(chat: ChatPrompt) -> list[float]:
    """Return the CPU time of each slice in which a chat is digested."""
    slices, times_s = Advisor().slices(chat, "t", "t", "req-1"), []
    while True:
        before = time.thread_time()
        advice = next(slices)
        times_s.append(time.thread_time() - before)
        if advice is not None:
            assert advice == ()
            return times_s


@pytest.mark.parametrize("name", LARGE)
def test_large_chats_are_digested_in_short_slices(name: str) -> None:
    """Whatever a chat contains, the work is bounded, and no slice of it takes long."""
    chat = LARGE[name]()
    attempts = (slices_s(chat) for _ in range(ATTEMPTS))
    assert any(max(times_s) < 0.05 and sum(times_s) < 0.5 for times_s in attempts)
