"""What the official client gets from `/v1/responses`, on a real model: text and numbers of the chat endpoint."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from tests.e2e.prompts import count, text_prompt
from tests.e2e.servers import Server, eventually, full_blocks, usage_of

GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
ENDLESS = {"ignore_eos": True}


def messages_of(text: str) -> list[dict[str, str]]:
    """Instructions and question. Both begin with a test's own words: nobody else has warmed the cache for them."""
    return [{"role": "system", "content": text[:40]}, {"role": "user", "content": text}]


def ask(client: openai.OpenAI, text: str, **fields: Any) -> Any:
    arguments = {"instructions": text[:40], "max_output_tokens": 8, "extra_body": ENDLESS, **GREEDY, **fields}
    return client.responses.create(**{"input": text, **arguments})


def chat(client: openai.OpenAI, text: str) -> Any:
    return client.chat.completions.create(messages=messages_of(text), max_tokens=8, extra_body=ENDLESS, **GREEDY)


def in_words_of_chat(usage: Any) -> dict[str, Any]:
    """The numbers of a response, by the names that chat has for them; every one that the client's type has."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "cached_tokens": usage.input_tokens_details.cached_tokens,
        "cache_write_tokens": usage.input_tokens_details.cache_write_tokens,
        "reasoning_tokens": usage.output_tokens_details.reasoning_tokens,
    }


def flat(answer: Any) -> dict[str, Any]:
    """The same numbers of a chat completion."""
    usage = usage_of(answer)
    prompt, completion = usage.pop("prompt_tokens_details"), usage.pop("completion_tokens_details")
    return usage | {
        "cached_tokens": prompt["cached_tokens"],
        "cache_write_tokens": prompt["cache_write_tokens"],
        "reasoning_tokens": completion["reasoning_tokens"],
    }


@pytest.mark.parametrize("first", ["responses", "chat"])
def test_same_prompt_as_chat(client: openai.OpenAI, first: str) -> None:
    """One prompt through both endpoints: the same text, cold and warm the same numbers, and each hits the other's."""
    text = text_prompt(f"{first} first", 70)
    asks = [lambda: ask(client, text), lambda: chat(client, text)]
    if first == "chat":
        asks.reverse()
    cold, warm = asks[0](), asks[1]()
    again = [each() for each in asks]
    numbers = [
        in_words_of_chat(answer.usage) if answer.object == "response" else flat(answer)
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
    """A warm prompt gets the same text and usage whole and as events; only the last event has usage."""
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
    """A response that ends by a stop string is complete: the helper's final response is the plain one."""
    text = text_prompt("helped response", 40)
    long = ask(client, text, max_output_tokens=24).output_text
    stop = long[len(long) // 2 :][:6]
    fields = {"max_output_tokens": 24, "extra_body": {**ENDLESS, "stop": [stop]}}
    plain = ask(client, text, **fields)
    assert plain.status == "completed" and plain.output_text == long[: long.index(stop)]
    with client.responses.stream(input=text, instructions=text[:40], **GREEDY, **fields) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == snapshots[-1] == plain.output_text
    assert final.usage == plain.usage


def test_answer_grows_into_the_next_prompt(client: openai.OpenAI) -> None:
    """History kept by the client hits what the turn before left, question and instructions at the least."""
    text = text_prompt("growing response", 50)
    first = ask(client, text)
    history = [{"role": "user", "content": text}, *first.output, {"role": "user", "content": "and then?"}]
    second = ask(client, text, input=history)
    known = first.usage.input_tokens
    assert second.usage.input_tokens > known
    assert second.usage.input_tokens_details.cached_tokens >= full_blocks(known - 8)


def test_salts_part_and_keys_do_not(client: openai.OpenAI) -> None:
    """Another `cache_salt` finds nothing of what is there; another `prompt_cache_key` finds all of it."""
    text = text_prompt("salted response", 50)
    ask(client, text, prompt_cache_key="one")
    keyed = ask(client, text, prompt_cache_key="two").usage.input_tokens_details
    salted = ask(client, text, extra_body={**ENDLESS, "cache_salt": "s"}).usage.input_tokens_details
    assert keyed.cached_tokens >= full_blocks(count(text)) and salted.cached_tokens == 0


def test_context_is_the_limit(client: openai.OpenAI) -> None:
    """What does not fit is refused with a status of its own, streamed or not, naming the field in this API's words."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as error:
            ask(client, "too long", max_output_tokens=10**6, stream=stream)
        assert error.value.param == "max_output_tokens" and error.value.code == "context_length_exceeded"


def test_client_that_leaves(fake: Server) -> None:
    """A client that leaves in mid-stream has its account closed as cancelled, and its blocks freed."""
    before = fake.wait_at_rest().get('requests_total{outcome="cancelled"}', 0)
    body = {"model": "demo", "input": "hi", "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{fake.url}/v1/responses", json=body, timeout=20) as response:
        assert any(line.startswith("event: response.output_text.delta") for line in response.iter_lines())
    metrics = fake.wait_at_rest()
    assert metrics['requests_total{outcome="cancelled"}'] == before + 1
    (line,) = eventually(
        lambda: [line for line in fake.events("request.done") if line["endpoint"] == "/v1/responses"], "its log line"
    )
    assert line["outcome"] == "cancelled" and line["cached_tokens"] == 0 and line["completion_tokens"] > 0
