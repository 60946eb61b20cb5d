"""OpenAI's cache fields: which parts of a prompt are marked, for how long, and which fields have no effect."""

from __future__ import annotations

from typing import Any

import pytest

from quipu.actors.messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
SHORT, LONG = CacheTtl.FIVE_MINUTES, CacheTtl.ONE_HOUR
MARK = {"prompt_cache_breakpoint": {"mode": "explicit"}}
EXPLICIT = {"mode": "explicit"}
TEXT_TYPE = {CHAT: "text", RESPONSES: "input_text"}


async def send(path: str, **fields: Any) -> tuple[FakeDesk, str | None]:
    """Return the desk of an accepted request, and the fields that the response names as ignored."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, {"model": "tiny", **fields})
    assert exchange.status == 200, answer
    return desk, exchange.headers.get("x-quipu-ignored-fields")


def said(path: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """Make two messages, the first with these parts."""
    content = [{"type": TEXT_TYPE[path], **part} for part in parts]
    messages = [{"role": "user", "content": content}, {"role": "user", "content": "end"}]
    return {"messages": messages} if path == CHAT else {"input": messages, "instructions": "Be brief."}


async def marks(path: str, *parts: dict[str, Any], **fields: Any) -> tuple[tuple[Any, ...], str | None]:
    """Return the marks of the prompt, as (ttl, message, characters); a response's instructions are message 0."""
    desk, ignored = await send(path, **said(path, *parts), **fields)
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt)
    offset = path == RESPONSES
    shown = [m for m in prompt.marks if isinstance(m, ContentMark)]
    assert len(shown) == len(prompt.marks)
    return tuple((mark.ttl, mark.message - offset, mark.num_chars) for mark in shown), ignored


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_breakpoint_is_at_the_end_of_its_part(path: str) -> None:
    """Breakpoints count in either mode; without a ttl they have the next one below OpenAI's half an hour."""
    for options in ({}, {"prompt_cache_options": EXPLICIT}, {"prompt_cache_options": {"mode": "implicit"}}):
        found = await marks(path, {"text": "one", **MARK}, {"text": "two"}, {"text": "three", **MARK}, **options)
        assert found == (((SHORT, 0, 3), (SHORT, 0, 11)), None)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "ttl"),
    [
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "5m"}}, SHORT),
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "30m"}}, SHORT),
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "3599s"}}, SHORT),
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "60m"}}, LONG),
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "12h"}}, LONG),
        ({"prompt_cache_options": EXPLICIT, "prompt_cache_retention": "24h"}, LONG),
        ({"prompt_cache_options": EXPLICIT, "prompt_cache_retention": "in_memory"}, SHORT),
    ],
)
async def test_a_ttl_becomes_the_next_shorter_one(path: str, fields: dict[str, Any], ttl: CacheTtl) -> None:
    """A ttl, or a retention in its place, is rounded down to one that is supported, but not below five minutes."""
    assert await marks(path, {"text": "one", **MARK}, **fields) == (((ttl, 0, 3),), None)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_a_breakpoint_may_have_a_ttl_of_its_own(path: str) -> None:
    """A breakpoint's own ttl takes precedence over that of the options."""
    own = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    options = {"prompt_cache_options": {**EXPLICIT, "ttl": "30m"}}
    found = await marks(path, {"text": "one", **own}, {"text": "two", **MARK}, **options)
    assert found == (((LONG, 0, 3), (SHORT, 0, 6)), None)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("fields", [{"prompt_cache_options": {"ttl": "1h"}}, {"prompt_cache_retention": "24h"}])
async def test_a_named_ttl_keeps_the_last_message_too(path: str, fields: dict[str, Any]) -> None:
    """A ttl sets OpenAI's implicit breakpoint; three explicit ones fit beside it, and earlier ones are named as
    ignored."""
    assert await marks(path, {"text": "one"}, **fields) == (((LONG, 1, 3),), None)
    parts = [{"text": str(index), **MARK} for index in range(4)]
    found, ignored = await marks(path, *parts, **fields)
    assert [place for _, *place in found] == [[0, 2], [0, 3], [0, 4], [1, 3]]
    assert ignored is not None and ignored.endswith("[0].content[0].prompt_cache_breakpoint")


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_the_last_four_count(path: str) -> None:
    """Of more than four breakpoints the last four count, and the others are named as ignored."""
    parts = [{"text": str(index), **MARK} for index in range(6)]
    found, ignored = await marks(path, *parts, prompt_cache_options=EXPLICIT)
    assert [place for _, *place in found] == [[0, 3], [0, 4], [0, 5], [0, 6]]
    assert ignored is not None and len(ignored.split(",")) == 2


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_what_has_no_effect_is_named(path: str) -> None:
    """A ttl without a breakpoint, a retention beside a ttl, and unsupported options are named as ignored."""
    for fields, ignored in (
        ({"prompt_cache_options": {**EXPLICIT, "ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": EXPLICIT, "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "5m"}, "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"comparison_response_id": "x"}}, "prompt_cache_options.comparison_response_id"),
        ({"prompt_cache_options": EXPLICIT}, None),
        ({"prompt_cache_options": {"mode": "implicit"}, "prompt_cache_retention": "in_memory"}, None),
    ):
        _, named = await marks(path, {"text": "one"}, **fields)
        assert named == ignored, fields


async def test_completions_have_no_parts() -> None:
    """A completion, whose prompt has no parts, ignores a ttl and names it."""
    desk, ignored = await send(COMPLETIONS, prompt="one", prompt_cache_options={"ttl": "1h"})
    assert ignored == "prompt_cache_options.ttl" and desk.ticket.encode.max_tokens != 0


async def test_reasoning_and_results_of_a_response() -> None:
    """The output of a call may have a breakpoint; that of a reasoning item, which is not content, is named."""
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm", **MARK}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "four", **MARK}]},
    ]
    desk, ignored = await send(RESPONSES, input=items)
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.marks == (ContentMark(SHORT, 1, 4),)
    assert ignored == "input[0].content[0].prompt_cache_breakpoint"


async def test_the_last_part_may_be_a_call() -> None:
    """The implicit breakpoint may be at the end of a call."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    desk, _ = await send(RESPONSES, input=[call], prompt_cache_options={"ttl": "1h"})
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.marks == (CallMark(LONG, 0, 0),)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_options": 1}, "prompt_cache_options"),
        ({"prompt_cache_options": {"mode": "none"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "1m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "0h"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": "long"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"ttl": 300}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ({"prompt_cache_retention": "7d"}, "prompt_cache_retention"),
    ],
)
async def test_bad_input(path: str, fields: dict[str, Any], param: str) -> None:
    """An invalid field is a 400 that names it; no request is opened."""
    desk = FakeDesk()
    request = {"model": "tiny", **said(path, {"text": "x"}), **fields}
    exchange, answer = await Client(make_app(desk)).post(path, request)
    assert (exchange.status, answer["error"]["param"]) == (400, param) and not desk.tickets


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize(
    ("value", "problem"),
    [(True, ""), ({}, ".mode"), ({"mode": "implicit"}, ".mode"), ({**EXPLICIT, "ttl": "x"}, ".ttl")],
)
async def test_bad_breakpoints(path: str, value: Any, problem: str) -> None:
    """An invalid breakpoint is a 400 that names it by its path."""
    request = {"model": "tiny", **said(path, {"text": "x", "prompt_cache_breakpoint": value})}
    exchange, answer = await Client(make_app(FakeDesk())).post(path, request)
    assert exchange.status == 400
    assert answer["error"]["param"].endswith(f"[0].content[0].prompt_cache_breakpoint{problem}")
