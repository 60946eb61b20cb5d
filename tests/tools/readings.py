"""What a client of each API reads in an answer, streamed or not: reasoning, text and calls."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import attrs

from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, ScriptedModel


@attrs.define
class Reading:
    """An answer's contents, whatever the API. Deltas are joined as the official clients do."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = attrs.field(factory=list)
    """Name and arguments of each call. Arguments that are an object in the API are written as JSON."""


def _chat_message(message: dict[str, Any]) -> Reading:
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls") or ()]
    return Reading(message["content"] or "", message.get("reasoning_content") or "", calls)


def _chat_chunks(chunks: Iterable[dict[str, Any]]) -> Reading:
    reading, ids = Reading(), set()
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            reading.text += delta.get("content") or ""
            reading.reasoning += delta.get("reasoning_content") or ""
            for one in delta.get("tool_calls") or ():
                if one["index"] == len(reading.calls):
                    reading.calls.append((one["function"]["name"], ""))
                    assert one["type"] == "function" and one["id"] not in ids
                    ids.add(one["id"])
                else:
                    assert one["index"] == len(reading.calls) - 1
                    assert one.get("id") is None and one["function"].get("name") is None
                name, arguments = reading.calls[-1]
                reading.calls[-1] = (name, arguments + one["function"]["arguments"])
    return reading


def _message(message: dict[str, Any]) -> Reading:
    reading = Reading()
    for block in message["content"]:
        match block["type"]:
            case "text":
                reading.text += block["text"]
            case "thinking":
                reading.reasoning += block["thinking"]
                assert block["signature"]
            case "tool_use":
                reading.calls.append((block["name"], json.dumps(block["input"])))
    return reading


def message_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Put the events of a streamed message together. Blocks must follow one another.

    Input that is not JSON is left as it is, for the test to compare.
    """
    content: list[dict[str, Any]] = []
    pieces: list[str] = []
    is_open = False
    last: dict[str, Any] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(content)
                content.append(event["content_block"])
                pieces, is_open = [], True
            case "content_block_delta":
                assert is_open and event["index"] == len(content) - 1
                block, delta = content[-1], event["delta"]
                match delta["type"]:
                    case "input_json_delta":
                        assert block["type"] == "tool_use"
                        pieces.append(delta["partial_json"])
                    case "signature_delta":
                        block["signature"] = delta["signature"]
                    case kind:
                        name = kind.removesuffix("_delta")
                        assert block["type"] == name
                        block[name] += delta[name]
            case "content_block_stop":
                assert is_open and event["index"] == len(content) - 1
                is_open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = _parsed("".join(pieces))
            case "message_delta":
                last = event["delta"]
    assert not is_open
    return {"content": content, **last}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _items(items: Iterable[dict[str, Any]]) -> Reading:
    reading = Reading()
    for item in items:
        match item["type"]:
            case "message":
                reading.text += "".join(part["text"] for part in item["content"])
            case "reasoning":
                reading.reasoning += "".join(part["text"] for part in item["content"])
            case "function_call":
                reading.calls.append((item["name"], item["arguments"]))
    return reading


def _response_deltas(events: Iterable[dict[str, Any]]) -> Reading:
    reading = Reading()
    for event in events:
        match event["type"]:
            case "response.output_text.delta":
                reading.text += event["delta"]
            case "response.reasoning_text.delta":
                reading.reasoning += event["delta"]
            case "response.output_item.added" if event["item"]["type"] == "function_call":
                reading.calls.append((event["item"]["name"], ""))
            case "response.function_call_arguments.delta":
                name, arguments = reading.calls[-1]
                reading.calls[-1] = (name, arguments + event["delta"])
    return reading


async def read_all(model: ScriptedModel, **fields: Any) -> dict[str, Reading]:
    """Ask for the same answer in each API, whole and streamed, and return what a client of each reads."""
    messages = await model.stream(MESSAGES, **fields)
    responses = await model.stream(RESPONSES, **fields)
    done = [event["item"] for event in responses if event["type"] == "response.output_item.done"]
    return {
        "chat": _chat_message((await model.ask(CHAT, **fields))["choices"][0]["message"]),
        "chat, streamed": _chat_chunks(await model.stream(CHAT, **fields)),
        "messages": _message(await model.ask(MESSAGES, **fields)),
        "messages, streamed": _message(message_of(messages)),
        "responses": _items((await model.ask(RESPONSES, **fields))["output"]),
        "responses, items of the stream": _items(done),
        "responses, deltas of the stream": _response_deltas(responses),
    }
