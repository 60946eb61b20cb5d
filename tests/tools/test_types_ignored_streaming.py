"""Streamed arguments ignored the tool's schema: numbers became strings, strings of digits numbers."""

from __future__ import annotations

import json
from typing import Any

from tests.tools.readings import read_all
from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, scripted_model

PROPERTIES: dict[str, Any] = {
    "zip": {"type": "string"},
    "days": {"type": "integer"},
    "share": {"type": "number"},
    "is_metric": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object"},
    "note": {"type": ["string", "null"]},
    "unit": {"enum": ["C", "F"]},
    "wind": {"type": "integer"},
}
VALUES = {
    "zip": "0150",
    "days": "3",
    "share": "0.5",
    "is_metric": "true",
    "names": '["a", "b"]',
    "place": '{"lat": 1}',
    "note": "7",
    "unit": "C",
    "wind": "strong",
}
EXPECTED = {
    "zip": "0150",
    "days": 3,
    "share": 0.5,
    "is_metric": True,
    "names": ["a", "b"],
    "place": {"lat": 1},
    "note": "7",
    "unit": "C",
    "wind": "strong",
}


async def test_types_ignored_streaming() -> None:
    """Each value has the type that the schema says, streamed or not; one that is not of its type stays a string."""
    parameters = "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in VALUES.items())
    schema = {"type": "object", "properties": PROPERTIES}
    function = {"name": "report", "parameters": schema}
    tools = {
        CHAT: [{"type": "function", "function": function}],
        MESSAGES: [{"name": "report", "input_schema": schema}],
        RESPONSES: [{"type": "function", **function}],
    }
    output = f"<tool_call>\n<function=report>\n{parameters}\n</function>\n</tool_call>"
    async with scripted_model(output, tool_call_parser="qwen3_coder") as model:
        for name, reading in (await read_all(model, tools=tools)).items():
            ((called, arguments),) = reading.calls
            assert called == "report"
            assert json.loads(arguments) == EXPECTED, name
