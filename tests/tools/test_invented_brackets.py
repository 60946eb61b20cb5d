"""Brackets that the model had not written were sent, to complete JSON that was not complete."""

from __future__ import annotations

from tests.tools.readings import read_all
from tests.tools.scripted_model import CHAT, call, scripted_model

ARGUMENTS = '{"city": "Oslo", "days": 3}'


async def test_invented_brackets() -> None:
    """After any number of tokens, the arguments so far are a beginning of what the model writes."""
    output = call(ARGUMENTS)
    async with scripted_model(output) as model:
        seen = set()
        for limit in range(1, len(model.tokens(output)) + 2):
            message = (await model.ask(CHAT, max_tokens=limit))["choices"][0]["message"]
            for one in message.get("tool_calls") or ():
                assert ARGUMENTS.startswith(one["function"]["arguments"])
                seen.add(one["function"]["arguments"])
        assert ARGUMENTS in seen and len(seen) > 5


async def test_malformed_arguments_are_sent_as_written() -> None:
    """Arguments that are not JSON are neither repaired nor dropped."""
    malformed = '{"city": "Oslo", "days": }'
    async with scripted_model(call(malformed)) as model:
        readings = await read_all(model)
        for name in ("chat", "chat, streamed", "responses", "responses, deltas of the stream"):
            assert readings[name].calls == [("get_weather", malformed)], name
