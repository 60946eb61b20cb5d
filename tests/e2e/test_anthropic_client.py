"""Anthropic's official client against a real server and model: every response must have the client's declared types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, Usage

from tests.e2e.prompts import text_prompt
from tests.e2e.servers import Server, full_blocks

USER = {"role": "user", "content": "What is tied into a quipu?"}


@pytest.fixture
def claude(tiny: Server) -> Iterator[anthropic.Anthropic]:
    """The official client, without retries and with strict type validation."""
    with tiny.anthropic_client() as client:
        yield client


def ask(**fields: Any) -> dict[str, Any]:
    """Return the arguments of a greedy request that ignores EOS."""
    extra = {"temperature": 0, "ignore_eos": True}
    return {"model": "demo", "max_tokens": 8, "messages": [USER], "extra_body": extra, **fields}


def total(usage: Usage) -> int:
    assert usage.cache_read_input_tokens is not None and usage.cache_creation_input_tokens is not None
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens


def text_of(message: Message) -> str:
    (block,) = message.content
    assert block.type == "text"
    return block.text


def test_message(claude: anthropic.Anthropic) -> None:
    """A plain response is fully typed, and the client finds the request id in its header."""
    message = claude.messages.create(**ask(metadata={"user_id": "u1"}))
    assert message.role == "assistant" and message.model == "demo" and text_of(message)
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 8 and message.usage.service_tier == "standard"
    assert message._request_id is not None and message.id == f"msg_{message._request_id}"


def test_streaming_helper(claude: anthropic.Anthropic) -> None:
    """The streamed text is the final message's, and the message equals that of a plain response, usage included."""
    arguments = ask(system=text_prompt("helper", 60))
    claude.messages.create(**arguments)
    whole = claude.messages.create(**arguments)
    with claude.messages.stream(**arguments) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 1 and "".join(pieces) == text_of(whole) == text_of(final)
    assert final.usage == whole.usage and final.stop_reason == whole.stop_reason
    assert whole.usage.cache_read_input_tokens == full_blocks(total(whole.usage) - 1) > 0


def test_events(claude: anthropic.Anthropic) -> None:
    """Events come in order; the first and the last usage each contain the whole prompt."""
    arguments = ask(
        system=[{"type": "text", "text": text_prompt("events", 60), "cache_control": {"type": "ephemeral"}}]
    )
    counted = claude.messages.count_tokens(model="demo", system=arguments["system"], messages=[USER]).input_tokens
    for warm in (False, True):
        events = list(claude.messages.create(**arguments, stream=True))
        kinds = [event.type for event in events if event.type != "content_block_delta"]
        assert kinds == [
            "message_start",
            "content_block_start",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        start, end = events[0], events[-2]
        assert start.type == "message_start" and end.type == "message_delta"
        assert total(start.message.usage) == counted
        assert start.message.usage.output_tokens <= 1 and end.usage.output_tokens == 8
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert getattr(start.message.usage, name) == getattr(end.usage, name)
        assert (end.usage.cache_read_input_tokens == 0) is not warm
        assert (end.usage.cache_creation_input_tokens == 0) is warm


def test_breakpoints_with_both_ttls(claude: anthropic.Anthropic) -> None:
    """Created cache tokens are split by requested ttl, tools and system before the messages."""
    hour, short = {"type": "ephemeral", "ttl": "1h"}, {"type": "ephemeral"}
    tool = {"name": "count", "description": text_prompt("tool", 30), "input_schema": {"type": "object"}}
    arguments = ask(
        tools=[{**tool, "cache_control": hour}],
        system=[{"type": "text", "text": text_prompt("both times", 40), "cache_control": hour}],
        messages=[{"role": "user", "content": [{"type": "text", "text": text_prompt("asked", 40)}]}],
        cache_control=short,
    )
    cold = claude.messages.create(**arguments).usage
    assert cold.cache_creation is not None
    assert cold.cache_creation.ephemeral_1h_input_tokens > 0 < cold.cache_creation.ephemeral_5m_input_tokens
    parts = cold.cache_creation.ephemeral_1h_input_tokens + cold.cache_creation.ephemeral_5m_input_tokens
    assert parts == cold.cache_creation_input_tokens
    warm = claude.messages.create(**arguments).usage
    assert warm.cache_creation_input_tokens == 0 and warm.cache_read_input_tokens == full_blocks(total(warm) - 1)
    assert total(cold) == total(warm)


def test_stop_sequences_and_prefill(claude: anthropic.Anthropic) -> None:
    """The matched stop string is named; a prefilled answer is continued."""
    said = text_of(claude.messages.create(**ask(max_tokens=12)))
    stop = said[len(said) // 2 :][:3]
    stopped = claude.messages.create(**ask(max_tokens=12, stop_sequences=[stop, "\x00"]))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped) == said[: said.index(stop)]
    begun = claude.messages.create(**ask(messages=[USER, {"role": "assistant", "content": said[:6].strip()}]))
    assert text_of(begun)


def test_tool_history(claude: anthropic.Anthropic) -> None:
    """Everything that the client sends back from an earlier turn is rendered: more history is more tokens."""
    history: list[Any] = [
        USER,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I need the count.", "signature": "s"},
                {"type": "text", "text": "Let me count."},
                {"type": "tool_use", "id": "toolu_1", "name": "count", "input": {"cords": 3}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Three."}]},
        {"role": "system", "content": "Answer in one word."},
    ]
    answer = claude.messages.create(**ask(messages=history, tool_choice={"type": "auto"}))
    counted = claude.messages.count_tokens(model="demo", messages=history)
    assert total(answer.usage) == counted.input_tokens
    shorter = claude.messages.count_tokens(model="demo", messages=history[:1])
    assert counted.input_tokens > shorter.input_tokens + 20
    back = claude.messages.create(**ask(messages=[USER, answer.to_param(), USER]))
    assert text_of(back)


def test_error_classes(claude: anthropic.Anthropic) -> None:
    """Each error raises the client's exception class and carries the request id."""
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(**ask(model="huge"))
    assert unknown.value.type == "not_found_error" and unknown.value.request_id is not None
    image: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.content\.0") as refused:
        claude.messages.create(**ask(messages=[{"role": "user", "content": [image]}]))
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        claude.messages.create(**ask(max_tokens=10**6))


def test_models(claude: anthropic.Anthropic) -> None:
    """Models are listed, and retrieved by name."""
    (model,) = list(claude.models.list())
    assert model.id == "demo" and claude.models.retrieve("demo") == model


def test_abandoned_stream(claude: anthropic.Anthropic, tiny: Server) -> None:
    """Closing a stream early is not an error, and the server comes to rest (checked by this folder's fixture)."""
    with claude.messages.stream(**ask(max_tokens=2000)) as stream:
        assert next(iter(stream)).type == "message_start"


def test_billing_header(tiny: Server) -> None:
    """Two sessions of Claude Code, whose first system block differs, share the rest of their prompts."""
    hits = []
    for cch in ("00a", "00b"):
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={cch};"}
        rest = {"type": "text", "text": text_prompt("billing", 80), "cache_control": {"type": "ephemeral"}}
        body = {"model": "demo", "max_tokens": 2, "system": [header, rest], "messages": [USER]}
        usage = tiny.post("/v1/messages?beta=true", body).json()["usage"]
        hits.append(usage["cache_read_input_tokens"])
    assert hits[0] == 0 < hits[1]
