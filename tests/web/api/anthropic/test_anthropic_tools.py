"""Fields of the Messages API about calls and thinking, as they reach the desk."""

from __future__ import annotations

import json
from typing import Any, get_type_hints

import attrs
import pytest
from anthropic.types.beta.beta_tool_change_tool_reference_param import BetaToolChangeToolReferenceParam

from quipu.actors.messages.prompts import CacheTtl, ContentMark, Prompt, ToolMark
from quipu.web.app import make_app
from tests.web.api.anthropic.messages_api import COUNT_PATH, PATH, body, text
from tests.web.asgi_client import Client
from tests.web.asked import IGNORED, PLAIN, THINKING, Asked, ask, refused
from tests.web.fakes import INFO, FakeDesk

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


SEARCH = {"name": "search", "input_schema": {}}
DEFERRED = {"name": "weather", "description": "Tell it.", "input_schema": SCHEMA, "defer_loading": True}
SHOWN = {"type": "function", "function": {"name": "weather", "description": "Tell it.", "parameters": SCHEMA}}
FOUND = {"type": "tool_reference", "tool_name": "weather"}


def searched(*found: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation in which a search for tools had this result."""
    call = {"type": "tool_use", "id": "t", "name": "search", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": list(found), **MARK}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]


async def test_deferred_tools() -> None:
    """A deferred tool is shown where a search has found it, and not before: what precedes that stays as it was."""
    before = await asked(tools=[SEARCH], messages=searched()[:1])
    hidden = await asked(tools=[SEARCH, DEFERRED], messages=searched()[:1])
    assert hidden.prompt == before.prompt and hidden.ignored is None
    found = await asked(tools=[DEFERRED, SEARCH], messages=searched(text("Found:"), FOUND, FOUND))
    assert found.prompt.tools == before.prompt.tools and found.ignored is None
    told = found.prompt.messages[2]["content"]
    first, definition, again = told.split("\n")
    assert (first, json.loads(definition), again) == ("Found:", SHOWN, "weather")
    assert found.prompt.marks == (ContentMark(CacheTtl.FIVE_MINUTES, 2, len(told)),)
    assert found.callable_names == ["weather", "search"]


@pytest.mark.parametrize("role", ["user", "system", "assistant"])
@pytest.mark.parametrize("name", ["name", "tool_name"])
async def test_added_tools(role: str, name: str) -> None:
    """A deferred tool that a message adds is shown there. Its reference has a `name`, unlike the result of a search."""
    assert {"name", "type"} == get_type_hints(BetaToolChangeToolReferenceParam).keys()
    tool = {"type": "tool_reference", name: "weather"}
    added = {"role": role, "content": [text("New:"), {"type": "tool_addition", "tool": tool}]}
    messages = [{"role": "user", "content": "q"}, added, {"role": "user", "content": "r"}]
    told = await asked(tools=[SEARCH, DEFERRED], messages=messages)
    assert told.ignored is None
    (said,) = [one["content"] for one in told.prompt.messages if "New:" in one["content"]]
    assert json.dumps(SHOWN, separators=(",", ":")) in said.split("\n")


async def test_added_tools_of_servers() -> None:
    """A tool of a server of MCP, which is not reached from here, is no deferred tool of the same name."""
    tool = {"type": "mcp_tool_reference", "server_name": "s", "name": "weather"}
    messages = [{"role": "user", "content": [text("q"), {"type": "tool_addition", "tool": tool}]}]
    told = await asked(tools=[SEARCH, DEFERRED], messages=messages)
    assert told.prompt.messages[0]["content"] == "q" and told.ignored == "messages.0.content.1"


async def test_references_to_other_tools() -> None:
    """A reference to a tool that is shown, or that nobody has sent, says nothing and is named."""
    plain = {name: value for name, value in DEFERRED.items() if name != "defer_loading"}
    for tools in ([SEARCH, plain], [SEARCH]):
        told = await asked(tools=tools, messages=searched(FOUND))
        assert told.prompt.messages[2]["content"] == "" and told.ignored == "messages.2.content.0.content.0"


async def test_search_of_anthropic() -> None:
    """Beside Anthropic's own search, which finds nothing here, deferred tools are shown like all others."""
    by_servers = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    told = await asked(tools=[by_servers, DEFERRED], messages=[{"role": "user", "content": "q"}])
    assert told.prompt.tools == (SHOWN,) and told.ignored == "tools.0,tools.1.defer_loading"


async def test_only_deferred_tools() -> None:
    """A request whose tools are all deferred, so that nothing finds them, is refused."""
    assert (await refused(PATH, body(tools=[DEFERRED])))[1].startswith("Invalid value for `tools.0.defer_loading`")
