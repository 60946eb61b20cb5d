"""The first `input_json_delta` was lost, and indexes and ids of calls did not belong together."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tools.scripted_model import CHAT, CHAT_TOOLS, MESSAGES, MESSAGES_TOOLS, QUESTION, call, scripted_model

INPUTS: list[dict[str, Any]] = [{"city": "Oslo"}, {"city": "Rome", "days": 2}]
OUTPUT = "\n".join(["Two calls.", *(call(json.dumps(one)) for one in INPUTS)])


# The client drops its generators at [DONE], and trio warns about them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
async def test_openai_client() -> None:
    """OpenAI's client reads both calls from a stream, each with its own id, as from a whole answer."""
    fields: Any = {"model": "demo", "messages": QUESTION, "tools": CHAT_TOOLS, "max_tokens": 400}
    async with scripted_model(OUTPUT) as model, model.openai() as client:
        whole = (await client.chat.completions.create(**fields)).choices[0].message.tool_calls
        async with client.chat.completions.stream(**fields) as stream:
            async for _ in stream:
                pass
            final = (await stream.get_final_completion()).choices[0]
        assert final.finish_reason == "tool_calls"
        for calls in (whole, final.message.tool_calls):
            assert calls is not None
            assert [json.loads(one.function.arguments) for one in calls if one.type == "function"] == INPUTS
            assert len({one.id for one in calls}) == 2 and all(one.id for one in calls)


async def test_anthropic_client() -> None:
    """Anthropic's client reads both calls from a stream, each with its own id; the first delta of each is kept."""
    fields: Any = {"model": "demo", "messages": QUESTION, "tools": MESSAGES_TOOLS, "max_tokens": 400}
    async with scripted_model(OUTPUT) as model, model.anthropic() as client:
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == "tool_use"
            assert [block.input for block in calls] == INPUTS
            assert len({block.id for block in calls}) == 2


async def test_deltas_follow_their_start() -> None:
    """All of a call's characters come in deltas of its own block or index, the first of them included."""
    async with scripted_model(OUTPUT) as model:
        joined: dict[int, str] = {}
        for event in await model.stream(MESSAGES):
            if event.get("delta", {}).get("type") == "input_json_delta":
                joined[event["index"]] = joined.get(event["index"], "") + event["delta"]["partial_json"]
        assert list(map(json.loads, joined.values())) == INPUTS
        joined = {}
        for chunk in await model.stream(CHAT):
            for choice in chunk["choices"]:
                for one in choice["delta"].get("tool_calls") or ():
                    joined[one["index"]] = joined.get(one["index"], "") + one["function"]["arguments"]
        assert list(map(json.loads, joined.values())) == INPUTS
