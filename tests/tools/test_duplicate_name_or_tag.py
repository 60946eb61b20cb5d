"""Names were sent twice, and tags of the format leaked into arguments or text."""

from __future__ import annotations

from tests.tools.readings import Reading, read_all
from tests.tools.scripted_model import CHAT, call, scripted_model

CODER = """<tool_call>
<function=get_weather>
<parameter=city>
Oslo
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""


async def test_names_are_sent_once() -> None:
    """A stream has each call's name and id in exactly one chunk, and no tag anywhere."""
    async with scripted_model(f"I will look.\n{call()}\n{call()}") as model:
        chunks = await model.stream(CHAT)
        deltas = [
            one for chunk in chunks if chunk["choices"] for one in chunk["choices"][0]["delta"].get("tool_calls") or ()
        ]
        assert [one["index"] for one in deltas if "name" in one["function"]] == [0, 1]
        assert [one["index"] for one in deltas if "id" in one] == [0, 1]
        for name, reading in (await read_all(model)).items():
            assert reading.calls == [("get_weather", '{"city": "Oslo"}')] * 2, name
            assert reading.text.strip() == "I will look.", name


async def test_tags_do_not_leak() -> None:
    """No part of a tag of another format is in the arguments, which are JSON."""
    async with scripted_model(CODER, tool_call_parser="qwen3_coder") as model:
        for name, reading in (await read_all(model)).items():
            assert reading == Reading(calls=[("get_weather", '{"city": "Oslo", "days": 3}')]), name
