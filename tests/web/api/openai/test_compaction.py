"""Histories that are compacted: what the model is asked, what comes back, and how that is read again."""

from __future__ import annotations

from typing import Any

import attrs
import openai
import pytest
from openai.types.responses import ResponseCompactionItem

from quipu.actors.messages.handler import Closed, Delta
from quipu.actors.messages.images import ImageFormat
from quipu.actors.messages.outcomes import ErrorKind, FinishReason
from quipu.actors.messages.output import OutputFormat
from quipu.web.api.openai.compaction import INSTRUCTION, LEAST_SUMMARY_TOKENS, MAX_KEPT_BYTES, MAX_SUMMARY_TOKENS
from quipu.web.api.openai.responses_input import SUMMARY
from quipu.web.app import make_app
from quipu.web.options import AppOptions
from tests.web.api.openai.test_openai_client import client_of
from tests.web.asgi_client import Client
from tests.web.fakes import INFO, STARTED, FakeDesk, failure, record, scripted
from tests.web.stored import storing

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
"""The client has no type for the user's messages in an output, which OpenAI's documents show."""
PATH, COMPACT = "/v1/responses", "/v1/responses/compact"
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
USAGE = {
    "input_tokens": 40,
    "input_tokens_details": {"cached_tokens": 32, "cache_write_tokens": 0},
    "output_tokens": 3,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 43,
}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "a larch"},
    {"role": "assistant", "content": "seen"},
    {"role": "user", "content": [{"type": "input_text", "text": "t"}, {"type": "input_text", "text": "wo"}]},
]


def messages(desk: FakeDesk) -> list[dict[str, Any]]:
    """Return the messages of the last request."""
    (prompt,) = desk.tickets[-1].encode.prompts
    return list(prompt.messages)


def contents(desk: FakeDesk) -> list[str]:
    return [message["content"] for message in messages(desk)]


def desk_of(context: int = 4096, **output: Any) -> FakeDesk:
    """Return a desk whose model has a context that holds the messages of these tests."""
    return FakeDesk(info=attrs.evolve(INFO, max_model_len=context, output=OutputFormat(**output)))


async def refusal(app: Any, body: dict[str, Any], path: str = COMPACT) -> dict[str, Any]:
    exchange, answer = await Client(app).post(path, {"model": "tiny", **body})
    assert exchange.status == 400, answer
    error: dict[str, Any] = answer["error"]
    return error


async def test_model_is_asked_for_a_summary() -> None:
    """The history is read as for a response, with its tools; a message asks for a summary, which is bounded."""
    desk = desk_of()
    app = make_app(desk)
    fields = {"model": "tiny", "instructions": "be brief", "input": HISTORY, "tools": [TOOL]}
    await Client(app).post(PATH, fields)
    await Client(app).post(COMPACT, fields)
    responded, compacted = (ticket.encode for ticket in desk.tickets)
    (before,), (prompt,) = responded.prompts, compacted.prompts
    assert prompt.messages == (*before.messages, {"role": "user", "content": INSTRUCTION})
    assert (prompt.tools, prompt.template_kwargs, prompt.parts) == (before.tools, before.template_kwargs, before.parts)
    assert (compacted.max_tokens, compacted.least_room) == (MAX_SUMMARY_TOKENS, LEAST_SUMMARY_TOKENS)
    assert compacted.sampling.temperature == 0 and compacted.num_choices == 1
    assert compacted.output is not None and not compacted.output.tool_types, "a call is text, as no tool may be called"
    assert desk.tickets[-1].endpoint == COMPACT and desk.tickets[-1].num_leaves == 1


async def test_answer() -> None:
    """The output has the user's messages, and then one item with the summary; the usage is the record's."""
    exchange, answer = await Client(make_app(desk_of())).post(COMPACT, {"model": "tiny", "input": HISTORY})
    assert exchange.status == 200 and answer.keys() == {"id", "object", "created_at", "output", "usage"}
    assert (answer["id"], answer["object"]) == ("resp_r1", "response.compaction")
    *kept, item = answer["output"]
    assert [[part["text"] for part in message["content"]] for message in kept] == [["one"], ["t", "wo"]]
    assert {message["role"] for message in kept} == {"user"} and len({message["id"] for message in kept}) == 2
    assert item.keys() == {"id", "type", "encrypted_content"} and (item["id"], item["type"]) == ("cmp_r1", "compaction")
    assert "Hello" not in str(answer), "the summary is sealed"
    assert answer["usage"] == USAGE and exchange.headers.get("x-quipu-ignored-fields") is None


async def test_official_client_continues() -> None:
    """The output is an input of the official client: the same messages each time, the summary after those kept."""
    desk = desk_of()
    async with client_of(desk) as client:
        compacted = await client.responses.compact(model="tiny", input="one", instructions="be brief")
        assert compacted.object == "response.compaction" and compacted.usage.input_tokens_details.cached_tokens == 32
        item = compacted.output[-1]
        assert isinstance(item, ResponseCompactionItem) and not item.model_extra
        history: Any = [*compacted.output, {"role": "user", "content": "and?"}]
        for _ in range(2):
            await client.responses.create(model="tiny", input=history)
    assert contents(desk) == ["one", f"{SUMMARY}Hello", "and?"]
    assert [message["role"] for message in messages(desk)] == ["user", "assistant", "user"]
    assert desk.tickets[-1].encode.prompts == desk.tickets[-2].encode.prompts


async def test_compacted_again() -> None:
    """A summary of an earlier history is part of the next one: the model sees it, and the new item replaces it."""
    desk = desk_of()
    async with client_of(desk) as client:
        output: Any = (await client.responses.compact(model="tiny", input="one")).output
        desk.script = scripted(STARTED, Delta(0, "both", 1, FinishReason.STOP), Closed(record(), None))
        again: Any = (
            await client.responses.compact(model="tiny", input=[*output, {"role": "user", "content": "two"}])
        ).output
        assert contents(desk) == ["one", f"{SUMMARY}Hello", "two", INSTRUCTION]
        assert [item.type for item in again] == ["message", "message", "compaction"]
        await client.responses.create(model="tiny", input=again)
    assert contents(desk) == ["one", "two", f"{SUMMARY}both"]


async def test_oldest_messages_are_left_out() -> None:
    """The last user messages are kept, whole, as long as their bytes are at most half as many as tokens fit."""
    turns = [{"role": "user", "content": text} for text in ("old", "ä" * 4, "b" * 8, "")]
    for context, texts in ((32, ["ä" * 4, "b" * 8, ""]), (31, ["b" * 8, ""]), (38, ["old", "ä" * 4, "b" * 8, ""])):
        _, answer = await Client(make_app(desk_of(context))).post(COMPACT, {"model": "tiny", "input": turns})
        assert [message["content"][0]["text"] for message in answer["output"][:-1]] == texts


async def test_images_are_kept_with_their_message() -> None:
    """A message with images is kept whole like any other: each counts as its tokens, and its data is bounded too."""
    images = ImageFormat(placeholder=9, num_tokens=8, shorter_side=None, height=4, width=4, resample=3)
    shown = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    turns = [
        {"role": "user", "content": "old"},
        {"role": "user", "content": [{"type": "input_text", "text": "b"}, shown]},
        {"role": "user", "content": [{**shown, "detail": "low"}]},
    ]
    wanted = [["old"], ["b", shown["image_url"]], [shown["image_url"]]]
    for context, start in ((40, 0), (38, 1), (16, 2), (14, 3)):
        desk = desk_of(context)
        desk.info = attrs.evolve(desk.info, images=images)
        app = make_app(desk)
        _, answer = await Client(app).post(COMPACT, {"model": "tiny", "input": turns})
        *kept, _ = answer["output"]
        told = [[part.get("text", part.get("image_url")) for part in message["content"]] for message in kept]
        assert told == wanted[start:], context
        assert answer["usage"]["input_tokens_details"]["image_tokens"] == 16
        exchange, answer = await Client(app).post(PATH, {"model": "tiny", "input": kept or "again"})
        assert exchange.status == 200, answer
    large = {"type": "input_image", "image_url": f"data:image/png;base64,{'A' * MAX_KEPT_BYTES}"}
    body = {"model": "tiny", "input": [*turns, {"role": "user", "content": [large]}]}
    _, answer = await Client(app).post(COMPACT, body)
    assert [item["type"] for item in answer["output"]] == ["compaction"]


BROKEN = {
    "empty": lambda sealed: "",
    "not base64": lambda sealed: f"!{sealed[1:]}",
    "not ASCII": lambda sealed: f"ä{sealed[1:]}",
    "another version": lambda sealed: f"B{sealed[1:]}",
    "another nonce": lambda sealed: f"{sealed[:4]}{'A' if sealed[4] != 'A' else 'B'}{sealed[5:]}",
    "another text": lambda sealed: f"{sealed[:20]}{'A' if sealed[20] != 'A' else 'B'}{sealed[21:]}",
    "another tag": lambda sealed: f"{sealed[:-8]}{'A' if sealed[-8] != 'A' else 'B'}{sealed[-7:]}",
    "cut": lambda sealed: sealed[:-4],
    "only a version": lambda sealed: "AQ==",
    "longer": lambda sealed: f"{sealed}AAAA",
    "twice": lambda sealed: sealed * 2,
    "very long": lambda sealed: "A" * 10_000_000,
    "deeply nested": lambda sealed: [[[[{}]]]],
    "absent": lambda sealed: None,
}


async def test_what_cannot_be_read_is_refused() -> None:
    """A summary that is not as this server has sealed it is a 400 that names the field, wherever inputs are read."""
    app = make_app(desk_of(), AppOptions(max_body_bytes=20_000_000))
    _, answer = await Client(app).post(COMPACT, {"model": "tiny", "input": "one"})
    *_, item = answer["output"]
    sealed = item["encrypted_content"]
    for name, change in BROKEN.items():
        broken = {**item, "encrypted_content": change(sealed)}
        for path in (PATH, COMPACT, f"{PATH}/input_tokens"):
            error = await refusal(app, {"input": [{"role": "user", "content": "x"}, broken]}, path)
            assert error["param"] == "input[1].encrypted_content", name
    error = await refusal(make_app(desk_of()), {"input": [item]})
    assert (error["code"], error["param"]) == ("invalid_encrypted_content", "input[0].encrypted_content")
    exchange, _ = await Client(app).post(PATH, {"model": "tiny", "input": [{**item, "type": "compaction_summary"}]})
    assert exchange.status == 200, "agents know it by both names"


async def test_stored_and_continued(tmp_path: Any) -> None:
    """A stored history is compacted by its id; a stored response keeps the sealed item, which no other tenant opens."""
    async with storing(tmp_path, desk_of()) as stored:
        client, desk = stored.client, stored.desk
        first = await client.responses.create(model="tiny", input="one")
        compacted = await client.responses.compact(
            model="tiny", previous_response_id=first.id, input=[{"role": "user", "content": "two"}]
        )
        assert contents(desk) == ["one", "Hello", "two", INSTRUCTION]
        output: Any = compacted.output
        assert [item.type for item in output] == ["message", "message", "compaction"]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(compacted.id)
        second = await client.responses.create(model="tiny", input=output)
        await client.responses.create(model="tiny", input="three", previous_response_id=second.id)
        assert contents(desk) == ["one", "two", f"{SUMMARY}Hello", "Hello", "three"]
        listed: Any = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert listed[-1].encrypted_content == output[-1].encrypted_content
        await client.conversations.create(items=output)
        for call in (
            stored.other.responses.create(model="tiny", input=output),
            stored.other.conversations.create(items=output),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                await call
            assert str(refused.value.param).endswith("[2].encrypted_content")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"n": 2}, "n"),
    ({"max_output_tokens": 100}, "max_output_tokens"),
    ({"temperature": 0.5}, "temperature"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"store": True}, "store"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"prompt": "x"}, "prompt"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"guided_json": {}, "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"tools": [{"type": "function", "name": ""}]}, "tools[0].name"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
    ({"input": None}, "input"),
    ({"input": ""}, "input"),
    ({"input": []}, "input"),
    ({"input": [], "instructions": "be brief"}, "input"),
    ({"input": [{"type": "web_search_call"}]}, "input"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """What has no meaning for a summary, cannot be read, or leaves nothing to summarize is a 400 that names it."""
    assert (await refusal(make_app(desk_of()), {"input": "x", **fields}))["param"] == param


async def test_without_effect() -> None:
    """Values that ask for nothing are accepted, and fields that agents send along are named in the header at most."""
    nothing = {
        "stream": False,
        "store": False,
        "n": 1,
        "tool_choice": "auto",
        "temperature": 1,
        "truncation": "disabled",
    }
    nothing |= {"include_reasoning": True, "skip_special_tokens": True, "max_output_tokens": None}
    agents = {"parallel_tool_calls": True, "reasoning": {"effort": "low"}, "prompt_cache_key": "k", "service_tier": "x"}
    body = {"model": "tiny", "input": "x", **nothing, **agents, "text": {"verbosity": "low"}, "odd": 1}
    exchange, _ = await Client(make_app(desk_of())).post(COMPACT, body)
    assert exchange.status == 200
    assert exchange.headers["x-quipu-ignored-fields"] == "reasoning.effort,text,odd"


async def test_reasoning() -> None:
    """The model does not reason unless it is asked to, and then for half of the tokens at most."""
    switch = {"template_variables": frozenset({"enable_thinking"}), "reasoning_tags": ("<think>", "</think>")}
    for fields, expected in (({}, False), ({"reasoning": {"effort": "high"}}, True), ({"enable_thinking": True}, True)):
        desk = desk_of(**switch)
        exchange, _ = await Client(make_app(desk)).post(COMPACT, {"model": "tiny", "input": "x", **fields})
        (prompt,) = desk.ticket.encode.prompts
        assert prompt.template_kwargs == {"enable_thinking": expected}
        assert desk.ticket.encode.thinking_budget == MAX_SUMMARY_TOKENS // 2
        assert "x-quipu-ignored-fields" not in exchange.headers


async def test_no_summary() -> None:
    """A model that writes nothing, or white space alone, loses no history: the client gets an error."""
    desk = desk_of()
    desk.script = scripted(STARTED, Delta(0, " \n", 1, FinishReason.STOP), Closed(record(), None))
    error = await refusal(make_app(desk), {"input": "x"})
    assert (error["code"], error["param"]) == ("no_summary", "input")
    desk.script = scripted(failure(ErrorKind.INTERNAL))
    exchange, _ = await Client(make_app(desk)).post(COMPACT, {"model": "tiny", "input": "x"})
    assert exchange.status == 500
