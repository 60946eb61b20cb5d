"""The last piece of an output was lost: a call after one without arguments, or text that looked like a delimiter."""

from __future__ import annotations

import pytest

from tests.tools.readings import Reading, read_all
from tests.tools.scripted_model import call, scripted_model

CASES = {
    call("{}") + "\n" + call('{"city": "Oslo"}'): Reading(
        calls=[("get_weather", "{}"), ("get_weather", '{"city": "Oslo"}')]
    ),
    call() + "\n" + call("{}"): Reading(calls=[("get_weather", '{"city": "Oslo"}'), ("get_weather", "{}")]),
    "Is 1 < 2? Yes: <tool": Reading(text="Is 1 < 2? Yes: <tool"),
    "I say <": Reading(text="I say <"),
    "A thought </thin": Reading(text="A thought </thin"),
    "<tool_call>": Reading(text="<tool_call>"),
    '<tool_call>\n{"name": "get_wea': Reading(text='<tool_call>\n{"name": "get_wea'),
}


@pytest.mark.parametrize(("output", "expected"), CASES.items())
async def test_last_chunk_lost(output: str, expected: Reading) -> None:
    """Whatever an output ends with reaches the client, in every API, streamed or not."""
    async with scripted_model(output) as model:
        for name, reading in (await read_all(model)).items():
            assert reading == expected, name
