"""Requests whose engine dies continue on the next one as if nothing had happened; their accounts record the death."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import trio

from quipu.actors.fleet.supervisor import EngineGivenUp
from quipu.actors.messages.outcomes import ErrorKind, Fault, FinishReason, Outcome
from quipu.actors.messages.prompts import TokenPrompt
from quipu.actors.messages.sampling import LogitRules
from quipu.actors.request_desk.health import State
from quipu.actors.request_desk.open_requests import OpenRequest
from tests.fake_oracle import continuation
from tests.faults.deadly_engines import Deaths, Output, ask, open_deadly, settle
from tests.grammars import PERSON, schema
from tests.kept_forks import kept_forks
from tests.near import assert_same
from tests.prompts import prompt_of
from tests.runtimes import (
    Answer,
    full_blocks,
    kill_engine,
    most_tokens,
    read_answer,
    small_runtime,
    text_of,
    value_of,
)
from tests.traps.wire import over_http

PROMPT = prompt_of(40, seed=5)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several choices": {"n": 4},
    "rules": {"rules": LogitRules(repetition_penalty=1.3, presence_penalty=0.5, min_tokens=4, bias={5: 3.0})},
    "grammar": {"grammar": schema(PERSON), "max_tokens": 20, "n": 2},
    "scores": {"logprobs": 2, "prompt_logprobs": 2, "max_tokens": 14},
}


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    """Load the tokenizer for grammars once, not for each of the engines that die."""
    with kept_forks():
        yield


@pytest.mark.parametrize("after_step", [False, True], ids=["in its step", "with its result"])
@pytest.mark.parametrize("case", CASES)
async def test_killed_at_every_token(case: str, after_step: bool) -> None:
    """Engines die one after the other, each in its fourth step: tokens, text, scores and usage are the same."""
    fields = CASES[case]
    async with open_deadly(Deaths(), executor="cpu") as client:
        undisturbed = await ask(client, PROMPT, **fields)
    deaths = Deaths([4] * 100, after_step=after_step)
    async with open_deadly(deaths, executor="cpu") as client:
        resumed = await ask(client, PROMPT, **fields)
        await settle(client)
        metrics = client.runtime.metrics
        assert value_of(metrics.usage_disputed) == 0
    assert_same(resumed, undisturbed)
    record = resumed.record
    assert deaths.num_deaths >= 3
    assert record.num_engine_deaths == deaths.num_deaths and not record.disputed and record.fault is None
    assert record.incarnation == 1 and record.recomputed_tokens > 0
    assert undisturbed.record.num_engine_deaths == undisturbed.record.recomputed_tokens == 0


WIRE_FIELDS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "seed": 3}
WIRE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "streamed": {"stream": True},
    "constrained": {"stream": True, "structured_outputs": {"regex": "[a-z]{30}"}},
    "scored": {"stream": True, "logprobs": 2, "echo": True, "prompt": PROMPT[:6]},
    "n = 4": {"stream": True, "n": 4},
}


@pytest.mark.parametrize("case", WIRE_CASES)
async def test_same_events(case: str) -> None:
    """An engine dies in each step in turn: over HTTP, streamed and not, a client gets the same events each time."""

    async def send(deaths: Deaths) -> list[bytes]:
        async with open_deadly(deaths) as client:
            body = json.dumps({"model": "demo", "return_token_ids": True} | WIRE_FIELDS | WIRE_CASES[case]).encode()
            with trio.fail_after(60):
                async with over_http(client).open("POST", "/v1/completions", body) as exchange:
                    assert await exchange.wait_started() == 200
                    received = await exchange.read()
            await settle(client)
        events = re.sub(rb'"(id|created)":("[^"]*"|[0-9]+)', b"", received).split(b"\n\n")
        return sorted(events, key=lambda event: re.findall(rb'"index":[0-9]+', event))  # the choices' order may differ

    undisturbed = await send(Deaths())
    num_deaths = 0
    for step in range(1, 13):
        deaths = Deaths([step])
        assert await send(deaths) == undisturbed
        num_deaths += deaths.num_deaths
    assert num_deaths == 12 if most_tokens.get() == 1 else 12 / most_tokens.get() < num_deaths <= 12


async def test_stop_string_across_deaths() -> None:
    """A stop string is found even if engines die between its tokens; its text is held back until then."""
    text = text_of(continuation(PROMPT, 30))
    stop = text[len(text) // 2 :][:6]
    deaths = Deaths([4] * 100)
    async with open_deadly(deaths) as client:
        answer = await ask(client, PROMPT, stop=(stop,), max_tokens=30, temperature=0.0)
        await settle(client)
    assert answer.texts[0] == text[: text.index(stop)] and answer.reasons[0] is FinishReason.STOP
    assert deaths.num_deaths >= 4 and not answer.record.disputed


async def test_long_prompt() -> None:
    """A prompt of several steps is resumed as long as each engine gets further, and fails if none does."""
    deaths = Deaths([4 + 3 * at for at in range(3)])
    async with open_deadly(deaths, max_num_batched_tokens=16) as client:
        answer = await ask(client, prompt_of(150, seed=1), temperature=0.0)
        await settle(client)
    assert answer.error is None and answer.token_ids[0] == tuple(continuation(prompt_of(150, seed=1), 12))
    assert deaths.num_deaths == answer.record.num_engine_deaths == 3 and not answer.record.disputed
    deaths = Deaths([3] * 100)
    async with open_deadly(deaths, max_num_batched_tokens=16) as client:
        answer = await ask(client, prompt_of(150, seed=1))
        await settle(client)
    assert answer.error is not None and deaths.num_deaths <= 4


async def test_death_before_the_first_step_is_reported() -> None:
    """If no step was reported before a death, the next engine's admission counts as the first; nothing is disputed."""
    async with open_deadly(Deaths([1], after_step=True), max_num_batched_tokens=64) as client:
        answer = await ask(client, PROMPT)
        await settle(client)
    record = answer.record
    assert (record.incarnation, record.num_engine_deaths, record.computed_tokens) == (2, 1, len(PROMPT))
    assert not record.disputed and record.recomputed_tokens == 0


async def test_other_requests_meanwhile(autojump_clock: trio.abc.Clock) -> None:
    """Health reports at once that the engine is gone; requests whose client leaves are not resumed, new ones wait."""
    answers: dict[str, Any] = {}
    async with small_runtime(restart_backoff_s=5.0) as client:
        await client.ask(PROMPT)

        async def one(name: str, max_tokens: int) -> None:
            answers[name] = await client.ask(PROMPT, max_tokens=max_tokens)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, "before", 50)
            leaver = client.open(PROMPT, max_tokens=90)
            await leaver.start()
            await trio.sleep(0.1)
            kill_engine(client)
            await trio.sleep(0.2)
            health = client.runtime.desk.health()
            assert health.state is State.RESTARTING and "a block table cannot be trusted" in health.detail
            leaver.leave()
            nursery.start_soon(one, "during", 8)
        await settle(client)
        metrics = client.runtime.metrics.render().decode()
    assert answers["before"].texts[0] == text_of(continuation(PROMPT, 50))
    assert answers["before"].record.cached_tokens == full_blocks(40), "frozen at its first admission"
    assert answers["during"].record.cached_tokens in (0, full_blocks(40))
    assert answers["during"].texts[0] == text_of(continuation(PROMPT, 8))
    assert leaver.mailbox.closed is not None and leaver.mailbox.closed.record.outcome is Outcome.CANCELLED
    assert 'quipu:requests_resumed_total{model_name="demo",same_numerics="true"} 1.0' in metrics


@pytest.mark.parametrize("num_requests", [2, 7, 64])
async def test_one_request_kills_every_engine(num_requests: int) -> None:
    """A request that kills every engine is found after few deaths and fails; all others, and new ones, are served."""
    deadly = 299
    deaths = Deaths(token_ids=frozenset({deadly}))
    prompts = [prompt_of(20, seed=seed) for seed in range(num_requests)]
    assert not any(deadly in prompt for prompt in prompts)
    bad = num_requests * 2 // 3
    prompts[bad] = [*prompts[bad], deadly]
    answers: dict[int, Output] = {}
    async with open_deadly(deaths, num_blocks=512, max_num_seqs=64, max_restarts=3) as client:

        async def one(index: int) -> None:
            answers[index] = await ask(client, prompts[index], temperature=0.0)

        async with trio.open_nursery() as nursery:
            for index in range(num_requests):
                nursery.start_soon(one, index)
        after = await ask(client, prompts[0], temperature=0.0)
        await settle(client)
    assert deaths.num_deaths <= 2 + math.log2(num_requests) + 2
    failed = answers.pop(bad)
    assert failed.error is not None and failed.error.kind is ErrorKind.INTERNAL
    assert "no other request could have been the cause" in failed.error.message
    assert (failed.record.outcome, failed.record.fault) == (Outcome.FAILED, Fault.ENGINE_DIED)
    for index, answer in [*answers.items(), (0, after)]:
        assert answer.error is None and answer.token_ids[0] == tuple(continuation(prompts[index], 12))
        assert not answer.record.disputed


async def test_waiting_requests_are_no_suspects() -> None:
    """Requests that wait in the engine are not suspected of deaths in other requests' steps: there is no search."""
    deaths = Deaths([4] * 3)
    num_tokens = 12 * most_tokens.get()  # so that the first still runs when the third engine dies
    searched: list[bool] = []
    async with open_deadly(deaths, max_num_seqs=1) as client, trio.open_nursery() as nursery:

        async def one(seed: int) -> None:
            answer = await ask(client, prompt_of(20, seed=seed), on_delta=note, max_tokens=num_tokens)
            assert answer.error is None

        def note(delta: object) -> None:
            searched.append(client.runtime.desk.sequences.is_searching)

        for seed in range(5):
            nursery.start_soon(one, seed)
    assert deaths.num_deaths == 3 and len(searched) > 20 and not any(searched)


async def test_two_culprits() -> None:
    """Two requests that kill engines are both found; requests that arrive during the search wait for its end."""
    deaths = Deaths(token_ids=frozenset({298, 299}))
    prompts = {name: prompt_of(20, seed=seed) for seed, name in enumerate(("a", "b", "c", "d", "late"))}
    prompts["b"].append(298)
    prompts["d"].append(299)
    answers: dict[str, Output] = {}
    async with open_deadly(deaths, max_restarts=4) as client:

        async def one(name: str) -> None:
            answers[name] = await ask(client, prompts[name], temperature=0.0)

        async with trio.open_nursery() as nursery:
            for name in ("a", "b", "c", "d"):
                nursery.start_soon(one, name)
            while deaths.num_deaths < 2:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(one, "late")
        await settle(client)
    assert {name for name, answer in answers.items() if answer.error is not None} == {"b", "d"}


async def test_newcomer_after_the_last_culprit() -> None:
    """A request that came during a search is served when the search ends with a culprit, and nothing else is left."""
    deaths = Deaths(token_ids=frozenset({299}))
    answers: list[Output] = []
    async with open_deadly(deaths) as client:

        async def one(prompt: list[int]) -> None:
            answers.append(await ask(client, prompt, temperature=0.0))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, [*prompt_of(20, seed=1), 299])
            nursery.start_soon(one, [*prompt_of(20, seed=2), 299])
            while not client.runtime.desk.sequences.is_searching:
                await trio.lowlevel.checkpoint()
            nursery.start_soon(one, prompt_of(20, seed=3))
        await settle(client)
    assert sorted(answer.error is None for answer in answers) == [False, False, True]


async def test_engines_that_never_work_end_the_server(autojump_clock: trio.abc.Clock) -> None:
    """If every step kills its engine, so that no single request is the cause, the server gives up."""
    answers: list[Output] = []
    with pytest.raises(ExceptionGroup) as caught:
        async with open_deadly(Deaths([1] * 1000), max_restarts=5) as client, trio.open_nursery() as nursery:

            async def one(seed: int) -> None:
                answers.append(await ask(client, prompt_of(20, seed=seed)))

            for seed in range(8):
                nursery.start_soon(one, seed)
            await trio.sleep(600)
    assert caught.group_contains(EngineGivenUp)


async def test_sequences_still_to_come(autojump_clock: trio.abc.Clock) -> None:
    """A request with more sequences than the queue holds continues after a death, and none of them is refused."""
    prompts = [TokenPrompt(tuple(prompt_of(20, seed=seed))) for seed in range(30)]
    async with small_runtime(submit_slots=4, max_num_seqs=4, max_waiting_requests=30) as client:
        ticket = client.open(*prompts, max_tokens=20)
        await ticket.start()
        await trio.sleep(0.05)
        kill_engine(client)
        answer = await read(ticket)
        await settle(client)
    assert answer.error is None and len(answer.texts) == 30
    assert answer.record.num_engine_deaths == 1
    for index, prompt in enumerate(prompts):
        assert answer.texts[index] == text_of(continuation(list(prompt.token_ids), 20))


async def read(ticket: OpenRequest) -> Answer:
    try:
        return await read_answer(ticket)
    finally:
        ticket.leave()
