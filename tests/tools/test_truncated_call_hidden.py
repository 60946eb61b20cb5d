"""A call that the token limit had cut looked finished: `finish_reason: "tool_calls"` with half its arguments."""

from __future__ import annotations

import pytest

from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, call, scripted_model

ARGUMENTS = '{"city": "Oslo", "days": 3}'


@pytest.mark.parametrize("num_missing", [1, 4, 8])
async def test_truncated_call_hidden(num_missing: int) -> None:
    """A call cut by the limit is shown as far as it got, and every API says that the limit was reached."""
    output = call(ARGUMENTS)
    async with scripted_model(output) as model:
        limit = len(model.tokens(output)) - 1 - num_missing  # the last token is the closing tag

        choice = (await model.ask(CHAT, max_tokens=limit))["choices"][0]
        assert choice["finish_reason"] == "length"
        arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
        assert ARGUMENTS.startswith(arguments)
        chunks = await model.stream(CHAT, max_tokens=limit)
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"

        assert (await model.ask(MESSAGES, max_tokens=limit))["stop_reason"] == "max_tokens"
        events = await model.stream(MESSAGES, max_tokens=limit)
        assert [e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta"] == ["max_tokens"]

        answer = await model.ask(RESPONSES, max_output_tokens=limit)
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = answer["output"]
        status = "completed" if arguments == ARGUMENTS else "incomplete"
        assert (item["type"], item["status"], item["arguments"]) == ("function_call", status, arguments)
        assert (await model.stream(RESPONSES, max_output_tokens=limit))[-1]["type"] == "response.incomplete"
