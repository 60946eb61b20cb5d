"""Content blocks of `/v1/messages`: thinking, text and tool use, whole and streamed."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event

from quipu.actors.messages.handler import Closed, Delta, OutletEvent
from quipu.actors.messages.outcomes import ErrorKind, FinishReason, Outcome, RequestError
from quipu.actors.messages.output import ArgumentsDelta, CallBegin, CallEnd, Markup, OutputEvent, TextDelta
from quipu.web.api.anthropic.routes import read_message
from tests.web.fakes import STARTED, record
from tests.web.outputs import SOME_CALL, deltas, draw_deltas, draw_output, parts_of, script
from tests.web.replies import reply_to, streamed, whole, whole_bytes

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = {**BODY, "stream": True}
SOME_BLOCKS = [
    {"type": "thinking", "thinking": "Let me look."},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Cusco"}},
]


def call(*arguments: str, is_complete: bool = True) -> list[OutputEvent]:
    end = [CallEnd(0)] if is_complete else []
    return [CallBegin(0, "f"), *[ArgumentsDelta(0, piece) for piece in arguments], *end]


async def whole_message(events: list[OutletEvent], **changes: Any) -> dict[str, Any]:
    message: dict[str, Any] = whole(await reply_to(read_message, BODY, **changes), events)
    return message


async def streamed_events(events: list[OutletEvent], **changes: Any) -> list[dict[str, Any]]:
    return streamed(await reply_to(read_message, STREAM, **changes), events)


def put_together(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that a strict client makes of a stream; a tool's input is the text that was sent."""
    first, *middle, last_delta, stop = events
    assert (first["type"], last_delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[dict[str, Any]] = first["message"]["content"]
    is_open = False
    for event in middle:
        kind = event["type"].removeprefix("content_block_")
        if kind == "start":
            assert not is_open and event["index"] == len(blocks)
            blocks.append(dict(event["content_block"]))
            is_open = True
            if blocks[-1]["type"] == "tool_use":
                assert blocks[-1]["input"] == {}
                blocks[-1]["input"] = ""
            continue
        assert is_open and event["index"] == len(blocks) - 1
        block = blocks[-1]
        if kind == "stop":
            is_open = False
            assert block["type"] != "thinking" or block["signature"], "a signature must not be empty"
            continue
        delta = event["delta"]
        assert not block.get("signature"), "a signature must be last"
        field, expected = {
            "text_delta": ("text", "text"), "thinking_delta": ("thinking", "thinking"),
            "signature_delta": ("signature", "thinking"), "input_json_delta": ("partial_json", "tool_use"),
        }[delta["type"]]  # fmt: skip
        assert block["type"] == expected
        block["input" if field == "partial_json" else field] += delta[field]
    assert not is_open
    return {**first["message"], **last_delta["delta"]}


async def test_whole_message() -> None:
    """Blocks come in the order in which the model wrote them; arguments are an object."""
    message = await whole_message(script(*SOME_CALL))
    assert message["content"][0].pop("signature") and message["content"][2].pop("id").startswith("toolu_")
    assert message["content"] == SOME_BLOCKS
    assert message["stop_reason"] == "tool_use"


async def test_stream() -> None:
    """Each block is stopped before the next, and the first of a tool's deltas is empty."""
    events = await streamed_events(script(*SOME_CALL))
    told = [event.get("delta", event.get("content_block", {})).get("type", event["type"]) for event in events]
    assert told == [
        "message_start",
        "thinking", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop",
        "text", "text_delta", "content_block_stop",
        "tool_use", "input_json_delta", "input_json_delta", "input_json_delta", "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    pieces = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", ())]
    assert pieces == ["", '{"city":', ' "Cusco"}']


@pytest.mark.parametrize(
    "events", [SOME_CALL, SOME_CALL[:-2], SOME_CALL[:2], call()], ids=("whole", "cut", "thought", "bare")
)
async def test_anthropic_client_puts_a_stream_together(events: list[OutputEvent]) -> None:
    """Anthropic's client makes of a stream the message that is sent as a whole."""
    reason = FinishReason.STOP if isinstance(events[-1], CallEnd) else FinishReason.LENGTH
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in await streamed_events(script(*events, reason=reason)):
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=buffers)
    expected = await whole_message(script(*events, reason=reason))
    told = message.to_dict()
    if expected["content"][-1].get("input") == {"raw_arguments": '{"city":'}:
        expected["content"][-1]["input"] = {}  # the client completes what it parses
    assert told["content"] == expected["content"]
    assert told["stop_reason"] == expected["stop_reason"]


async def test_any_output_streamed_and_whole() -> None:
    """However an output is divided and wherever it ends, stream and whole message have the same blocks."""
    for seed in range(150):
        rng = random.Random(seed)
        output = draw_output(rng)
        reason, match = rng.choice(
            ((FinishReason.STOP, None), (FinishReason.STOP, "END"), (FinishReason.LENGTH, None))
        )  # fmt: skip
        events = [STARTED, *draw_deltas(rng, output), Delta(0, "", 1, reason, match), Closed(record(), None)]
        changes = {"include_reasoning": rng.random() < 0.7}
        message = await whole_message(events, **changes)
        told = put_together(await streamed_events(events, **changes))
        parts = parts_of(output, with_reasoning=changes["include_reasoning"])
        texts = [block.get("text", block.get("thinking", block.get("input"))) for block in told["content"]]
        assert texts == [part.text for part in parts] or (texts, parts) == ([""], [])
        for block in told["content"]:
            if block["type"] == "tool_use":
                block["input"] = as_object(block["input"])
        assert {**told, "usage": None} == {**message, "usage": None}, seed
        has_call = any(part.is_complete for part in parts)
        if reason is FinishReason.LENGTH:
            assert message["stop_reason"] == "max_tokens"
        else:
            assert (message["stop_reason"] == "tool_use") == has_call


def as_object(text: str) -> Any:
    """Return what the whole message has of arguments, decided by Python's parser."""
    try:
        value = json.loads(text or "{}")
    except json.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"raw_arguments": text}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "{}"),
        (' {"a": 1e400, "a": 12345678901234567890123}\n', '{"a": 1e400, "a": 12345678901234567890123}'),
        ('{"a": ', None),
        ('["a"]', None),
        ("{'a': 1}", None),
        ('{"a": 1}}', None),
        ('{"a": NaN}', None),
        ("\u00a0{}", None),
        ('{"a":' + "[" * 100_000, None),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_input_loses_nothing(arguments: str, expected: str | None) -> None:
    """An object's text is sent unchanged; anything else is the value of `raw_arguments`, character for character."""
    reply = await reply_to(read_message, BODY)
    if expected is None:
        assert whole(reply, script(*call(arguments)))["content"][0]["input"] == {"raw_arguments": arguments}
    else:
        assert b'"input":' + expected.encode() + b"}" in whole_bytes(reply, script(*call(arguments)))


async def test_white_space_before_a_call_is_text() -> None:
    """White space between a delimiter and a call is a text block like any other."""
    message = await whole_message(script(Markup("</think>"), TextDelta("\n\n"), *call("{}")))
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]


async def test_stop_string_after_a_call() -> None:
    """A complete call has to be carried out, also if a stop string ended the message."""
    events = [STARTED, *deltas(*call("{}")), Delta(0, "", 1, FinishReason.STOP, "END"), Closed(record(), None)]
    message = await whole_message(events)
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_failure_within_a_call() -> None:
    """A stream that fails within a call ends with an error, and does not pretend that the call is complete."""
    broken = Closed(record(outcome=Outcome.FAILED), RequestError(ErrorKind.INTERNAL, "engine died"))
    events = await streamed_events([STARTED, *deltas(*SOME_CALL[:-1]), broken])
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]


async def test_thinking_tokens() -> None:
    """Usage has the record's reasoning tokens, whole and streamed."""
    events = [
        STARTED,
        *deltas(*SOME_CALL),
        Delta(0, "", 1, FinishReason.STOP),
        Closed(record(reasoning_tokens=7), None),
    ]
    message, told = await whole_message(events), await streamed_events(events)
    assert told[-2]["usage"]["output_tokens_details"] == {"thinking_tokens": 7}
    assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 7}


async def test_short_ids() -> None:
    """Where the template accepts nothing else, ids have nine letters and digits."""
    message = whole(await reply_to(read_message, BODY, has_short_ids=True), script(*SOME_CALL))
    call_id = message["content"][2]["id"]
    assert len(call_id) == 9 and call_id.isalnum()
