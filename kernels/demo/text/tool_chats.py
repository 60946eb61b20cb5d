"""Chats in which the one fitting tool among four is called in the Hermes form, and its result is used in the answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from .chats import Chat, Message, assistant, system, user
from .small_talk import small_talk_turn
from .toolbox import OfferedTool, offer_tools


@dataclass(frozen=True)
class ToolTask:
    """A request that one of the offered tools fits, and the right call."""

    offered: list[OfferedTool]
    request: str
    name: str
    arguments: dict[str, Any]
    result: str
    answer: str

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the offered tools, for the request's `tools`."""
        return [tool.schema for tool in self.offered]


def draw_tool_task(random: Random, offered: list[OfferedTool] | None = None) -> ToolTask:
    """Draw a task for one of four tools, which stand in random order."""
    offered = offered or offer_tools(random)
    fitting = random.choice(offered)
    values = [parameter.draw(random) for parameter in fitting.tool.parameters]
    result = fitting.tool.result(random)
    return ToolTask(
        offered=offered,
        request=random.choice(fitting.tool.requests).format(*values),
        name=fitting.name,
        arguments=dict(zip(fitting.parameter_names, values, strict=True)),
        result=json.dumps({fitting.tool.result_key: result}),
        answer=fitting.tool.answer.format(*values, r=result),
    )


def tool_chat(random: Random) -> Chat:
    """Make a chat with one or two calls, or, in one of eight, a question that needs none of the tools."""
    thinking = random.random() < 0.15
    offered = offer_tools(random, random.choice((1, 2, 3, 4, 4, 4, 4, 4)))
    messages: list[Message] = []
    if random.random() < 0.3:
        messages.append(system(random.choice(("You are a helpful assistant.", "Use the tools where they help."))))
    if random.random() < 0.125:
        messages += small_talk_turn(random, thinking=thinking)
        return Chat("tool", messages, [tool.schema for tool in offered], thinking)
    for _ in range(random.choice((1, 1, 2))):
        task = draw_tool_task(random, offered)
        messages += [user(task.request), _call(task, thinking)]
        messages += [{"role": "tool", "content": task.result}, assistant(task.answer)]
        if thinking:
            messages[-1]["reasoning_content"] = "The tool has answered. I tell the result."
    if random.random() < 0.3:
        del messages[-2:]  # the chat ends with the call
    return Chat("tool", messages, [tool.schema for tool in offered], thinking)


def _call(task: ToolTask, thinking: bool) -> Message:
    message = assistant("", f"The tool {task.name} fits." if thinking else None)
    call = {"type": "function", "function": {"name": task.name, "arguments": task.arguments}}
    return message | {"tool_calls": [call]}
