"""Arguments were not streamed: nothing came until the call was complete."""

from __future__ import annotations

from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, call, scripted_model

CITY = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogoch"


async def test_arguments_not_streamed() -> None:
    """Nearly every token of the arguments is an increment of its own, in every API."""
    output = call(f'{{"city": "{CITY}"}}')
    async with scripted_model(output) as model:
        least = len(model.tokens(CITY)) // 2
        chunks = await model.stream(CHAT)
        deltas = [
            one for chunk in chunks if chunk["choices"] for one in chunk["choices"][0]["delta"].get("tool_calls") or ()
        ]
        assert len([one for one in deltas if one["function"].get("arguments")]) >= least > 8
        events = await model.stream(MESSAGES)
        pieces = [
            event["delta"]["partial_json"]
            for event in events
            if event.get("delta", {}).get("type") == "input_json_delta"
        ]
        assert len([piece for piece in pieces if piece]) >= least
        events = await model.stream(RESPONSES)
        assert len([event for event in events if event["type"] == "response.function_call_arguments.delta"]) >= least


async def test_values_of_other_formats_are_streamed() -> None:
    """A text in a format that is not JSON is sent as it is written, too."""
    output = f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n</function>\n</tool_call>"
    async with scripted_model(output, tool_call_parser="qwen3_coder") as model:
        events = await model.stream(RESPONSES)
        deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
        assert len(deltas) >= len(model.tokens(CITY)) // 2
        assert "".join(deltas) == f'{{"city": "{CITY}"}}'
