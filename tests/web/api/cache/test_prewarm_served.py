"""Prewarming over a whole runtime: what is answered, cached, pinned and recorded."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.kernels.fake import Dials
from tests.journals import KeptJournal
from tests.runtimes import BLOCK, engines_apart, kill_engine, small_runtime
from tests.traps.wire import over_http, samples, settle
from tests.web.api.anthropic.messages_api import parse_events as read_events
from tests.web.asgi_client import Client as HttpClient

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
PREWARM = {"prompt_cache_options": {"prewarm": True}}
LONG = "A quipu is a ledger of cords, and each of its knots is a number that somebody has counted. " * 3
SAID = [{"role": "user", "content": LONG}]
COMMON = {"model": "demo", "temperature": 0}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {**COMMON, "messages": SAID, "max_tokens": 4},
    COMPLETIONS: {**COMMON, "prompt": LONG, "max_tokens": 4},
    RESPONSES: {**COMMON, "input": LONG, "max_output_tokens": 4},
    MESSAGES: {**COMMON, "messages": SAID, "max_tokens": 4},
}


def prewarming(url: str) -> dict[str, Any]:
    return {**BODIES[url], **({"max_tokens": 0} if url == MESSAGES else PREWARM)}


def numbers(url: str, usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return the prompt's tokens, those cached, and those of the output."""
    if url == MESSAGES:
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached, usage["output_tokens"]
    if url == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]


def assert_empty(url: str, answer: dict[str, Any]) -> None:
    match url:
        case "/v1/chat/completions":
            (choice,) = answer["choices"]
            assert choice["message"]["content"] in ("", None) and choice["finish_reason"] == "length"
        case "/v1/completions":
            (choice,) = answer["choices"]
            assert choice["text"] == "" and choice["finish_reason"] == "length"
        case "/v1/responses":
            assert (answer["status"], answer["output"], answer["incomplete_details"]) == ("completed", [], None)
        case _:
            assert (answer["content"], answer["stop_reason"]) == ([], "max_tokens")


@pytest.mark.parametrize("is_apart", [False, True], ids=["one engine", "prefill and decode"])
@pytest.mark.parametrize("url", BODIES)
async def test_the_prompt_is_cached_and_nothing_is_generated(
    url: str, autojump_clock: trio.abc.Clock, *, is_apart: bool
) -> None:
    """The output is empty, with usage and a record; no token counts as generated; the next request hits. So it is with
    an engine for prompts and one for decoding: the prompt is cached where the next one is computed."""
    engines_apart.set(is_apart)
    journal = KeptJournal()
    async with small_runtime(journal=journal) as client:
        http = over_http(client)
        exchange, answer = await http.post(url, prewarming(url))
        assert exchange.status == 200, answer
        assert_empty(url, answer)
        num_prompt, cached, num_output = numbers(url, answer["usage"])
        assert num_prompt > 2 * BLOCK and (cached, num_output) == (0, 0)
        _, again = await http.post(url, prewarming(url))
        full = (num_prompt - 1) // BLOCK * BLOCK
        assert numbers(url, again["usage"]) == (num_prompt, full, 0)
        _, served = await http.post(url, BODIES[url])
        assert numbers(url, served["usage"]) == (num_prompt, full, 4)
        await settle(client)
        assert [(r.endpoint, r.prompt_tokens, r.cached_tokens, r.completion_tokens) for r in journal.closed] == [
            (url, num_prompt, 0, 0),
            (url, num_prompt, full, 0),
            (url, num_prompt, full, 4),
        ]
        generated = [value for name, value in samples(client).items() if name.startswith("generation_tokens_total")]
        assert sum(generated) == 4


async def test_no_token_is_drawn(autojump_clock: trio.abc.Clock) -> None:
    """No engine samples a token, whether a prompt is computed at once or in chunks, alone or beside others."""
    async with small_runtime(max_num_batched_tokens=64) as client:
        backend, drawn = client.engine.executor.backend, list[int]()
        step = backend.step

        def count(batch: Any) -> Any:
            done = step(batch)
            drawn.append(len(done.token_ids))
            return done

        setattr(backend, "step", count)  # noqa: B010 - mypy lets no method be assigned
        http = over_http(client)
        _, answer = await http.post(COMPLETIONS, {**prewarming(COMPLETIONS), "prompt": LONG * 3, "n": 2})
        assert len(drawn) > 2 and not any(drawn)
        assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(http.post, COMPLETIONS, {**COMMON, "prompt": LONG, "max_tokens": 30})
            for url in BODIES:
                nursery.start_soon(http.post, url, prewarming(url))
        assert sum(drawn) == 30
        await settle(client)


async def test_the_next_engine_goes_on(autojump_clock: trio.abc.Clock) -> None:
    """A prompt whose engine dies half way is computed by its successor."""
    async with small_runtime(Dials(step_seconds=1.0), max_num_batched_tokens=32) as client:
        http, answers = over_http(client), list[Any]()

        async def send() -> None:
            answers.append((await http.post(CHAT, prewarming(CHAT)))[1])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.sleep(1.5)
            kill_engine(client)
        (answer,) = answers
        assert_empty(CHAT, answer)
        _, again = await http.post(CHAT, prewarming(CHAT))
        num_prompt = numbers(CHAT, again["usage"])[0]
        assert numbers(CHAT, again["usage"]) == (num_prompt, (num_prompt - 1) // BLOCK * BLOCK, 0)
        await settle(client)


async def events(http: HttpClient, url: str) -> list[dict[str, Any]]:
    async with http.open("POST", url, {**prewarming(url), "stream": True}) as exchange:
        return [event for event in await exchange.chunks() if isinstance(event, dict)]


async def test_streams_end_at_once(autojump_clock: trio.abc.Clock) -> None:
    """A stream has its API's first and last events, and no text between them."""
    async with small_runtime() as client:
        http = over_http(client)
        for url in (CHAT, COMPLETIONS):
            chunks = await events(http, url)
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            choices = [chunk["choices"][0] for chunk in chunks]
            assert not any(choice.get("text") or choice.get("delta", {}).get("content") for choice in choices)
        async with http.open("POST", RESPONSES, {**prewarming(RESPONSES), "stream": True}) as exchange:
            await exchange.wait_started()
            responses = read_events(await exchange.read())
        assert [event["type"] for event in responses] == [
            "response.created",
            "response.in_progress",
            "response.completed",
        ]
        assert responses[-1]["response"]["output"] == []
        async with http.open("POST", MESSAGES, {**prewarming(MESSAGES), "stream": True}) as exchange:
            await exchange.wait_started()
            messages = read_events(await exchange.read())
        assert [event["type"] for event in messages] == ["message_start", "message_delta", "message_stop"]
        await settle(client)


async def test_breakpoints_pin(autojump_clock: trio.abc.Clock) -> None:
    """A prefix marked by OpenAI's fields is pinned as long as one marked by `cache_control`, and then released."""
    part = {"type": "text", "text": LONG, "prompt_cache_breakpoint": {"mode": "explicit"}}
    request = {**COMMON, "messages": [{"role": "user", "content": [part]}, *SAID], **PREWARM}
    request["prompt_cache_options"] = {"mode": "explicit", "ttl": "12h", "prewarm": True}
    async with small_runtime() as client:
        http, pins = over_http(client), client.engine.block_manager.pins
        await http.post(CHAT, request)
        (pin,) = pins.prefixes()
        assert pin.ttl_s == 3600 and 2 <= len(pin.blocks) < 10
        _, answer = await http.post("/v1/cache/lookup", {"url": CHAT, "body": request})
        assert answer["prompts"][0]["pinned_until"] is not None
        await trio.sleep(3601)
        _, answer = await http.post("/v1/cache/lookup", {"url": CHAT, "body": request})
        assert answer["prompts"][0]["pinned_until"] is None and answer["prompts"][0]["cached_tokens"] > 0


@pytest.mark.parametrize("field", [{"echo": True}, {"prompt_logprobs": 1}])
async def test_what_would_be_output_is_refused(field: dict[str, Any], autojump_clock: trio.abc.Clock) -> None:
    """Prewarming is refused together with fields that put the prompt into the output."""
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(COMPLETIONS, {**prewarming(COMPLETIONS), **field})
        assert exchange.status == 400 and answer["error"]["param"] == "prompt_cache_options.prewarm"


async def test_a_grammar_is_not_compiled(autojump_clock: trio.abc.Clock) -> None:
    """A request that is to be sent later with a format can be prewarmed unchanged."""
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    async with small_runtime() as client:
        exchange, answer = await over_http(client).post(CHAT, {**prewarming(CHAT), "response_format": schema})
        assert exchange.status == 200, answer
        assert_empty(CHAT, answer)
