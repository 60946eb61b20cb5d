"""Engines with roles behind one accountant: what clients get is what one engine would have written.

All of quipu in one loop, with engines that read their KV and fetch each other's blocks: a wrong block changes the text.
"""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.config.engine_roles import EngineRole, RolesRefused
from quipu.actors.messages.outcomes import Outcome
from quipu.actors.messages.scheduler import SequenceKind
from quipu.actors.request_desk.health import DrainMode
from tests.fake_oracle import continuation, prompt_scores
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Answer, Client, kill_engine, small_runtime, text_of
from tests.traps.wire import COMPLETIONS, body, over_http, samples, settle

PREFILL, DECODE, MIXED = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.MIXED
PAIR = (PREFILL, DECODE)
PROMPT = prompt_of(200)
MAX_TOKENS = 30


def roles_runtime(*roles: EngineRole, **changes: Any) -> Any:
    """Open a runtime whose engines have these roles, compute prompts in several steps, and leave all of them apart."""
    return small_runtime(
        **{
            "num_engines": len(roles),
            "engine_roles": roles,
            "has_peers": True,
            "prefill_local_tokens": 0,
            "max_num_batched_tokens": 4 * BLOCK,
            **changes,
        }
    )


def passes(client: Client) -> list[int]:
    """Return how many passes each engine has run."""
    return [engine.executor.backend.num_passes for engine in client.engines]  # type: ignore[attr-defined]  # the fake's


def assert_answer(answer: Answer, prompt: list[int], max_tokens: int = MAX_TOKENS, num_choices: int = 1) -> None:
    assert answer.error is None
    assert answer.texts == dict.fromkeys(range(num_choices), text_of(continuation(prompt, max_tokens)))
    record = answer.record
    assert (record.outcome, record.disputed, record.num_engine_deaths) == (Outcome.FINISHED, False, 0)
    assert record.prompt_tokens == len(prompt) and record.completion_tokens == max_tokens * num_choices


async def test_both_serve_a_request(autojump_clock: trio.abc.Clock) -> None:
    """One engine computes the prompt, the other one all further tokens; nobody was resumed."""
    async with roles_runtime(*PAIR) as client:
        answer = await client.ask(PROMPT, max_tokens=MAX_TOKENS)
        await settle(client)
        found = samples(client)
        assert_answer(answer, PROMPT)
        assert (answer.record.engine, answer.record.cached_tokens) == (0, 0)
        prefill, decode = passes(client)
        assert prefill == -(-len(PROMPT) // (4 * BLOCK)), "it does nothing but the prompt"
        assert decode <= MAX_TOKENS - 1, "the end of the prompt is computed in the step of the second token"
    assert all(found[f'requests_resumed_total{{same_numerics="{same}"}}'] == 0 for same in ("true", "false"))


async def test_what_decoding_has_cached_is_computed_there(autojump_clock: trio.abc.Clock) -> None:
    """The next turn of a conversation goes to the engine that has decoded the last one, if little is missing."""
    async with roles_runtime(*PAIR, prefill_local_tokens=2 * BLOCK) as client:
        await client.ask(PROMPT, max_tokens=MAX_TOKENS)
        turn = PROMPT + continuation(PROMPT, MAX_TOKENS) + prompt_of(BLOCK, 5)
        before = passes(client)[0]
        answer = await client.ask(turn, max_tokens=MAX_TOKENS)
        await settle(client)
        assert_answer(answer, turn)
        assert answer.record.engine == 1
        assert answer.record.cached_tokens == (len(PROMPT) + MAX_TOKENS - 1) // BLOCK * BLOCK
        assert passes(client)[0] == before


@pytest.mark.parametrize("roles", [PAIR, (PREFILL, DECODE, DECODE), (PREFILL, MIXED), (MIXED, DECODE), (MIXED, MIXED)])
async def test_many_at_once(autojump_clock: trio.abc.Clock, roles: tuple[EngineRole, ...]) -> None:
    """Requests with one or several choices and prompts are served as by one engine, whatever the roles."""
    answers: dict[int, Answer] = {}
    async with roles_runtime(*roles) as client:

        async def ask(index: int) -> None:
            answers[index] = await client.ask(prompt_of(70, index), max_tokens=MAX_TOKENS, n=1 + index % 3)

        async with trio.open_nursery() as nursery:
            for index in range(12):
                nursery.start_soon(ask, index)
        several = await client.ask(PROMPT, prompt_of(70, 50), prompt_of(3, 51), max_tokens=MAX_TOKENS)
        await settle(client)
    for index, answer in answers.items():
        assert_answer(answer, prompt_of(70, index), num_choices=1 + index % 3)
    prompts = (PROMPT, prompt_of(70, 50), prompt_of(3, 51))
    assert several.texts == {index: text_of(continuation(each, MAX_TOKENS)) for index, each in enumerate(prompts)}
    assert several.record.prompt_tokens == 200 + 70 + 3 and not several.record.disputed


async def test_choices_of_one_prompt(autojump_clock: trio.abc.Clock) -> None:
    """The prompt of several choices is computed once, and counted once."""
    async with roles_runtime(*PAIR) as client:
        answer = await client.ask(PROMPT, max_tokens=MAX_TOKENS, n=3)
        await settle(client)
        assert_answer(answer, PROMPT, num_choices=3)
        assert answer.record.cached_tokens == 0 and answer.record.engine == 0


@pytest.mark.parametrize("max_tokens", [1, 0])
async def test_nothing_to_decode(autojump_clock: trio.abc.Clock, max_tokens: int) -> None:
    """A request that ends with its prompt stays on the engine that computes it."""
    async with roles_runtime(*PAIR) as client:
        answer = await client.ask(PROMPT, max_tokens=max_tokens, echo=not max_tokens)
        await settle(client)
        assert answer.error is None and answer.record.completion_tokens == max_tokens
        assert passes(client)[1] == 0


async def test_embedding(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that is only embedded is no work for an engine that decodes."""
    async with roles_runtime(*PAIR) as client:
        encode = attrs.evolve(client.encode(PROMPT, max_tokens=1), kind=SequenceKind.EMBED)
        ticket = client.runtime.desk.open(encode, "test")
        await ticket.start()
        with trio.move_on_after(5):
            await ticket.mailbox.get()
        ticket.leave()
        await settle(client)
        assert passes(client)[1] == 0


async def test_echo_with_scores(autojump_clock: trio.abc.Clock) -> None:
    """A prompt is scored once, by the engine that computes it, though the other one finds it cached."""
    async with roles_runtime(*PAIR) as client:
        await client.ask(PROMPT, max_tokens=MAX_TOKENS)
        exchange, answer = await over_http(client).post(
            COMPLETIONS, body(PROMPT, echo=True, logprobs=2, max_tokens=MAX_TOKENS)
        )
        assert exchange.status == 200
        await settle(client)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "every position is computed"
        logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert len(logprobs) == len(PROMPT) + MAX_TOKENS
        assert logprobs[: len(PROMPT)] == [None, *prompt_scores(PROMPT, 2).logprobs]
        assert passes(client)[1] <= 2 * (MAX_TOKENS - 1), "no prompt is computed there"


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.015, 0.045, 0.055, 0.065, 0.075, 0.1, 0.3])
async def test_client_leaves(autojump_clock: trio.abc.Clock, after_s: float) -> None:
    """Whenever a client leaves, nothing is left of its request on either engine."""
    async with roles_runtime(*PAIR) as client:
        ticket = client.open(PROMPT, max_tokens=MAX_TOKENS, n=2)
        with trio.move_on_after(after_s):
            await ticket.start()
            while ticket.mailbox.closed is None:
                await ticket.mailbox.get()
        ticket.leave()
        await settle(client)
        assert ticket.mailbox.closed is not None and not ticket.mailbox.closed.record.disputed
        assert_answer(await client.ask(PROMPT, max_tokens=MAX_TOKENS), PROMPT)
        await settle(client)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("after_s", [0.015, 0.045, 0.055, 0.065, 0.1])
async def test_engine_dies(autojump_clock: trio.abc.Clock, index: int, after_s: float) -> None:
    """Whichever engine dies, and whenever, the client gets the same text, and the numbers of the first admission."""
    answers: list[Answer] = []
    async with roles_runtime(*PAIR) as client:

        async def ask() -> None:
            answers.append(await client.ask(PROMPT, max_tokens=MAX_TOKENS))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(after_s)
            kill_engine(client, index)
            await client.ask(prompt_of(40, 3), max_tokens=2)  # the engine dies of it, if it has nothing else
        await settle(client)
    (answer,) = answers
    assert answer.error is None and answer.texts == {0: text_of(continuation(PROMPT, MAX_TOKENS))}
    assert (answer.record.cached_tokens, answer.record.disputed) == (0, False)
    assert answer.record.prompt_tokens == len(PROMPT) and answer.record.completion_tokens == MAX_TOKENS


async def test_one_side_is_drained(autojump_clock: trio.abc.Clock) -> None:
    """Without an engine for decoding the other one does everything, and the other way round."""
    for engine_id in (0, 1):
        async with roles_runtime(*PAIR) as client:
            client.runtime.desk.control.drain(engine_id, DrainMode.FINISH)
            await trio.sleep(0.1)
            assert [status.engine_id for status in client.runtime.desk.engines()] == [1 - engine_id]
            assert_answer(await client.ask(PROMPT, max_tokens=MAX_TOKENS), PROMPT)
            await settle(client)


async def test_roles_are_changed(autojump_clock: trio.abc.Clock) -> None:
    """Roles are changed while requests run; the next ones go by the new roles, and every answer is right."""
    answers: dict[int, Answer] = {}
    async with roles_runtime(*PAIR) as client:

        async def ask(index: int) -> None:
            answers[index] = await client.ask(prompt_of(70, index), max_tokens=MAX_TOKENS)

        async with trio.open_nursery() as nursery:
            for index in range(6):
                nursery.start_soon(ask, index)
            await trio.sleep(0.045)
            client.runtime.desk.control.set_role(0, DECODE)
            client.runtime.desk.control.set_role(1, PREFILL)
            for index in range(6, 12):
                nursery.start_soon(ask, index)
        await settle(client)
        assert [status.role for status in client.runtime.desk.engines()] == [DECODE, PREFILL]
        before = passes(client)
        answer = await client.ask(prompt_of(200, 99), max_tokens=MAX_TOKENS)
        assert_answer(answer, prompt_of(200, 99))
        assert answer.record.engine == 1
        decode, prefill = (after - had for after, had in zip(passes(client), before, strict=True))
        assert (prefill, 0 < decode < MAX_TOKENS) == (4, True)
        await settle(client)
    for index, each in answers.items():
        assert_answer(each, prompt_of(70, index))


async def test_added_engine_has_a_role(autojump_clock: trio.abc.Clock) -> None:
    """An engine that is added serves what it was added for."""
    async with roles_runtime(PREFILL, DECODE) as client:
        client.runtime.desk.control.add(1, DECODE)
        await trio.sleep(0.1)
        client.runtime.desk.control.drain(1, DrainMode.FINISH)
        await trio.sleep(0.1)
        assert_answer(await client.ask(PROMPT, max_tokens=MAX_TOKENS), PROMPT)
        await settle(client)
        assert 0 < passes(client)[1] < MAX_TOKENS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"on_engine_death": "fail"}, "needs --on-engine-death resume"),
        ({"min_engines": 1, "max_engines": 3}, "cannot be scaled automatically"),
    ],
)
async def test_servers_without_roles(autojump_clock: trio.abc.Clock, changes: dict[str, Any], reason: str) -> None:
    """Where the server's other settings allow no roles, none is given."""
    async with small_runtime(num_engines=2, **changes) as client:
        control = client.runtime.desk.control
        with pytest.raises(RolesRefused, match=reason):
            control.set_role(0, PREFILL)
        with pytest.raises(RolesRefused, match=reason):
            control.add(1, DECODE)
        control.set_role(0, MIXED)
        assert [status.role for status in client.runtime.desk.engines()] == [MIXED, MIXED]
