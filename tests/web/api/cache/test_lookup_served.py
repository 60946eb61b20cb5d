"""Look-ups over a whole runtime: they report what the request itself then reports, and leave no trace.

Bodies are drawn from a few conversations of each API, so that prompts find each other's blocks, in a pool so small that
blocks are evicted all the time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from quipu.actors.engine.block_manager.pool_state import PoolState
from quipu.actors.messages.tokenizer import Encode
from quipu.kernels.fake import Dials
from tests.prompts import prompt_of
from tests.runtimes import BLOCK, Client, small_runtime
from tests.traps.wire import body, over_http, samples, settle

LOOKUP = "/v1/cache/lookup"
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
WORDS = ("cord", "knot", "cotton", "twist", "dye", "village", "tribute", "harvest", "llama", "bridge", "maize")


def sentence(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def drawn_bodies(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield urls and bodies: new conversations, longer versions of earlier ones, and the same again."""
    rng = random.Random(seed)
    systems = [sentence(rng, 30) for _ in range(3)]
    talks: list[list[dict[str, Any]]] = []
    while True:
        if not talks or rng.random() < 0.25:
            talks.append([{"role": "user", "content": f"{len(talks)} {sentence(rng, rng.randint(1, 40))}"}])
        talk = talks[max(0, len(talks) - rng.randint(1, 6))]
        if rng.random() < 0.4 and len(talk) < 7:
            talk += [
                {"role": "assistant", "content": sentence(rng, 12)},
                {"role": "user", "content": sentence(rng, rng.randint(1, 30))},
            ]
        system, common = rng.choice(systems), {"model": "demo", "temperature": 0, "cache_salt": rng.choice("aab")}
        url = rng.choice([CHAT, COMPLETIONS, RESPONSES, MESSAGES])
        match url:
            case "/v1/chat/completions":
                content = [{"type": "text", "text": piece} for piece in (system, " Be brief.")]
                first = {"role": "system", "content": content}
                fields = {"messages": [first, *talk], "max_tokens": 3}
                yield url, {**common, **fields, "return_cached_tokens_details": True}
            case "/v1/completions":
                text: Any = system + " " + talk[0]["content"]
                if rng.random() < 0.3:
                    text = prompt_of(rng.randint(1, 8) * BLOCK, seed=rng.randint(0, 5))
                fields = {"prompt": text, "max_tokens": 2, "echo": rng.random() < 0.1}
                yield url, {**common, **fields, "return_cached_tokens_details": True}
            case "/v1/responses":
                yield url, {**common, "instructions": system, "input": talk, "max_output_tokens": 3}
            case _:
                marked = {"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}
                shown = [marked] if rng.random() < 0.5 else system
                yield url, {**common, "system": shown, "messages": talk, "max_tokens": 20}


def reported(url: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Return the prompt tokens and the cached ones of a response."""
    usage = answer["usage"]
    if url == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached + usage["cache_creation_input_tokens"], cached
    if url == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@attrs.define
class Run:
    """The state that a run of requests has left after each of them."""

    pools: list[PoolState] = attrs.field(factory=list)
    counters: dict[str, float] = attrs.field(factory=dict)
    engines: list[int | None] = attrs.field(factory=list)
    num_hits: int = 0
    num_partial: int = 0
    num_pinned: int = 0


async def run(num_bodies: int, *, with_look_ups: bool, **settings: Any) -> Run:
    """Send drawn bodies one after the other. With look-ups, check that each reports what its request reports."""
    run = Run()
    async with small_runtime(Dials(step_seconds=0.001), **settings) as client:
        http = over_http(client)
        for (url, drawn), _ in zip(drawn_bodies(1), range(num_bodies), strict=False):
            found: dict[str, Any] = {}
            if with_look_ups:
                exchange, answer = await http.post(LOOKUP, {"url": url, "body": drawn})
                assert exchange.status == 200, answer
                (found,) = answer["prompts"]
            exchange, answer = await http.post(url, drawn)
            assert exchange.status == 200, answer
            await settle_requests(client)
            by_slot = client.runtime.route_store.by_slot  # engines are ready in any order
            run.pools += [
                client.engines[by_slot[slot].engine_id].block_manager.pool.state() for slot in sorted(by_slot)
            ]
            prompt_tokens, cached_tokens = reported(url, answer)
            run.num_hits += cached_tokens > 0
            if not with_look_ups:
                continue
            assert (found["prompt_tokens"], found["cached_tokens"]) == (prompt_tokens, cached_tokens), (url, drawn)
            assert found["cached_tokens_by_tier"]["device"] == cached_tokens
            run.num_pinned += found["pinned_until"] is not None
            if "cached_tokens_by_tier" in answer["usage"].get("prompt_tokens_details", {}):
                (miss,) = answer["usage"]["prompt_tokens_details"]["cache_misses"]
                end = found["ends_at"] or {"reason": "none", "token": miss["token"]}
                assert {name: end[name] for name in ("reason", "token")} == miss
                run.num_partial += cached_tokens > 0 and miss["reason"] != "none"
        await settle(client)
        run.counters = {name: value for name, value in samples(client).items() if "seconds" not in name}
    return run


async def settle_requests(client: Client) -> None:
    """Wait until the engines have nothing to do."""
    with trio.fail_after(60):
        while client.runtime.entry_store.num_open_accounts or client.runtime.desk.num_live_sequences:
            await trio.sleep(0.001)
    await trio.testing.wait_all_tasks_blocked()


@pytest.mark.timeout(600)  # for a thousand requests
@pytest.mark.parametrize(
    ("num_engines", "num_bodies"), [(1, 200), (2, 100), pytest.param(1, 500, marks=pytest.mark.slow)]
)
async def test_look_ups_are_right_and_leave_no_trace(
    num_engines: int, num_bodies: int, autojump_clock: trio.abc.Clock
) -> None:
    """Look-ups have the numbers of their requests, and change neither blocks, nor the order of eviction, nor counters.

    With two engines, the one that is asked is the one that then serves.
    """
    settings = {"num_blocks": 48, "num_engines": num_engines}
    asked = await run(num_bodies, with_look_ups=True, **settings)
    unasked = await run(num_bodies, with_look_ups=False, **settings)
    assert asked.num_hits > num_bodies // 4 and asked.num_partial and asked.num_pinned
    assert asked.pools == unasked.pools
    assert asked.counters == unasked.counters
    assert asked.counters['requests_total{outcome="finished"}'] == num_bodies


async def test_choices_share_the_look_up(autojump_clock: trio.abc.Clock) -> None:
    """A prompt has one entry in the answer, however many choices its request has."""
    async with small_runtime() as client:
        http, request = over_http(client), body(prompt_of(4 * BLOCK, seed=1), n=3, temperature=1, seed=1)
        for expected in (0, 3 * BLOCK):
            _, answer = await http.post(LOOKUP, {"url": COMPLETIONS, "body": request})
            assert [prompt["cached_tokens"] for prompt in answer["prompts"]] == [expected]
            _, answer = await http.post(COMPLETIONS, request)
            assert reported(COMPLETIONS, answer) == (4 * BLOCK, expected)


async def test_each_prompt_of_a_list(autojump_clock: trio.abc.Clock) -> None:
    """Each prompt of a list has its own entry."""
    async with small_runtime() as client:
        http, cached, other = over_http(client), prompt_of(4 * BLOCK, seed=1), prompt_of(2 * BLOCK, seed=2)
        await http.post(COMPLETIONS, body(cached))
        _, answer = await http.post(LOOKUP, {"url": COMPLETIONS, "body": body([cached, other, [*cached, 7]])})
        assert [prompt["prompt_tokens"] for prompt in answer["prompts"]] == [4 * BLOCK, 2 * BLOCK, 4 * BLOCK + 1]
        assert [prompt["cached_tokens"] for prompt in answer["prompts"]] == [3 * BLOCK, 0, 4 * BLOCK]
        assert [prompt["ends_at"] and prompt["ends_at"]["reason"] for prompt in answer["prompts"]] == [
            None,
            "diverged",
            None,
        ]


async def test_a_changed_part_is_named(autojump_clock: trio.abc.Clock) -> None:
    """The message and the part in which the prefix ends are the client's own indexes."""
    async with small_runtime() as client:
        http = over_http(client)

        def said(*parts: str) -> dict[str, Any]:
            first = [{"type": "text", "text": part} for part in parts]
            messages = [
                {"role": "user", "content": first},
                {"role": "assistant", "content": "One."},
                {"role": "user", "content": "Two."},
            ]
            return {
                "model": "demo",
                "max_tokens": 2,
                "temperature": 0,
                "system": "Be brief. " * 8,
                "messages": messages,
            }

        long = "A cord with many knots. " * 8
        await http.post(MESSAGES, said(long, long))
        for parts, end in (
            ((long, long), None),
            ((long, "A rope. " + long), (0, 1)),
            (("A rope. " + long, long), (0, 0)),
        ):
            _, answer = await http.post(LOOKUP, {"url": MESSAGES, "body": said(*parts)})
            found = answer["prompts"][0]["ends_at"]
            assert (found and (found["message"], found["part"])) == end


async def test_only_the_own_tenant_and_salt(autojump_clock: trio.abc.Clock) -> None:
    """Another salt finds nothing and is not told that the tokens are cached under another one."""
    async with small_runtime() as client:
        http, prompt = over_http(client), prompt_of(4 * BLOCK, seed=1)
        await http.post(COMPLETIONS, body(prompt, cache_salt="one"))
        _, answer = await http.post(LOOKUP, {"url": COMPLETIONS, "body": body(prompt, cache_salt="two")})
        (found,) = answer["prompts"]
        assert found["cached_tokens"] == 0 and found["ends_at"]["reason"] == "diverged"
        request = client.encode(prompt, domain="another", cache_salt="one")
        (other,) = await client.runtime.desk.look_up(request)
        assert other.num_cached_tokens == 0


async def test_without_prefix_caching(autojump_clock: trio.abc.Clock) -> None:
    """Without prefix caching nothing is found, for the reason `disabled`."""
    async with small_runtime(enable_prefix_caching=False) as client:
        http, prompt = over_http(client), prompt_of(4 * BLOCK, seed=1)
        await http.post(COMPLETIONS, body(prompt))
        _, answer = await http.post(LOOKUP, {"url": COMPLETIONS, "body": body(prompt)})
        (found,) = answer["prompts"]
        assert found["cached_tokens"] == 0 and found["ends_at"]["reason"] == "disabled"


async def test_refused_as_the_request_would_be(autojump_clock: trio.abc.Clock) -> None:
    """A prompt that is too long, alone or with its output, gets the request's own error."""
    async with small_runtime() as client:
        http = over_http(client)
        for asked_for in (body(prompt_of(1008, seed=1)), body(prompt_of(1000, seed=1), max_tokens=100)):
            _, refused = await http.post(COMPLETIONS, asked_for)
            exchange, answer = await http.post(LOOKUP, {"url": COMPLETIONS, "body": asked_for})
            assert exchange.status == 400 and answer == refused
        await settle(client)


async def test_an_engine_that_dies_leaves_no_question_open(autojump_clock: trio.abc.Clock) -> None:
    """A question that the dead engine had received is a 503, and so is one while no engine serves; the next engine
    answers again."""
    async with small_runtime() as client:
        http, lookups = over_http(client), client.runtime.desk.sequences.lookups
        question = {"url": COMPLETIONS, "body": body(prompt_of(2 * BLOCK, seed=1))}

        def die(*_: object) -> None:
            raise RuntimeError("a pool cannot be trusted")

        setattr(client.engine.block_manager, "look_up", die)  # noqa: B010 - mypy lets no method be assigned
        for _ in range(2):
            exchange, answer = await http.post(LOOKUP, question)
            assert exchange.status == 503, answer
        assert len(lookups) == 0
        while not client.runtime.desk.health().is_ready:
            await trio.sleep(0.02)
        exchange, _ = await http.post(LOOKUP, question)
        assert exchange.status == 200


async def test_a_cancelled_look_up_leaves_nothing(autojump_clock: trio.abc.Clock) -> None:
    """Nothing of a cancelled look-up is kept, in the tokenizer or on its way to an engine."""
    async with small_runtime() as client:
        lookups = client.runtime.desk.sequences.lookups
        request: Encode = client.encode(prompt_of(2 * BLOCK, seed=1))
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.runtime.desk.look_up, request)
                await trio.lowlevel.checkpoint()
                scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        assert len(lookups) == 0 and client.runtime.desk.num_open_requests == 0
        (found,) = await client.runtime.desk.look_up(request)
        assert found.num_prompt_tokens == 2 * BLOCK
