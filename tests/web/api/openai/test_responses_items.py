"""Output items of `/v1/responses`: reasoning, messages and calls, whole and streamed."""

from __future__ import annotations

import json
import random
from typing import Any

import pydantic
import pytest
from openai import Omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent

from quipu.actors.messages.handler import Closed, Delta, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, OutputEvent, TextDelta
from quipu.web.api.generation import NamespacedTool, ReplyRules
from quipu.web.api.openai.responses_routes import read
from tests.web.fakes import STARTED, record
from tests.web.outputs import NAMES, SOME_CALL, deltas, draw_deltas, draw_output, parts_of, script
from tests.web.replies import reply_to, streamed, whole

BODY: dict[str, Any] = {"input": "hi"}
STREAM = {**BODY, "stream": True}
EVENT = pydantic.TypeAdapter(ResponseStreamEvent, config=pydantic.ConfigDict(defer_build=True))
OWN = {"store", "status", "frequency_penalty", "presence_penalty"}
"""In the response or in a custom tool's call, but not in the types of OpenAI's client."""
PATCH = "*** Begin Patch\n+\u2028é"
CUSTOM = ReplyRules(custom_tools=frozenset({"apply_patch"}))
BROKEN = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))


def call(name: str, *arguments: str, is_complete: bool = True) -> list[OutputEvent]:
    end = [CallEnd(0)] if is_complete else []
    return [CallBegin(0, name), *[ArgumentsDelta(0, piece) for piece in arguments], *end]


async def whole_response(events: list[OutletEvent], **changes: Any) -> dict[str, Any]:
    response: dict[str, Any] = whole(await reply_to(read, BODY, **changes), events)
    return response


async def streamed_events(events: list[OutletEvent], **changes: Any) -> list[dict[str, Any]]:
    """Return a stream's events, which are numbered without a gap."""
    told = streamed(await reply_to(read, STREAM, **changes), events)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    return told


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a stream, checking that its parts agree."""
    items: list[dict[str, Any]] = []
    text, is_open = "", False
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert not is_open and event["output_index"] == len(items)
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            text, is_open = "", True
            continue
        assert is_open and event["output_index"] == len(items) - 1
        if kind == "output_item.done":
            added, items[-1], is_open = items[-1], event["item"], False
            fixed = {"id", "type", "call_id", "name", "namespace", "role"}
            assert added.keys() == items[-1].keys()
            assert all(added[name] == items[-1][name] for name in fixed & added.keys())
            assert text_of(items[-1]) == text
            continue
        assert event["item_id"] == items[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.startswith("content_part"):
            assert event["part"]["text"] == text and event["content_index"] == 0
        else:
            assert kind.endswith(".done")
            assert event.get("text", event.get("arguments", event.get("input"))) == text
    assert not is_open
    return items


def text_of(item: dict[str, Any]) -> str:
    """Return what the model wrote into an item."""
    if "content" in item:
        return str(item["content"][0]["text"])
    return str(item["input" if item["type"] == "custom_tool_call" else "arguments"])


async def test_items_of_a_whole_response() -> None:
    """Items come in the order in which the model wrote them."""
    response = await whole_response(script(*SOME_CALL))
    reasoning, message, function_call = response["output"]
    assert reasoning == {
        "id": "rs_r1", "type": "reasoning", "status": "completed", "summary": [], "encrypted_content": None,
        "content": [{"type": "reasoning_text", "text": "Let me look."}],
    }  # fmt: skip
    assert (message["id"], message["content"][0]["text"]) == ("msg_r1_1", "I look.")
    assert function_call.pop("call_id").startswith("call_")
    assert function_call == {
        "id": "fc_r1_2", "type": "function_call", "status": "completed", "name": "get_weather",
        "arguments": '{"city": "Cusco"}',
    }  # fmt: skip
    assert response["status"] == "completed"


async def test_events_of_items() -> None:
    """Every item is added, filled and done before the next one; the last event has them all."""
    events = await streamed_events(script(*SOME_CALL))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert put_together(events) == events[-1]["response"]["output"]
    assert events[-1]["response"]["output"] == (await whole_response(script(*SOME_CALL)))["output"]


async def test_openai_types_know_every_field() -> None:
    """The client's types accept every event and the response strictly, and find no unknown field."""
    events = [*SOME_CALL, CallBegin(1, "apply_patch"), ArgumentsDelta(1, '{"input": "a"}'), CallEnd(1)]
    for event in await streamed_events(script(*events), rules=CUSTOM):
        assert not EVENT.validate_python(event, strict=True).model_extra
    response = await whole_response(script(*events), rules=CUSTOM)
    parsed = Response.model_validate(response, strict=True)
    assert set(parsed.model_extra or ()) <= OWN
    kinds = ["ResponseReasoningItem", "ResponseOutputMessage", "ResponseFunctionToolCall", "ResponseCustomToolCall"]
    assert [type(item).__name__ for item in parsed.output] == kinds
    assert all(set(item.model_extra or ()) <= OWN for item in parsed.output)


async def test_openai_client_puts_a_stream_together() -> None:
    """OpenAI's client makes of the events the items that are sent as a whole."""
    state = ResponseStreamState(input_tools=Omit(), text_format=Omit())
    for event in await streamed_events(script(*SOME_CALL)):
        state.handle_event(EVENT.validate_python(event))
    completed = state._completed_response  # noqa: SLF001 # what `get_final_response` returns
    assert completed is not None
    told: list[Any] = [item.to_dict() for item in completed.output]
    expected = (await whole_response(script(*SOME_CALL)))["output"]
    for put_together, item in zip(told, expected, strict=True):
        assert {**put_together, "content": None}.items() >= {**item, "content": None}.items()
        assert text_of(put_together) == text_of(item)


async def test_any_output_streamed_and_whole() -> None:
    """However an output is divided and wherever it ends, the stream's items are the response's."""
    namespaces = {"shell": NamespacedTool("functions", "sh")}
    for seed in range(120):
        rng = random.Random(seed)
        output = draw_output(rng)
        reason = rng.choice((FinishReason.STOP, FinishReason.LENGTH))
        events = [STARTED, *draw_deltas(rng, output), Delta(0, "", 1, reason), Closed(record(), None)]
        rules = ReplyRules(custom_tools=frozenset(rng.sample(NAMES, k=1)), namespaces=namespaces)
        changes: dict[str, Any] = {"include_reasoning": rng.random() < 0.7, "rules": rules}
        response = await whole_response(events, **changes)
        told = await streamed_events(events, **changes)
        assert put_together(told) == told[-1]["response"]["output"] == response["output"], seed
        parts = parts_of(output, with_reasoning=bool(changes["include_reasoning"]))
        texts = [text_of(item) for item in response["output"] if item["type"] != "custom_tool_call"]
        assert texts == [part.text for part in parts if part.name not in rules.custom_tools] or (parts, texts) == (
            [],
            [""],
        )
        is_cut = reason is FinishReason.LENGTH
        for number, (part, item) in enumerate(zip(parts, response["output"], strict=bool(parts))):
            is_last = number == len(parts) - 1
            is_completed = part.is_complete if part.kind == "call" else not (is_cut and is_last)
            assert (item["status"] == "completed") == is_completed
        assert response["status"] == ("incomplete" if is_cut else "completed")


async def test_failed_response_lists_its_items() -> None:
    """A stream that fails within a call lists what it had sent; only the cut item is incomplete."""
    events = await streamed_events([STARTED, *deltas(*SOME_CALL[:-2]), BROKEN])
    assert [event["type"] for event in events][-2:] == ["error", "response.failed"]
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed", "completed", "incomplete"]
    assert output[-1]["arguments"] == '{"city":'
    assert not any(event["type"] == "response.function_call_arguments.done" for event in events)


async def test_failed_response_counts_its_images() -> None:
    """The usage of a response that fails says how many of its tokens are images', as any other does."""
    for events in ([STARTED, BROKEN], [STARTED, *deltas(*SOME_CALL[:-2]), BROKEN]):
        told = (await streamed_events(events, image_tokens=16))[-1]["response"]["usage"]
        assert told["input_tokens_details"]["image_tokens"] == 16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (json.dumps({"input": PATCH}), PATCH),
        ('{"input": ""}', ""),
        ('{"input": "a"', '{"input": "a"'),
        ('{"input": "a", "b": 1}', '{"input": "a", "b": 1}'),
        ('{"input": 1}', '{"input": 1}'),
        ("", ""),
        ("ls -l", "ls -l"),
    ],
)
async def test_input_of_a_custom_tool(arguments: str, expected: str) -> None:
    """The text is taken out of its JSON; anything else that the model wrote is the input as it is."""
    played = script(*call("apply_patch", *arguments))
    (item,) = (await whole_response(played, rules=CUSTOM))["output"]
    assert item.pop("call_id").startswith("call_")
    assert item == {
        "id": "ctc_r1", "type": "custom_tool_call", "status": "completed", "name": "apply_patch", "input": expected
    }  # fmt: skip
    events = await streamed_events(played, rules=CUSTOM)
    (streamed_item,) = put_together(events)
    assert streamed_item["input"] == expected


async def test_tool_of_a_namespace() -> None:
    """A call of a namespace's tool has both names, as the client knows them; others have no namespace."""
    rules = ReplyRules(
        custom_tools=frozenset({"mcp__git__patch"}),
        namespaces={
            "mcp__git__log": NamespacedTool("mcp__git", "log"),
            "mcp__git__patch": NamespacedTool("mcp__git", "patch"),
        },
    )
    for name, expected in (("mcp__git__log", "log"), ("mcp__git__patch", "patch")):
        (item,) = (await whole_response(script(*call(name, "{}")), rules=rules))["output"]
        assert (item["name"], item["namespace"]) == (expected, "mcp__git")
        (item,) = put_together(await streamed_events(script(*call(name, "{}")), rules=rules))
        assert (item["name"], item["namespace"]) == (expected, "mcp__git")
    (item,) = (await whole_response(script(*call("shell", "{}")), rules=rules))["output"]
    assert "namespace" not in item


async def test_two_messages_have_two_ids() -> None:
    """Text after a call is a message of its own."""
    output = (await whole_response(script(TextDelta("a"), *call("f", "{}"), TextDelta("b"))))["output"]
    assert [item["id"] for item in output] == ["msg_r1", "fc_r1_1", "msg_r1_2"]


async def test_reasoning_tokens() -> None:
    """Usage has the reasoning tokens of the record."""
    end = Closed(record(reasoning_tokens=2), None)
    events = [STARTED, *deltas(*SOME_CALL), Delta(0, "", 1, FinishReason.STOP), end]
    response = await whole_response(events, include_reasoning=False)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert "Let me" not in str(await streamed_events(events, include_reasoning=False))
