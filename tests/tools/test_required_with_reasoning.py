"""`tool_choice: "required"` with a model that thinks gave a 500."""

from __future__ import annotations

from typing import Any

from tests.tools.readings import Reading, read_all
from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, body, call, scripted_model

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
FORCED: dict[str, list[Any]] = {
    CHAT: ["required", {"type": "function", "function": {"name": "get_weather"}}],
    MESSAGES: [{"type": "any"}, {"type": "tool", "name": "get_weather"}],
    RESPONSES: ["required", {"type": "function", "name": "get_weather"}],
}


async def test_required_with_reasoning() -> None:
    """A forced call is refused by name as long as it cannot be kept, with reasoning as without."""
    async with scripted_model(call()) as model:
        for endpoint, choices in FORCED.items():
            for choice in choices:
                for fields in ({}, THINKING):
                    refused = await model.send(endpoint, body(endpoint, tool_choice=choice, **fields))
                    assert refused.status_code == 400
                    assert "tool_choice" in refused.text


async def test_call_after_reasoning() -> None:
    """A call that follows reasoning is a call, and the reasoning is not part of it."""
    output = f"<think>\nI need the weather. <tool_call> is how I ask.\n</think>\n\n{call()}"
    async with scripted_model(output) as model:
        for name, reading in (await read_all(model, **THINKING)).items():
            assert reading.calls == [("get_weather", '{"city": "Oslo"}')], name
            assert reading.reasoning.strip() == "I need the weather. <tool_call> is how I ask.", name
            assert Reading(reading.text) == Reading(""), name
