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
MAX_TOKENS = 100
"""Enough for each of the outputs; one that the grammar turns into something else may never end."""
OUTPUTS = [call(), f"<think>\nHm.\n</think>\n\n{call()}", "<think>\nHm.", "No.", "<tool_call>\n{", call(name="other")]


async def test_required_with_reasoning() -> None:
    """Whatever a model writes, thinking or not, a request that forces a call is answered, never with a 5xx."""
    async with scripted_model(call()) as model:
        for output in OUTPUTS:
            model.says(output)
            for endpoint, choices in FORCED.items():
                limit = {"max_output_tokens" if endpoint == RESPONSES else "max_tokens": MAX_TOKENS}
                for choice in choices:
                    for fields in ({}, THINKING):
                        answer = await model.send(endpoint, body(endpoint, tool_choice=choice, **limit, **fields))
                        assert answer.status_code == 200, answer.text
                        assert output != call() or '"get_weather"' in answer.text


async def test_call_after_reasoning() -> None:
    """A call that follows reasoning is a call, and the reasoning is not part of it."""
    output = f"<think>\nI need the weather. <tool_call> is how I ask.\n</think>\n\n{call()}"
    async with scripted_model(output) as model:
        for name, reading in (await read_all(model, **THINKING)).items():
            assert reading.calls == [("get_weather", '{"city": "Oslo"}')], name
            assert reading.reasoning.strip() == "I need the weather. <tool_call> is how I ask.", name
            assert Reading(reading.text) == Reading(""), name
