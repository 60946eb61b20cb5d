"""`/v1/responses` with the official client, on a real model: the same text and usage as the chat endpoint."""

from __future__ import annotations

import json
import os
import re
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.prompts import VARIED, count, text_prompt
from tests.e2e.servers import PATIENCE_S, Server, eventually, full_blocks, serving, usage_of

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
ENDLESS = {"ignore_eos": True}


def messages_of(text: str) -> list[dict[str, str]]:
    """Return instructions and a question, which start with the test's own words, so no other test has cached them."""
    return [{"role": "system", "content": text[:40]}, {"role": "user", "content": text}]


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    arguments = {"instructions": text[:40], "max_output_tokens": 8, "extra_body": ENDLESS, **GREEDY, **fields}
    return client.responses.create(**{"input": text, **arguments})


def chat(client: openai.OpenAI, text: str) -> Any:
    return client.chat.completions.create(messages=messages_of(text), max_tokens=8, extra_body=ENDLESS, **GREEDY)


def as_chat_usage(usage: Any) -> dict[str, Any]:
    """Return all usage fields of a response under the names that chat completions use."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.input_tokens_details.cached_tokens,
        "cache_write_tokens": usage.input_tokens_details.cache_write_tokens,
        "reasoning_tokens": usage.output_tokens_details.reasoning_tokens,
    }


def chat_usage(answer: Any) -> dict[str, Any]:
    """Return the usage fields of a chat completion."""
    usage = usage_of(answer)
    prompt, completion = usage.pop("prompt_tokens_details"), usage.pop("completion_tokens_details")
    return usage | {
        "cached_tokens": prompt["cached_tokens"],
        "cache_write_tokens": prompt["cache_write_tokens"],
        "reasoning_tokens": completion["reasoning_tokens"],
    }


def test_counted_as_served(client: openai.OpenAI) -> None:
    """The count of a body is the input of its usage, tools and instructions included; nothing is cached by it."""
    tool: Any = {
        "type": "function", "name": "weather", "strict": False,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    }  # fmt: skip
    body: dict[str, Any] = {"input": text_prompt("counted", 60), "instructions": "Be brief.", "tools": [tool]}
    counted = client.responses.input_tokens.count(model="demo", **body)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(max_output_tokens=4, **GREEDY, **body).usage
    assert usage is not None and usage.input_tokens == counted.input_tokens > 60
    # other tests may have served the same tools, but nobody the text
    assert usage.input_tokens_details.cached_tokens < counted.input_tokens - 60
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(model="demo", input=5)
    assert refused.value.param == "input"
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(model="other", input="x")


@pytest.mark.parametrize("first", ["responses", "chat"])
def test_same_prompt_as_chat(client: openai.OpenAI, first: str) -> None:
    """One prompt gives the same text and usage on both endpoints, cold and warm, and each hits the other's cache."""
    text = text_prompt(f"{first} first", 70)
    asks = [lambda: ask(client, text), lambda: chat(client, text)]
    if first == "chat":
        asks.reverse()
    cold, warm = asks[0](), asks[1]()
    again = [each() for each in asks]
    numbers = [
        as_chat_usage(answer.usage) if answer.object == "response" else chat_usage(answer)
        for answer in (cold, warm, *again)
    ]
    num_prompt_tokens = numbers[0]["prompt_tokens"]
    assert numbers[0]["cached_tokens"] == 0 and numbers[0]["cache_write_tokens"] == full_blocks(num_prompt_tokens)
    assert numbers[1] == numbers[2] == numbers[3]
    assert numbers[1]["cached_tokens"] == full_blocks(num_prompt_tokens - 1) > 0
    assert numbers[1]["prompt_tokens"] == num_prompt_tokens > count(text)
    texts = {a.output_text if a.object == "response" else a.choices[0].message.content for a in (cold, warm, *again)}
    assert len(texts) == 1


def test_streamed_and_plain_agree(client: openai.OpenAI) -> None:
    """A warm prompt gets the same text and usage plain and streamed; only the last event has usage."""
    text = text_prompt("streamed response", 60)
    ask(client, text)
    plain = ask(client, text)
    assert plain.status == "incomplete" and plain.incomplete_details.reason == "max_output_tokens"
    assert plain.usage.output_tokens == 8 and plain.usage.input_tokens_details.cached_tokens > 0
    events = list(ask(client, text, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == plain.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.usage == plain.usage
    assert all(event.response.usage is None for event in events[:2])


def test_stream_helper(client: openai.OpenAI) -> None:
    """A response that ends with a stop string is complete, and the streaming helper's final response equals it."""
    text = text_prompt("helped response", 40)
    long = ask(client, text, max_output_tokens=24, extra_body={**ENDLESS, **VARIED}).output_text
    stop = long[len(long) // 2 :][:6]
    fields = {"max_output_tokens": 24, "extra_body": {**ENDLESS, **VARIED, "stop": [stop]}}
    plain = ask(client, text, **fields)
    assert plain.status == "completed" and plain.output_text == long[: long.index(stop)]
    with client.responses.stream(input=text, instructions=text[:40], **GREEDY, **fields) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == plain.output_text
    assert final.usage == plain.usage


def test_growing_conversation(client: openai.OpenAI) -> None:
    """History sent by the client hits the previous turn's cache, at least question and instructions."""
    text = text_prompt("growing response", 50)
    first = ask(client, text)
    history = [{"role": "user", "content": text}, *first.output, {"role": "user", "content": "and then?"}]
    second = ask(client, text, input=history)
    known = first.usage.input_tokens
    assert second.usage.input_tokens > known
    assert second.usage.input_tokens_details.cached_tokens >= full_blocks(known - 8)


def test_cache_salt_and_cache_key(client: openai.OpenAI) -> None:
    """A different `cache_salt` hits nothing; a different `prompt_cache_key` hits everything."""
    text = text_prompt("salted response", 50)
    ask(client, text, prompt_cache_key="one")
    keyed = ask(client, text, prompt_cache_key="two").usage.input_tokens_details
    salted = ask(client, text, extra_body={**ENDLESS, "cache_salt": "s"}).usage.input_tokens_details
    assert keyed.cached_tokens >= full_blocks(count(text)) and salted.cached_tokens == 0


def test_tool_history_is_rendered(client: openai.OpenAI) -> None:
    """Tool calls, their outputs and reasoning are rendered: each makes the prompt longer."""
    question = {"role": "user", "content": "What is in the list?"}
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "list.py"}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "returns a new object"}
    reasoning = {
        "type": "reasoning",
        "id": "r1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "sorts"}],
    }
    lengths = [
        ask(client, "tools", input=items, max_output_tokens=1).usage.input_tokens
        for items in ([question], [question, call], [question, call, output], [question, reasoning, call, output])
    ]
    counts = [count(call["arguments"]), count("returns a new object"), count("sorts")]
    assert all(after - before > least for (before, after), least in zip(pairwise(lengths), counts, strict=True))


def test_context_limit(client: openai.OpenAI) -> None:
    """A prompt that does not fit is rejected, streamed or not, with this API's name of the field."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, "too long", max_output_tokens=10**6, stream=stream)
        assert error.value.param == "max_output_tokens" and error.value.code == "context_length_exceeded"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the client has no type for a user's messages
def test_compacted_history(fake: Server) -> None:
    """A history that nearly fills the context is compacted; what it becomes is short, goes on, and is cached."""
    num_words = 16_400
    with fake.client() as client:
        for _ in range(3):
            history = [{"role": "user", "content": "word " * num_words}, {"role": "user", "content": "And then?"}]
            try:
                compacted: Any = client.responses.compact(model="demo", input=history)
            except openai.BadRequestError as error:
                found = re.search(r"prompt is too long: (\d+) tokens > (\d+)", error.message)
                assert found is not None
                num_words -= int(found[1]) - int(found[2])
        assert num_words < 16_400
        *kept, item = compacted.output
        assert [message.content[0].text for message in kept] == ["And then?"] and item.type == "compaction"
        later: Any = [*compacted.output, {"role": "user", "content": "Well?"}]
        answers = [client.responses.create(model="demo", input=later, max_output_tokens=1) for _ in range(2)]
    first, second = (answer.usage for answer in answers)
    assert second.input_tokens == first.input_tokens < compacted.usage.input_tokens // 10
    assert second.input_tokens_details.cached_tokens == full_blocks(second.input_tokens - 1)
    name = compacted.id.removeprefix("resp_")
    response = eventually(lambda: found if (found := fake.get(f"/v1/usage/{name}")).is_success else None, "a record")
    booked = response.json()
    assert (booked["endpoint"], booked["prompt_tokens"]) == ("/v1/responses/compact", compacted.usage.input_tokens)


def test_client_disconnects(fake: Server) -> None:
    """A client that disconnects in mid-stream has its account closed as cancelled and its blocks freed."""
    before = fake.wait_at_rest().get('requests_total{outcome="cancelled"}', 0)
    body = {"model": "demo", "input": "hi", "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{fake.url}/v1/responses", json=body, timeout=PATIENCE_S) as response:
        request_id = response.headers["X-Quipu-Request-Id"]
        assert any(line.startswith("event: response.output_text.delta") for line in response.iter_lines())
    metrics = fake.wait_at_rest()
    assert metrics['requests_total{outcome="cancelled"}'] == before + 1
    (line,) = eventually(
        lambda: [line for line in fake.events("request.done") if line["request_id"] == request_id], "its log line"
    )
    assert line["outcome"] == "cancelled" and line["cached_tokens"] == 0 and line["completion_tokens"] > 0


def test_engine_dies_mid_stream(tmp_path: Path) -> None:
    """The client raises; read without it, the stream ends with the failed response and its usage."""
    fields: dict[str, Any] = {"model": "demo", "input": "hi", "stream": True}
    flags = ["--executor", "fake", "--on-engine-death", "fail"]
    with serving(tmp_path, *flags) as server, server.client() as client:
        with httpx.stream("POST", f"{server.url}/v1/responses", json=fields | ENDLESS, timeout=PATIENCE_S) as raw:
            lines = raw.iter_lines()
            assert any("output_text.delta" in line for line in lines)
            stream = client.responses.create(**fields, extra_body=ENDLESS)
            assert any(event.type == "response.output_text.delta" for event in stream)
            os.kill(server.engine_pid(), signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine"):
                list(stream)
            events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
        response = events[-1]["response"]
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        assert response["status"] == "failed" and response["usage"]["output_tokens"] > 0
        assert response["output"][0]["content"][0]["text"]
        assert server.wait_at_rest()['requests_total{outcome="failed"}'] == 2
