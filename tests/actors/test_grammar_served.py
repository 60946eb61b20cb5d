"""Outputs that have to match a grammar, across every actor, with a real model of random weights."""

from __future__ import annotations

import re
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio

from quipu.actors.engine.engine import LoopHost
from quipu.actors.engine.executor.grammar_entry import Entry
from quipu.actors.engine.executor.grammar_follower import GrammarFollower
from quipu.actors.grammars.grammar_check import GrammarChecker
from quipu.actors.messages.grammar import GrammarKind, GrammarSpec
from quipu.actors.messages.handler import Closed, Delta, ScoredDelta
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import OutputRules
from quipu.actors.messages.prompts import TextPrompt
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.messages.scores import ScoredToken
from quipu.actors.messages.usage_record import UsageRecord
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.kernels.fake import Dials
from tests.grammars import (
    EOS,
    LATE_DIGITS,
    PARAM,
    PERSON,
    UNION,
    accepts,
    check_person,
    check_union,
    costly_later,
    endless_later,
    regex,
    schema,
)
from tests.near import assert_same
from tests.prompts import prompt_of
from tests.runtimes import Client, eventually, kill_engine, open_with_kept_vocabulary, runtime_config, serving_info
from tests.tiny import BLOCK, TINY
from tests.vocabularies import Vocabulary

TAGS = ("<think>", "</think>")
VOCABULARY = Vocabulary(TINY)
OPENING, CLOSING = (list(VOCABULARY.encoder.encode_within_text(tag)) for tag in TAGS)
PROMPT = prompt_of(40, seed=5)
NUMBERS = regex("[0-9]{3}(-[0-9]{3})*")


@attrs.define
class Choice:
    token_ids: list[int] = attrs.field(factory=list)
    scores: list[ScoredToken] = attrs.field(factory=list)
    text: str = ""
    reason: FinishReason | None = None


@attrs.frozen
class Reply:
    choices: list[Choice]
    error: Any
    record: UsageRecord


@asynccontextmanager
async def open_client(*, executor: str = "reference", **changes: Any) -> AsyncIterator[Client]:
    config = runtime_config(executor=executor, eos_token_ids=(EOS,), reasoning_parser="qwen3", **changes)
    info, host = serving_info(config), LoopHost(config.engine)
    async with open_with_kept_vocabulary(config, info, lambda _: host, make_renderer=InlineRenderer) as runtime:
        with trio.fail_after(100):
            while not runtime.desk.health().is_ready:
                await trio.sleep(0.01)
            yield Client(runtime, config, Dials())


async def ask(
    client: Client, prompt: list[int], grammar: GrammarSpec | None, rules: LogitRules | None = None, **fields: Any
) -> Reply:
    """Serve one request, and return its choices."""
    request = client.encode(
        prompt, grammar=grammar, with_token_ids=True, **{"max_tokens": 60, "temperature": 1.0, "seed": 3, **fields}
    )
    sampling = attrs.evolve(request.sampling, logprobs=2, rules=rules)
    ticket = client.runtime.desk.open(attrs.evolve(request, sampling=sampling), "test")
    choices = [Choice() for _ in range(request.num_choices)]
    try:
        await ticket.start()
        while True:
            for event in await ticket.mailbox.get():
                if isinstance(event, Closed):
                    return Reply(choices, event.error, event.record)
                if isinstance(event, Delta):
                    choice = choices[event.index]
                    choice.text += event.text
                    choice.token_ids += event.token_ids or ()
                    choice.reason = event.finish_reason or choice.reason
                    if isinstance(event, ScoredDelta):
                        choice.scores += event.scores
    finally:
        ticket.leave()


@pytest.mark.parametrize("executor", ["cpu", "fake"])
async def test_outputs_match_their_schema(executor: str) -> None:
    """Whatever the weights, an output that ends by itself matches its schema, and one that is cut off still can."""
    checks: list[tuple[GrammarSpec, Callable[[str], object]]] = [
        (schema(PERSON), check_person),
        (schema(UNION), check_union),
    ]
    num_whole = 0
    async with open_client(executor=executor) as client:
        for spec, check in checks:
            for max_tokens in (60, 5):
                reply = await ask(client, PROMPT, spec, n=4, max_tokens=max_tokens)
                assert reply.error is None and reply.record.outcome is Outcome.FINISHED
                for choice in reply.choices:
                    if choice.reason is FinishReason.STOP:
                        check(choice.text)
                        num_whole += 1
                    else:
                        assert accepts(spec, choice.token_ids)
    assert num_whole >= 4


async def test_what_is_dropped_is_known_before_the_first_event() -> None:
    """The request's ticket says what was dropped from the schemas of its tools, even if the grammar is known."""
    source = 'start: a\n// schema from loose:tools[0]\na: %json {"type": "array", "uniqueItems": true, "maxItems": 1}\n'
    async with open_client(executor="fake") as client:
        for _ in range(2):
            request = client.encode(PROMPT, grammar=GrammarSpec(GrammarKind.LARK, source, PARAM), max_tokens=4)
            ticket = client.runtime.desk.open(request, "test")
            try:
                assert not ticket.dropped
                await ticket.start()
                await ticket.mailbox.get()
                assert list(ticket.dropped) == ["tools[0]#/uniqueItems"]
            finally:
                ticket.leave()
            assert client.runtime.desk.num_open_requests == 0


MOST_TRIES = 10


async def test_grammar_depends_on_the_sequence_alone() -> None:
    """Tokens and logprobs are the same alone, in a batch and after preemptions; choices are independent; logprobs are
    those of the raw logits.
    """
    async with open_client() as client:
        alone = await ask(client, PROMPT, schema(PERSON), n=3)
        free = await ask(client, PROMPT, None, n=3, max_tokens=1)
    async with open_client(num_blocks=1 + -(-208 // BLOCK), max_model_len=208) as client:
        replies: list[Reply] = []

        async def beside(seed: int) -> None:
            await ask(client, prompt_of(20, seed=seed), schema(UNION) if seed % 2 else None, max_tokens=180, seed=seed)

        async def this() -> None:
            replies.append(await ask(client, PROMPT, schema(PERSON), n=3))

        for _ in range(MOST_TRIES):  # whether it is preempted depends on how long passes take
            async with trio.open_nursery() as nursery:
                for seed in range(20, 24):
                    nursery.start_soon(beside, seed)
                await eventually(lambda: client.runtime.desk.num_live_sequences == 4, "the others are admitted before")
                nursery.start_soon(this)
            if replies[-1].record.recomputed_tokens:
                break
        assert replies[-1].record.recomputed_tokens > 0
    assert_same([choice.scores for choice in replies[-1].choices], [choice.scores for choice in alone.choices])
    assert len({tuple(choice.token_ids) for choice in alone.choices}) == 3
    for choice, plain in zip(alone.choices, free.choices, strict=True):
        assert [score.token_id for score in choice.scores[0].top] == [score.token_id for score in plain.scores[0].top]
        assert (choice.scores[0].logprob or 0.0) < choice.scores[0].top[0].logprob


async def test_grammar_with_other_rules() -> None:
    """`min_tokens` holds while the grammar can go on, `ignore_eos` until it cannot; biases, bans and stop strings
    apply with it.
    """
    async with open_client() as client:
        longer = await ask(client, PROMPT, NUMBERS, LogitRules(min_tokens=9, bias={EOS: 100.0}))
        least = await ask(client, PROMPT, regex("[0-9]{3}"), LogitRules(min_tokens=9, bias={EOS: 100.0}))
        to_the_end = await ask(client, PROMPT, regex("[0-9]{1,6}"), ignore_eos=True)
        (digit,) = VOCABULARY.library.list_ids("7", add_special_tokens=False)
        biased = await ask(client, PROMPT, regex("[0-9]{4}"), LogitRules(bias={digit: 100.0}))
        banned = await ask(client, PROMPT, regex("[67]{4}"), LogitRules(bad_words=((digit,),)))
        stopped = await ask(client, PROMPT, regex("[0-9]{4}-[a-z]{30}"), stop=("-",))
    (choice,) = longer.choices
    assert (choice.text[:3].isdigit() and len(choice.token_ids) >= 10) or choice.reason is FinishReason.LENGTH
    assert len(least.choices[0].text) == 3 and least.choices[0].reason is FinishReason.STOP
    assert len(to_the_end.choices[0].text) == 6 and to_the_end.choices[0].reason is FinishReason.STOP
    assert biased.choices[0].text == "7777"
    assert banned.choices[0].text == "6666"
    assert len(stopped.choices[0].text) == 4 and stopped.choices[0].reason is FinishReason.STOP


async def test_compiling_holds_up_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the engine compiles a grammar, others are served; one that leaves meanwhile ends without an answer."""
    going_on, compile_grammar = threading.Event(), Entry.compile

    def compile_slowly(entry: Entry) -> None:
        assert going_on.wait(60)
        compile_grammar(entry)

    monkeypatch.setattr(Entry, "compile", compile_slowly)
    replies: list[Reply] = []

    async with open_client() as client, trio.open_nursery() as nursery:

        async def constrained() -> None:
            replies.append(await ask(client, PROMPT, schema(PERSON), n=2, max_tokens=5))

        nursery.start_soon(constrained)
        await trio.sleep(0.05)
        with trio.move_on_after(0.05):
            await ask(client, PROMPT, schema(PERSON))
        try:
            reply = await ask(client, prompt_of(20, seed=6), None, max_tokens=30)
        finally:
            going_on.set()
        assert len(reply.choices[0].token_ids) == 30 and not replies
    assert replies[0].error is None and all(len(choice.token_ids) == 5 for choice in replies[0].choices)


async def test_texts_do_not_wait_for_the_grammars_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests whose grammars are being checked hold none of the threads that encode texts."""
    begun, going_on, check = threading.Event(), threading.Event(), GrammarChecker.check

    def check_slowly(checker: GrammarChecker, spec: GrammarSpec) -> str | RequestError:
        begun.set()
        assert going_on.wait(60)
        return check(checker, spec)

    monkeypatch.setattr(GrammarChecker, "check", check_slowly)
    text, replies = TextPrompt("a knot " * 400), list[Any]()
    async with open_client(executor="fake", max_model_len=8000, num_blocks=64_000 // BLOCK) as client:

        async def constrained(number: int) -> None:
            grammar = regex(f"[0-9]{{{number + 3}}}")
            replies.append(await client.ask(text, grammar=grammar, max_tokens=2))

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(constrained, number)
            while not begun.is_set() or client.runtime.desk.num_open_requests < 5:
                await trio.sleep(0.01)
            await trio.sleep(0.05)
            try:
                with trio.fail_after(40):
                    assert (await client.ask(text, max_tokens=1)).error is None
            finally:
                going_on.set()
        assert [reply.error for reply in replies] == [None] * 5
        client.assert_at_rest()


async def test_no_token_left_ends_one_request() -> None:
    """A request whose grammar and rules leave no token ends with a client error; those beside it go on."""
    async with open_client() as client:
        (seven,) = VOCABULARY.library.list_ids("7", add_special_tokens=False)
        replies: dict[str, Reply] = {}

        async def one(name: str, *args: Any, **fields: Any) -> None:
            replies[name] = await ask(client, *args, **{"max_tokens": 12, **fields})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "free", prompt_of(30, seed=8), None)
            nursery.start_soon(one, "at once", PROMPT, regex("7a"), LogitRules(bad_words=((seven,),)))
            nursery.start_soon(one, "later", PROMPT, regex("7a"), LogitRules(allowed_token_ids=(seven,)))
            nursery.start_soon(one, "good", prompt_of(30, seed=9), regex("7[ab]{30}"))
        plain = await ask(client, prompt_of(30, seed=8), None, max_tokens=12)
        client.assert_at_rest()
    assert replies["free"].choices == plain.choices
    assert replies["good"].error is None and accepts(regex("7[ab]{30}"), replies["good"].choices[0].token_ids)
    for name, num_tokens in (("at once", 0), ("later", 1)):
        error = replies[name].error
        assert error.kind is ErrorKind.INVALID and "No token satisfies" in error.message
        assert len(replies[name].choices[0].token_ids) == num_tokens == replies[name].record.completion_tokens


async def test_costly_grammar_ends_one_request() -> None:
    """A request whose grammar turns out to be too complex ends with an error; the tokens that it got before are
    counted, and requests beside it go on.
    """
    async with open_client() as client:
        replies: dict[str, Reply] = {}

        async def one(name: str, *args: Any, **fields: Any) -> None:
            replies[name] = await ask(client, *args, **{"max_tokens": 110, **fields})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "free", prompt_of(30, seed=8), None)
            nursery.start_soon(one, "costly", PROMPT, costly_later())
            nursery.start_soon(one, "good", prompt_of(30, seed=9), regex("7[ab]{130}"))
        plain = await ask(client, prompt_of(30, seed=8), None, max_tokens=110)
        client.assert_at_rest()
    assert replies["free"].choices == plain.choices
    assert replies["good"].error is None and accepts(regex("7[ab]{130}"), replies["good"].choices[0].token_ids)
    costly = replies["costly"]
    assert costly.error.kind is ErrorKind.INVALID and "too complex to follow" in costly.error.message
    text = VOCABULARY.library.decode(costly.choices[0].token_ids, skip_special_tokens=True)
    assert re.fullmatch(f"[0-9]{{{LATE_DIGITS}}}[a-z]*", text), text
    assert costly.record.completion_tokens == len(costly.choices[0].token_ids)


async def test_endless_grammars_end_their_own_requests() -> None:
    """Requests whose grammars compute forever end with errors; the tokens that they got before are counted, and
    requests beside them go on as if alone.
    """
    async with open_client() as client:
        replies: dict[str, Reply] = {}

        async def one(name: str, *args: Any, **fields: Any) -> None:
            replies[name] = await ask(client, *args, **{"max_tokens": 140, **fields})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "free", prompt_of(30, seed=8), None)
            nursery.start_soon(one, "good", prompt_of(30, seed=9), regex("7[ab]{130}"))
            for number in range(6):
                nursery.start_soon(one, f"endless {number}", PROMPT, endless_later(f"[a-z ]{{{120 + number}}}"))
        plain = await ask(client, prompt_of(30, seed=8), None, max_tokens=140)
        client.assert_at_rest()
    assert replies["free"].choices == plain.choices
    assert replies["good"].error is None and accepts(regex("7[ab]{130}"), replies["good"].choices[0].token_ids)
    for number in range(6):
        endless = replies[f"endless {number}"]
        assert endless.error.kind is ErrorKind.INVALID and "it takes too long" in endless.error.message
        assert endless.record.completion_tokens == len(endless.choices[0].token_ids) > 0


async def test_grammar_begins_after_reasoning() -> None:
    """If reasoning is separated from the answer, the grammar applies after it, and a budget closes it; otherwise it
    applies at once."""
    async with open_client() as client:
        opened, rules, lasts = [*PROMPT, *OPENING], OutputRules(), LogitRules(min_tokens=30)
        closed = await ask(client, opened, NUMBERS, lasts, output=rules, thinking_budget=6)
        at_once = await ask(client, opened, NUMBERS)
        leads_in = attrs.evolve(lasts, bias=dict.fromkeys(OPENING, 60.0))
        itself = await ask(client, PROMPT, NUMBERS, leads_in, output=rules, thinking_budget=0)
    for reply, begin in ((closed, 6), (itself, len(OPENING))):
        assert reply.error is None
        token_ids = reply.choices[0].token_ids
        assert token_ids[begin : begin + len(CLOSING)] == CLOSING
        answer = VOCABULARY.library.decode(token_ids[begin + len(CLOSING) :], skip_special_tokens=True)
        assert answer.lstrip()[:3].isdigit(), answer
    assert not accepts(NUMBERS, closed.choices[0].token_ids[:6])
    assert accepts(NUMBERS, [i for i in at_once.choices[0].token_ids if i != EOS])


async def test_grammar_after_an_engine_died() -> None:
    """The next engine follows the grammars of requests that the dead one held, and of new ones."""
    async with open_client(executor="fake") as client:
        before = await ask(client, PROMPT, schema(PERSON))
        kill_engine(client)
        during = await ask(client, PROMPT, schema(PERSON))
        while not client.runtime.desk.health().is_ready:
            await trio.sleep(0.01)
        after = await ask(client, PROMPT, schema(PERSON))
    assert before.choices[0].token_ids == during.choices[0].token_ids == after.choices[0].token_ids


async def test_refused_grammar_reaches_no_engine() -> None:
    """An unsupported grammar is refused before any sequence is submitted, also the second time."""
    async with open_client(executor="fake") as client:
        for _ in range(2):
            reply = await ask(client, PROMPT, schema({"not": {}}))
            assert reply.error.kind is ErrorKind.INVALID and reply.error.param == PARAM
            assert reply.record.outcome is Outcome.REJECTED
        client.assert_at_rest()


async def test_no_memory_for_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the process for a grammar cannot be started, the request may be tried again, and then succeeds."""
    start = GrammarFollower.__init__

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    async with open_client(executor="fake") as client:
        monkeypatch.setattr(GrammarFollower, "__init__", out_of_memory)
        short = await ask(client, PROMPT, schema(PERSON), max_tokens=5)
        monkeypatch.setattr(GrammarFollower, "__init__", start)
        later = await ask(client, PROMPT, schema(PERSON), max_tokens=5)
    assert short.error is not None and short.error.kind is ErrorKind.OVERLOADED and "memory" in short.error.message
    assert later.error is None and accepts(schema(PERSON), later.choices[0].token_ids)
