"""Fields that are not read are named in a header of the response, whole or streamed; no other field is."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import attrs
import pytest
import trio

from quipu.web.api.body_field import Shape
from quipu.web.api.body_table import SHAPES
from quipu.web.api.fields import Fields
from quipu.web.api.ignored_fields import AND_MORE, MAX_HEADER_BYTES, MAX_NAMES, ignored_fields
from quipu.web.app import make_app
from quipu.web.request.request_context import IGNORED_FIELDS_HEADER
from tests.web.asgi_client import Client
from tests.web.asked import THINKING
from tests.web.fakes import INFO, FakeDesk

NAME = IGNORED_FIELDS_HEADER.lower()
MARK = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {"anything": 1}, **MARK}
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "x", "name": "n"},
            {"role": "assistant", "content": [{"type": "text", "text": "y"}], "reasoning_content": "r"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "z", "tool_call_id": "t"},
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "z"},
        ],
        "chat_template_kwargs": {"anything": 1},
        "documents": [{"anything": "x"}],
        "enable_thinking": True,
        "include_reasoning": True,
        "reasoning_effort": "low",
        "return_token_ids": True,
        "thinking_token_budget": 5,
        "logit_bias": {"3": 1},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "y"}], "summary": []},
            {
                "type": "function_call",
                "id": "i",
                "status": "completed",
                "call_id": "c",
                "name": "f",
                "arguments": "{}",
            },
            {"type": "function_call_output", "call_id": "c", "output": "z"},
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "namespace": "n", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"anything": 1}},
            {"type": "local_shell_call_output", "call_id": "c", "output": "x"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "x"},
        ],
        "client_metadata": {"anything": "x"},
        "enable_thinking": True,
        "include_reasoning": True,
        "reasoning": {"effort": "low", "summary": "auto", "generate_summary": None},
        "thinking_token_budget": 5,
        "metadata": {"anything": "x"},
        "text": {"format": {"type": "text"}},
    },
    "/v1/messages": {
        "max_tokens": 4,
        "system": [{"type": "text", "text": "s", **MARK}],
        "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object", "anything": 1}}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "s"}, CALL]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "x"},
                ],
            },
        ],
    },
}
PATHS = sorted(ENDPOINTS)


def desk() -> FakeDesk:
    """Make a desk whose model can do whatever a known field asks for."""
    return FakeDesk(info=attrs.evolve(INFO, output=THINKING))


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", **ENDPOINTS[path], **fields}


@pytest.mark.parametrize("path", PATHS)
async def test_every_field_read_is_in_shape(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field that a reader looks up is in its endpoint's shape."""
    read: set[str] = set()
    get = Fields.get

    def watched(self: Fields, name: str) -> Any:
        read.add(self.param(name))
        return get(self, name)

    monkeypatch.setattr(Fields, "get", watched)
    exchange, _ = await Client(make_app(desk())).post(path, body_of(path))
    assert exchange.status == 200
    assert NAME not in exchange.headers
    assert {"model", "stream", "temperature"} <= read
    for param in read:
        shape: Shape | None = SHAPES[path]
        for name in re.sub(r"\[\d+\]|\.\d+(?=\.|$)", "", param).split("."):
            assert shape is not None and name in shape.by_name, param
            shape = shape.objects.get(name) or shape.lists.get(name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_unknown_fields_are_named(path: str, stream: bool) -> None:
    """Unknown top-level fields are named in the header, streamed or not. Null means absent."""
    body = body_of(path, stream=stream, temprature=0.5, **{"größe, \n": 1, "nothing": None})
    async with Client(make_app(desk())).open("POST", path, body) as exchange:
        assert await exchange.wait_started() == 200
        assert exchange.headers[NAME] == "temprature,gr%C3%B6%C3%9Fe%2C%20%0A"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("/v1/completions", {"stream": True, "stream_options": {"foo": 1}}, ["stream_options.foo"]),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "user", "content": "x", "foo": 1},
                    {"role": "user", "content": [{"type": "text", "text": "x", "bar": 1}]},
                ]
            },
            ["messages[0].foo", "messages[1].content[0].bar"],
        ),
        (
            "/v1/responses",
            {"text": {"foo": 1}, "input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}]}]},
            ["text.foo", "input[0].content[0].a"],
        ),
        (
            "/v1/messages",
            {
                "metadata": {"user": "x"},
                "tools": [{"name": "f", "input_schema": {}, "strict": True}],
                "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": []}], "foo": 1}],
            },
            ["metadata.user", "messages.0.foo", "messages.0.content.0.citations", "tools.0.strict"],
        ),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x", "foo": 1}]}, ["messages.0.foo"]),
    ],
)
async def test_unknown_nested_fields(path: str, fields: dict[str, Any], named: list[str]) -> None:
    """Nested fields are named by the path that an error would have."""
    body = body_of(path.removesuffix("/count_tokens"), **fields)
    async with Client(make_app(desk())).open("POST", path, body) as exchange:
        assert await exchange.wait_started() == 200
        assert sorted(unquote(exchange.headers[NAME]).split(",")) == sorted(named)


async def test_unsupported_fields_are_still_refused() -> None:
    """A field that would change the response is a 400, not a header."""
    exchange, answer = await Client(make_app(desk())).post(
        "/v1/completions", body_of("/v1/completions", audio={"a": 1})
    )
    assert exchange.status == 400 and answer["error"]["code"] == "unsupported_parameter"


async def test_fields_without_effect_come_first() -> None:
    """Fields that are known but have no effect are named like unknown ones, within the same limits."""
    assert (await ignored_fields({"odd": 1}, SHAPES["/v1/chat/completions"], ["tools[0]"])).header() == "tools[0],odd"
    header = (
        await ignored_fields({}, SHAPES["/v1/chat/completions"], [f"tools[{index}]" for index in range(2_000)])
    ).header()
    assert header is not None and header.count(",") == MAX_NAMES and header.endswith(AND_MORE)


@pytest.mark.parametrize("stream", [False, True])
async def test_dropped_parts_of_schemas_are_named(stream: bool) -> None:
    """Keywords that the tokenizer drops from the schemas of tools are listed after the fields of the body."""
    dropping = FakeDesk(dropped=("tools[0].function.parameters#/properties/a, b/not", "x" * 2_000))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "odd": 1, "stream": stream}
    async with Client(make_app(dropping)).open("POST", "/v1/chat/completions", body) as exchange:
        await exchange.wait_started()
    assert exchange.headers[NAME] == f"odd,tools[0].function.parameters%23%2Fproperties%2Fa%2C%20b%2Fnot,{AND_MORE}"


@pytest.mark.parametrize(
    "body",
    [
        {f"field-{number}": 1 for number in range(100_000)},
        {"é" * 1000: 1},
        {"é" * 100_000: 1, "b": 1},
        {"messages": [{"x" * 100: 1}] * 20_000},
        {"messages": [{f"{number}": None for number in range(1000)}] * 100},
    ],
)
async def test_header_is_bounded(body: dict[str, Any]) -> None:
    """The header is bounded whatever the body contains, and says if there are more names."""
    header = (await ignored_fields(body, SHAPES["/v1/chat/completions"])).header()
    assert header is not None and header.isascii() and header.isprintable()
    assert len(header) <= MAX_HEADER_BYTES and header.count(",") <= MAX_NAMES
    assert header.rpartition(",")[2] == AND_MORE == "%E2%80%A6"


async def test_comparison_has_checkpoints() -> None:
    """Comparing a long body lets other tasks run."""
    num_rounds = 0

    async def count() -> None:
        nonlocal num_rounds
        while True:
            await trio.lowlevel.checkpoint()
            num_rounds += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        message = {"role": "user", "content": [{"type": "text", "text": "x"}]}
        assert (await ignored_fields({"messages": [message] * 10_000}, SHAPES["/v1/chat/completions"])).header() is None
        assert num_rounds > 50
        nursery.cancel_scope.cancel()
