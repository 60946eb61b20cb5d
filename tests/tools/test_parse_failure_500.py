"""An output that could not be parsed gave a 500, or an empty answer."""

from __future__ import annotations

import pytest

from tests.tools.readings import read_all
from tests.tools.scripted_model import call, scripted_model

MALFORMED = [
    "<tool_call>\nnot JSON at all\n</tool_call>",
    '<tool_call>\n{"name": "unknown_tool", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"arguments": {"city": "Oslo"}}\n</tool_call>',
    '<tool_call>\n["get_weather"]\n</tool_call>',
    "<tool_call><tool_call><tool_call>",
    "</tool_call>",
    '<tool_call>\n{"name": 7, "arguments": {}}\n</tool_call>',
    "<tool_call>\n" + "{" * 200,
]


@pytest.mark.parametrize("output", MALFORMED)
async def test_parse_failure_500(output: str) -> None:
    """What is not a call of one of the tools is the answer's text, whole, in every API."""
    async with scripted_model(output) as model:
        for name, reading in (await read_all(model)).items():
            assert reading.calls == [] and reading.text == output, name


@pytest.mark.parametrize(
    "arguments", ["", "[1, 2]", '"Oslo"', "{'city': 'Oslo'}", '{"city": ', "[" * 100, '{"a": 1}}}']
)
async def test_malformed_arguments(arguments: str) -> None:
    """Whatever follows a call's name, there is an answer with the call, and never an error."""
    async with scripted_model(call(arguments)) as model:
        for name, reading in (await read_all(model)).items():
            assert [called for called, _ in reading.calls] == ["get_weather"], name
