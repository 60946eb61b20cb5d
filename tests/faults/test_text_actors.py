"""Tokenizer and detokenizer are killed, at any message and at any point of handling it, without any observable effect.

Their successors continue: texts, logprobs, calls, usage, records and counters are the same as without a death. Only a
request that kills one of them twice fails, and only deaths without any work between them end the server.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import structlog.testing
import trio
import trio.testing

from quipu.actors.detokenizer.actor import Detokenizer
from quipu.actors.detokenizer.logprob_assembler import PromptAssembler
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.prompts import TextPrompt
from quipu.actors.request_desk.open_requests import OpenRequest
from quipu.actors.restarts import ActorGivenUp
from quipu.actors.text_workers.pooled_encoder import PooledEncoder
from quipu.actors.text_workers.renderer import InlineRenderer
from quipu.actors.tokenizer.actor import TokenizerActor
from tests.crash_scenario import PlannedCrash
from tests.journals import KeptJournal
from tests.killed_text_actors import MAIN_POINTS, OTHER_POINTS, KillPlan, killing
from tests.prompts import prompt_of
from tests.runtimes import Client, most_tokens, small_runtime
from tests.text_scenario import COUNT, NUM_KINDS, Result, run_scenario
from tests.traps.wire import CHAT, COMPLETIONS, body, over_http, samples, settle

NUM_REQUESTS = 200
POISON = prompt_of(12, seed=66)


@cache
def undisturbed(num_requests: int, most_tokens: int) -> Result:
    """Run the scenario without a death; a sequence yields at most `most_tokens` tokens per step."""
    return trio.run(partial(run_scenario, num_requests), clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.fixture
def many(engines: None) -> Result:
    return undisturbed(NUM_REQUESTS, most_tokens.get())


@pytest.fixture
def a_few(engines: None) -> Result:
    """Two requests of each kind."""
    return undisturbed(2 * NUM_KINDS, most_tokens.get())


def test_scenario_is_comprehensive(many: Result) -> None:
    """The scenario covers what the tests below are about."""
    found = json.dumps(many.responses)
    outcomes = [str(record["outcome"]) for record in many.records.values()]
    assert outcomes.count("finished") > 140 and outcomes.count("cancelled") == outcomes.count("rejected") == 16
    assert all(part in found for part in ("Caf\\u00e9 ", "tool_calls", "get_weather", "reasoning", "top_logprobs"))
    assert '"text": "", "logprobs": null, "finish_reason": "stop"' in found, "no text was held back for a stop string"
    assert many.counters["usage_disputed_total"] == 0


@pytest.mark.parametrize(
    ("actor", "point"), [(actor, point) for actor, points in MAIN_POINTS.items() for point in points]
)
async def test_killed_at_every_message(autojump_clock: trio.abc.Clock, many: Result, actor: str, point: str) -> None:
    """With a death at every message of 200 requests, the result is the same as without any."""
    plan = KillPlan(point)
    assert await run_scenario(NUM_REQUESTS, **killing(actor, plan)) == many
    assert plan.num_kills >= (190 if most_tokens.get() == 1 else 80) and not plan.held_slots


@pytest.mark.parametrize(
    ("actor", "point"), [(actor, point) for actor, points in OTHER_POINTS.items() for point in points]
)
async def test_killed_at_every_point(autojump_clock: trio.abc.Clock, a_few: Result, actor: str, point: str) -> None:
    """With a death at any other point in the handling of a message, and fewer requests, the result is the same, too."""
    plan = KillPlan(point)
    assert await run_scenario(2 * NUM_KINDS, **killing(actor, plan)) == a_few
    assert plan.num_kills and not plan.held_slots


# ---------------------------------------------------------------- requests that kill

Answer = tuple[int, Any]
"""A status and a body."""


async def ask(client: Client, prompt: Any, path: str = COMPLETIONS, **fields: Any) -> Answer:
    request = body(prompt, **fields) if path == COMPLETIONS else {"model": "demo", "max_tokens": 6, **prompt, **fields}
    async with over_http(client).open("POST", path, request) as exchange:
        answer = await exchange.json()
        return exchange.status, answer


async def ask_together(client: Client, *poisoned: Callable[[Client], Any]) -> tuple[list[Answer], list[Answer]]:
    """Return the answers to three healthy requests, and to the poisoned ones that are sent with them."""
    healthy: dict[int, Answer] = {}
    refused: dict[int, Answer] = {}

    async def one(seed: int) -> None:
        healthy[seed] = await ask(client, prompt_of(12, seed=seed), max_tokens=6)

    async def poison(index: int) -> None:
        refused[index] = await poisoned[index](client)

    async with trio.open_nursery() as nursery:
        for number in range(3):
            nursery.start_soon(one, number)
        for index in range(len(poisoned)):
            nursery.start_soon(poison, index)
    await settle(client)
    return [healthy[number] for number in range(3)], [refused[index] for index in range(len(poisoned))]


def choices(answers: list[Answer]) -> list[Any]:
    return [answer["choices"] for _, answer in answers]


def is_poison(prompt_token_ids: Any) -> bool:
    return list(prompt_token_ids)[-6:] == POISON[-6:]


class DiesOfTrack(Detokenizer):
    def _prompt_of(self, message: Any) -> Any:
        prompt = super()._prompt_of(message)
        if is_poison(message.prompt_tail):
            raise PlannedCrash("a Track")
        return prompt


class DiesOfTokens(Detokenizer):
    """Dies of the third token of any sequence of the poisoned prompt, and of each one after it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        give = self._delivery.give

        def dying(sequence: Any, *rest: Any) -> None:
            if is_poison(sequence.track.prompt_tail) and sequence.num_tokens >= 2:
                raise PlannedCrash("a token")
            give(sequence, *rest)

        setattr(self._delivery, "give", dying)  # noqa: B010 - mypy lets no method be assigned


class DiesOfLooking(TokenizerActor):
    """Dies before it has made a job of the request."""

    async def _handle(self, first: Any) -> None:
        is_new = isinstance(first, OpenRequest) and not self._store.is_first_culprit
        if is_new and is_poison(getattr(first.message.prompts[0], "token_ids", ())):
            raise PlannedCrash("an Encode")
        await super()._handle(first)


class DiesOfEncode(TokenizerActor):
    async def _encode(self, job: Any, slot: Any) -> Any:
        refusal = await super()._encode(job, slot)
        if any(is_poison(prompt.token_ids) for prompt in job.encoded):
            raise PlannedCrash("an Encode")
        return refusal


class DyingDesk:
    """Dies of the poisoned request's second sequence."""

    def __init__(self, desk: Any) -> None:
        self._desk = desk

    async def submit(self, submit: Any, track: Any, opened: Any) -> bool:
        if is_poison(submit.prompt_token_ids) and track.index:
            raise PlannedCrash("a Submit")
        return bool(await self._desk.submit(submit, track, opened))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._desk, name)


class DiesOfSubmit(TokenizerActor):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._desk: Any = DyingDesk(self._desk)


KILLERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "Track": ("detokenizer", DiesOfTrack),
    "Tokens": ("detokenizer", DiesOfTokens),
    "look": ("tokenizer", DiesOfLooking),
    "Encode": ("tokenizer", DiesOfEncode),
    "Submit": ("tokenizer", DiesOfSubmit),
}
MESSAGES = {"detokenizer": "tokens could not be decoded", "tokenizer": "prompt could not be tokenized"}


@pytest.mark.parametrize("killer", KILLERS)
async def test_request_that_kills_twice(autojump_clock: trio.abc.Clock, killer: str) -> None:
    """The request is refused, with all its sequences; the others' answers are as without it, and nothing is left."""
    actor, make = KILLERS[killer]
    journal = KeptJournal()
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(journal=journal, max_restarts=1, **{f"make_{actor}": make}) as client:
            others, ((status, told),) = await ask_together(client, partial(ask, prompt=POISON, max_tokens=6, n=3))
            after = samples(client)
    async with small_runtime() as client:
        assert choices(others) == choices((await ask_together(client))[0])
    assert status == 500 and MESSAGES[actor] in told["error"]["message"]
    deaths = [line for line in lines if line["event"] == "actor.died"]
    (failed,) = [record for record in journal.closed if record.outcome is not Outcome.FINISHED]
    assert [(line["actor"], line["request_id"]) for line in deaths] == [(actor, failed.request_id)] * 2
    assert failed.outcome is Outcome.FAILED and not failed.disputed
    assert failed.completion_tokens in (range(2, 7) if killer == "Tokens" else [0])  # which choices were ahead?
    assert after[f'actor_restarts_total{{actor="{actor}"}}'] == 2


async def test_prompt_scores_that_kill_twice(autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request whose prompt's scores cannot be added is refused; those of others, from the same step, are added."""
    add = PromptAssembler.add

    def dying(self: PromptAssembler, position: int, scores: Any) -> None:
        if len(self.text) == len_poison:
            raise PlannedCrash("scores")
        add(self, position, scores)

    echo = {"echo": True, "logprobs": 1, "max_tokens": 3}
    async with small_runtime() as client:
        expected = [await ask(client, prompt_of(20, seed=seed), **echo) for seed in range(2)]
        text = (await ask(client, POISON, **{**echo, "max_tokens": 0}))[1]["choices"][0]["text"]
    len_poison = len(text)
    monkeypatch.setattr(PromptAssembler, "add", dying)
    with structlog.testing.capture_logs():
        async with small_runtime() as client:
            poisoned = partial(ask, prompt=POISON, **echo)
            scored = [partial(ask, prompt=prompt_of(20, seed=seed), **echo) for seed in range(2)]
            _, (one, (status, _), other) = await ask_together(client, scored[0], poisoned, scored[1])
    assert status == 500 and choices([one, other]) == choices(expected)


async def test_request_in_a_task_that_kills_twice(
    autojump_clock: trio.abc.Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are served in tasks of their own, and counts, are tried again once, then refused."""
    tried: list[str] = []
    render = InlineRenderer.render

    async def dying(self: Any, chat: Any, *rest: Any) -> Any:
        content = str(chat.messages[0]["content"])
        tried.append(content)
        if content == "poison" or tried.count(content) < 2:
            raise PlannedCrash("a chat")
        return await render(self, chat, *rest)

    monkeypatch.setattr(InlineRenderer, "render", dying)
    chats = [(path, text) for path in (CHAT, COUNT) for text in ("poison", f"fine for {path}")]
    with structlog.testing.capture_logs() as lines:
        async with small_runtime() as client:
            others, answers = await ask_together(
                client,
                *(
                    partial(ask, path=path, prompt={"messages": [{"role": "user", "content": text}]})
                    for path, text in chats
                ),
            )
            health = client.runtime.desk.health()
    assert [status for status, _ in answers] == [500, 200, 500, 200] and [status for status, _ in others] == [200] * 3
    assert [line["event"] for line in lines].count("actor.died") == 6 and health.actor_restarts["tokenizer"] == 6
    assert {text: tried.count(text) for _, text in chats} == {
        "poison": 4,
        f"fine for {CHAT}": 2,
        f"fine for {COUNT}": 2,
    }


async def test_long_text_that_kills_leaves_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text that kills twice gives back its place in the queue for a thread."""
    plan = KillPlan()
    tried: list[int] = []

    async def dying(*_: object) -> None:
        tried.append(len(plan.held_slots))
        raise PlannedCrash("a text")

    monkeypatch.setattr(PooledEncoder, "encode", dying)
    with structlog.testing.capture_logs():
        async with small_runtime(**killing("tokenizer", plan)) as client:
            answer = await client.ask(TextPrompt("a knotted cord " * 200))
    assert answer.error is not None and "could not be tokenized" in answer.error.message
    assert tried == [1, 1] and not plan.held_slots


async def test_outlet_that_raises(autojump_clock: trio.abc.Clock) -> None:
    """If a client's own handler raises, what it got of a delta is not known: its request fails at once, alone."""
    received: list[object] = []

    def consume(events: list[object]) -> None:
        received.extend(events)
        if len(received) > 3:
            raise PlannedCrash("a handler")

    journal = KeptJournal()
    with structlog.testing.capture_logs() as lines:
        async with small_runtime(journal=journal) as client:
            ticket = client.open(prompt_of(10), max_tokens=9)
            ticket.mailbox.attach(consume)
            await ticket.start()
            await trio.sleep(0.02)
            with trio.fail_after(60):
                while ticket.mailbox.closed is None:
                    await trio.sleep(0.01)
            ticket.leave()
            others, _ = await ask_together(client)
    assert [status for status, _ in others] == [200] * 3
    assert {line["event"] for line in lines} >= {"detokenizer.failed"} and "actor.died" not in str(lines)
    assert [record.outcome for record in journal.closed].count(Outcome.FAILED) == 1


# ---------------------------------------------------------------- limits on deaths, and how they are reported


class DeadTokenizer(TokenizerActor):
    async def _handle(self, first: Any) -> None:
        raise PlannedCrash("again")


class DeadDetokenizer(Detokenizer):
    async def _handle(self, pending: Any) -> None:
        raise PlannedCrash("again")


@pytest.mark.parametrize("make", [DeadTokenizer, DeadDetokenizer])
async def test_too_many_deaths_without_progress(autojump_clock: trio.abc.Clock, make: type) -> None:
    """An actor that dies of everything ends the server with an error."""
    actor = "tokenizer" if make is DeadTokenizer else "detokenizer"
    with structlog.testing.capture_logs() as lines, pytest.raises(ExceptionGroup) as caught:
        async with small_runtime(max_restarts=3, **{f"make_{actor}": make}) as client:
            ticket = client.open(prompt_of(10))
            await ticket.start()
            await trio.sleep(60)
    assert caught.group_contains(ActorGivenUp, match=f"the {actor} died 4 times")
    assert sum(line["event"] == "actor.died" for line in lines) >= 4


@pytest.mark.parametrize("killer", KILLERS)
async def test_many_poisoned_requests(autojump_clock: trio.abc.Clock, killer: str) -> None:
    """However many requests kill an actor that has nothing else to do, the server goes on."""
    actor, make = KILLERS[killer]
    with structlog.testing.capture_logs():
        async with small_runtime(max_restarts=2, **{f"make_{actor}": make}) as client:
            refused = [await ask(client, POISON, max_tokens=6, n=2) for _ in range(4)]
            others, _ = await ask_together(client)
    assert [status for status, _ in refused] == [500] * 4 and [status for status, _ in others] == [200] * 3


async def test_health_tells_of_restarts(autojump_clock: trio.abc.Clock) -> None:
    """`/health`, `/ready` and the metric show a restart at once; the server is healthy."""
    with structlog.testing.capture_logs():
        async with small_runtime(make_detokenizer=DiesOfTokens) as client:
            before = samples(client)
            await ask(client, POISON, max_tokens=6)
            for path in ("/health", "/ready"):
                async with over_http(client).open("GET", path) as exchange:
                    told = await exchange.json()
                    assert exchange.status == 200
                    assert told["actor_restarts"] == {"tokenizer": 0, "router": 0, "detokenizer": 2, "accountant": 0}
            after = samples(client)
    assert [before[f'actor_restarts_total{{actor="{a}"}}'] for a in ("tokenizer", "detokenizer", "accountant")] == [
        0
    ] * 3
    assert after['actor_restarts_total{actor="detokenizer"}'] == 2
