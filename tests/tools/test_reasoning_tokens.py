"""Reasoning tokens: from the opening delimiter, if the model wrote it, up to and including the closing one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quipu.actors.messages.usage_record import UsageRecord
from tests.journals import KeptJournal
from tests.tools.scripted_model import CHAT, MESSAGES, RESPONSES, ScriptedModel, body, call, scripted_model

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
OUTPUTS = {
    "<think>\nOslo is a town.\n</think>\n\nIt rains.": "<think>\nOslo is a town.\n</think>",
    f"<think>\nOslo is a town.\n</think>\n\n{call()}": "<think>\nOslo is a town.\n</think>",
    "It rains.": "",
    "<think></think>It rains.": "<think></think>",
    "A <think> comes late.</think>": "<think> comes late.</think>",
}


class OpenJournal(KeptJournal):
    """Keeps records, and releases them at once."""

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        super().close(record, release)
        self.flush()


def counted(endpoint: str, usage: dict[str, Any]) -> tuple[int, int]:
    """Return the completion tokens and the reasoning tokens of an API's usage."""
    match endpoint:
        case "/v1/chat/completions":
            return usage["completion_tokens"], usage["completion_tokens_details"]["reasoning_tokens"]
        case "/v1/messages":
            return usage["output_tokens"], usage["output_tokens_details"]["thinking_tokens"]
        case _:
            return usage["output_tokens"], usage["output_tokens_details"]["reasoning_tokens"]


async def usages(model: ScriptedModel, **fields: Any) -> list[tuple[int, int]]:
    """Return the counts in the usage of each API for the same answer, whole and streamed."""
    found = []
    for endpoint in (CHAT, MESSAGES, RESPONSES):
        whole = await model.ask(endpoint, **THINKING, **fields)
        found.append(counted(endpoint, whole["usage"]))
        options = {"stream_options": {"include_usage": True}} if endpoint == CHAT else {}
        events = await model.stream(endpoint, **THINKING, **options, **fields)
        last = events[-1] if endpoint != MESSAGES else events[-2]
        found.append(counted(endpoint, last["response"]["usage"] if endpoint == RESPONSES else last["usage"]))
    return found


@pytest.mark.parametrize(("output", "reasoning"), OUTPUTS.items())
async def test_every_api_counts_the_same(output: str, reasoning: str) -> None:
    """Reasoning tokens include both delimiters; every API and the record have the same number."""
    journal = OpenJournal()
    async with scripted_model(output, journal=journal) as model:
        total, wanted = len(model.tokens(output)) + 1, len(model.tokens(reasoning))  # the end is a token, too
        assert await usages(model) == [(total, wanted)] * 6
    assert [(record.completion_tokens, record.reasoning_tokens) for record in journal.closed] == [(total, wanted)] * 6


async def test_cut_at_every_token() -> None:
    """An output that is cut within reasoning is reasoning; running usage never says more than there is."""
    output = "<think>\nOslo is a town.\n</think>\n\nIt rains."
    async with scripted_model(output) as model:
        most = len(model.tokens("<think>\nOslo is a town.\n</think>"))
        for limit in range(1, len(model.tokens(output)) + 1):
            options = {"include_usage": True, "continuous_usage_stats": True}
            chunks = await model.stream(CHAT, max_tokens=limit, stream_options=options, **THINKING)
            running = [counted(CHAT, chunk["usage"]) for chunk in chunks if chunk["usage"]]
            assert running == sorted(running)
            assert running[-1] == (limit, min(limit, most))


async def test_choices_are_summed() -> None:
    """With several choices, the number is the sum over them."""
    output = "<think>\nOslo is a town.\n</think>\n\nIt rains."
    async with scripted_model(output) as model:
        once = counted(CHAT, (await model.ask(CHAT, **THINKING))["usage"])
        three = counted(CHAT, (await model.ask(CHAT, n=3, **THINKING))["usage"])
        assert three == (3 * once[0], 3 * once[1])


async def test_a_prompt_that_has_opened_reasoning() -> None:
    """Only the model's own tokens count: not the opening delimiter that the prompt ends with."""
    output = "Oslo is a town.\n</think>\n\nIt rains."
    async with scripted_model(output) as model:
        request = body(CHAT, **THINKING)
        request["messages"] = [*request["messages"], {"role": "assistant", "content": "<think>\n"}]
        request |= {"continue_final_message": True, "add_generation_prompt": False}
        answer = await model.send(CHAT, request)
        told = answer.json()
        message = told["choices"][0]["message"]
        assert (message["reasoning_content"].strip(), message["content"]) == ("Oslo is a town.", "It rains.")
        assert counted(CHAT, told["usage"])[1] == len(model.tokens("Oslo is a town.\n</think>"))


async def test_a_message_without_reasoning_says_so() -> None:
    """Clients read the field of every message: it is null where the model could have thought, and did not."""
    async with scripted_model("It rains.") as model:
        message = (await model.ask(CHAT))["choices"][0]["message"]
        assert message["reasoning_content"] is None and message["reasoning"] is None
        message = (await model.ask(CHAT, include_reasoning=False))["choices"][0]["message"]
        assert "reasoning_content" not in message
    async with scripted_model("It rains.", reasoning_parser="none") as model:
        message = (await model.ask(CHAT))["choices"][0]["message"]
        assert "reasoning_content" not in message
