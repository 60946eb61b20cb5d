"""How much one body may contain: what agents really send is accepted, and errors name what exceeds a limit."""

from __future__ import annotations

from typing import Any

import pytest
import trio

from quipu.actors.messages.prompts import ChatPrompt
from quipu.web.api import pace
from quipu.web.api.json_structure import MAX_CHAT_VALUES
from quipu.web.app import make_app
from tests.web.asgi_client import Client
from tests.web.fakes import FakeDesk

MODEL = "org/tiny"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
LIMIT = {CHAT: "max_tokens", RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}


def body(path: str, messages: Any, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input" if path == RESPONSES else "messages": messages, LIMIT[path]: 4} | fields


def turns(path: str, count: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant") if path == MESSAGES else ("user",)
    return [{"role": roles[index % len(roles)], "content": "Hi."} for index in range(count)] + (
        [{"role": "user", "content": "Bye."}] if path == MESSAGES and count % 2 == 0 else []
    )


def parts(path: str, count: int) -> list[dict[str, Any]]:
    kind = "input_text" if path == RESPONSES else "text"
    return [{"role": "user", "content": [{"type": kind, "text": "x"}] * count}]


def tools(count: int, num_properties: int = 1) -> list[dict[str, Any]]:
    nested = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(num_properties)}}
    schema = {"type": "object", "properties": {"inner": nested}}
    return [{"name": f"tool{index}", "input_schema": schema} for index in range(count)]


async def post_body(path: str, sent: dict[str, Any]) -> tuple[int, str, FakeDesk]:
    """Return the status, the error's message, and the requests that reached the desk."""
    desk = FakeDesk()
    exchange, answer = await Client(make_app(desk)).post(path, sent)
    return exchange.status, answer.get("error", {}).get("message", "") if exchange.status != 200 else "", desk


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_long_conversations_are_accepted(path: str) -> None:
    """10,000 messages, or 10,000 parts, become one prompt with all of them."""
    status, _, desk = await post_body(path, body(path, turns(path, 10_000)))
    assert status == 200
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and len(prompt.messages) >= 10_000
    status, _, desk = await post_body(path, body(path, parts(path, 10_000)))
    assert status == 200
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and prompt.messages[-1]["content"] == "x" * 10_000


async def test_many_tools_are_accepted() -> None:
    """1,024 tools with a few properties each are accepted."""
    status, _, desk = await post_body(MESSAGES, body(MESSAGES, turns(MESSAGES, 1), tools=tools(1024, 20)))
    assert status == 200
    (prompt,) = desk.ticket.encode.prompts
    assert isinstance(prompt, ChatPrompt) and len(prompt.tools) == 1024


@pytest.mark.parametrize(
    ("path", "sent", "param"),
    [
        *[
            (path, turns(path, pace.MAX_MESSAGES + 1), param)
            for path, param in ((CHAT, "messages"), (RESPONSES, "input"))
        ],
        (MESSAGES, turns(MESSAGES, pace.MAX_MESSAGES + 1), "messages"),
        (CHAT, parts(CHAT, pace.MAX_PARTS) + parts(CHAT, 1), "messages[1].content"),
        (RESPONSES, parts(RESPONSES, pace.MAX_PARTS) + parts(RESPONSES, 1), "input[1].content"),
        (MESSAGES, parts(MESSAGES, pace.MAX_PARTS) + parts(MESSAGES, 1), "messages.1.content"),
    ],
)
async def test_too_many_are_refused_by_name(path: str, sent: list[Any], param: str) -> None:
    """One more than the limit is an error that names its field; no request is opened."""
    status, message, desk = await post_body(path, body(path, sent))
    assert status == 400
    assert f"`{param}`" in message and "at most 20000" in message
    assert not desk.tickets


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (tools(pace.MAX_TOOLS + 1), "tools"),
        (tools(2, pace.MAX_PROPERTIES), "tools.0.input_schema.properties"),
    ],
)
async def test_too_many_tools_and_properties(sent: list[Any], param: str) -> None:
    """Properties are counted however deep they are nested."""
    status, message, desk = await post_body(MESSAGES, body(MESSAGES, turns(MESSAGES, 1), tools=sent))
    assert status == 400
    assert f"`{param}`" in message
    assert not desk.tickets


async def test_properties_of_all_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """The properties of all tools together have a limit of their own, which the last tool may reach."""
    monkeypatch.setattr(pace, "MAX_ALL_PROPERTIES", 60)
    status, _, _ = await post_body(MESSAGES, body(MESSAGES, turns(MESSAGES, 1), tools=tools(6, 9)))
    assert status == 200
    status, message, _ = await post_body(MESSAGES, body(MESSAGES, turns(MESSAGES, 1), tools=tools(7, 9)))
    assert status == 400
    assert "`tools.6.input_schema.properties`" in message and "at most 60 properties in all tools together" in message


async def test_json_in_strings_counts() -> None:
    """JSON within a string counts like JSON around it."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" + "[]," * 60_000 + "[]]"}
    status, message, _ = await post_body(RESPONSES, body(RESPONSES, [call] * 5))
    assert status == 400
    assert "`input[4].arguments`" in message


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_chats_have_fewer_values_than_token_ids(path: str) -> None:
    """Half a million numbers are too many for a chat, but not for a completion's prompt."""
    numbers = [1] * (MAX_CHAT_VALUES + 1)
    status, message, _ = await post_body(path, body(path, turns(path, 1), x=numbers))
    assert status == 400 and f"{MAX_CHAT_VALUES} values" in message
    completion = {"model": MODEL, "prompt": "Hi.", "max_tokens": 1, "x": numbers}
    assert (await post_body("/v1/completions", completion))[0] == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["x"] * 20),
        ("logit_bias", {str(index): 1 for index in range(2000)}),
        ("bad_words", ["x"] * 300),
        ("chat_template_kwargs", {f"k{index}": 1 for index in range(300)}),
    ],
)
async def test_lists_are_counted_before_they_are_read(field: str, value: Any) -> None:
    """A list that is too long is refused by its length, whatever it contains."""
    status, message, _ = await post_body(CHAT, body(CHAT, turns(CHAT, 1), **{field: value}))
    assert status == 400
    assert f"`{field}`" in message and "at most" in message


async def test_reading_has_checkpoints() -> None:
    """Reading a long body lets other tasks run."""
    turns_of_others = 0

    async def others() -> None:
        nonlocal turns_of_others
        while True:
            await trio.lowlevel.checkpoint()
            turns_of_others += 1

    app = make_app(FakeDesk())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        before = turns_of_others
        await Client(app).post(MESSAGES, body(MESSAGES, turns(MESSAGES, 10_000)))
        assert turns_of_others - before > 10_000 / pace.ITEMS_A_TURN
        nursery.cancel_scope.cancel()


async def test_tools_of_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that come with items of the input count together; those that are known already do not count again."""
    monkeypatch.setattr(pace, "MAX_TOOLS", 6)

    def added(start: int, count: int) -> dict[str, Any]:
        named = [{"type": "function", "name": f"tool{start + index}"} for index in range(count)]
        return {"type": "additional_tools", "tools": named}

    repeated = [*turns(RESPONSES, 1), *[added(0, 4)] * 3, added(4, 2)]
    status, _, _ = await post_body(RESPONSES, body(RESPONSES, repeated))
    assert status == 200
    status, message, _ = await post_body(RESPONSES, body(RESPONSES, [*repeated, added(6, 1)]))
    assert status == 400
    assert "`input[5].tools[0].name`" in message and "at most 6 tools" in message
