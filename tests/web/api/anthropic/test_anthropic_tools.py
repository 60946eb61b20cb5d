"""Fields of the Messages API about calls and thinking, as they reach the desk."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from quipu.actors.messages.prompts import CacheTtl, ContentMark, Prompt, ToolMark
from quipu.web.app import make_app
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, body, text
from tests.web.asked import IGNORED, PLAIN, THINKING, Asked, ask
from tests.web.fakes import INFO, Client, FakeDesk

SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"type": "custom", "name": "time", "input_schema": {}}]
SERVED_BY_ANTHROPIC = {"type": "web_search_20250305", "name": "web_search"}
MARK = {"cache_control": {"type": "ephemeral"}}


async def asked(**fields: Any) -> Asked:
    return await ask(PATH, body(**fields))


async def test_what_may_be_called() -> None:
    """Every tool may be called, with arguments of its schema's types, unless `tool_choice` is none."""
    auto = await asked(tools=TOOLS)
    assert auto.encode.output is not None
    assert auto.encode.output.tool_types == {"weather": {"town": ("string",)}, "time": {}} and auto.max_calls is None
    none = await asked(tools=TOOLS, tool_choice={"type": "none"})
    assert none.callable_names == [] and none.prompt == auto.prompt
    single = await asked(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert single.max_calls == 1 and single.ignored is None
    assert (await asked()).callable_names == []


async def test_tools_of_anthropic() -> None:
    """Tools that Anthropic serves are skipped and named; a breakpoint at one is at the end of the tools before."""
    tools = [SERVED_BY_ANTHROPIC, TOOLS[0], {**SERVED_BY_ANTHROPIC, **MARK}, TOOLS[1]]
    skipping = await asked(tools=tools)
    plain = await asked(tools=TOOLS)
    assert skipping.prompt.tools == plain.prompt.tools and skipping.callable_names == ["weather", "time"]
    assert skipping.prompt.marks == (ToolMark(CacheTtl.FIVE_MINUTES, 0),)
    assert skipping.ignored == "tools.0,tools.2"
    alone = await asked(tools=[{**SERVED_BY_ANTHROPIC, **MARK}], system=[text("s", **MARK)])
    assert alone.prompt.tools == () and alone.prompt.marks == (ContentMark(CacheTtl.FIVE_MINUTES, 0, 1),)


@pytest.mark.parametrize(
    ("fields", "variables", "budget"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 1}}, {"enable_thinking": True}, 1),
        ({"thinking": {"type": "adaptive"}}, {"enable_thinking": True}, None),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}, None),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}, None),
    ],
)
async def test_thinking(fields: dict[str, Any], variables: dict[str, Any], budget: int | None) -> None:
    """Thinking becomes a variable of the template, and a budget; counting renders the same."""
    served = await ask(PATH, body(**fields), THINKING)
    assert served.prompt.template_kwargs == variables and served.encode.thinking_budget == budget
    assert served.ignored is None
    seen: list[Prompt] = []

    def counted(prompt: Prompt, param: str) -> int:
        seen.append(prompt)
        return 1

    desk = FakeDesk(info=attrs.evolve(INFO, output=THINKING), counted=counted)
    await Client(make_app(desk)).post(COUNT_PATH, body(**fields))
    assert seen == [served.prompt]


async def test_model_without_thinking() -> None:
    """Fields that such a model cannot honour are accepted and named, by both endpoints."""
    fields = {
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "high"},
        "context_management": {"edits": []},
    }
    named = "output_config.effort,thinking,thinking.budget_tokens,context_management"
    served = await ask(PATH, body(**fields), PLAIN)
    assert served.ignored == named and served.prompt.template_kwargs == {} and served.encode.thinking_budget is None
    exchange, _ = await Client(make_app(FakeDesk())).post(COUNT_PATH, body(**fields))
    assert exchange.status == 200 and exchange.headers[IGNORED] == named


@pytest.mark.parametrize("signature", [{}, {"signature": ""}, {"signature": "made by another server"}])
async def test_any_signature(signature: dict[str, str]) -> None:
    """Thinking of earlier turns is accepted whoever signed it."""
    thought = {"type": "thinking", "thinking": "hm", **signature}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [thought, text("a")]},
        {"role": "user", "content": "r"},
    ]
    served = await asked(messages=messages)
    assert served.prompt.messages[1] == {"role": "assistant", "content": "a", "reasoning_content": "hm"}
