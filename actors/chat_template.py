"""A checkpoint's chat template: from a chat to the text of its prompt, and where a client's marks lie in that text.

Used by `vocabulary.py`. Templates differ in what they know: a template that never looks at `tools`, `tool_calls` or
`reasoning_content` would drop them silently, so a chat that has them is put into plain text first (`_plain_calls` and
its neighbours).

A mark's place is found without knowing the template: the chat is rendered once more with something added right after
the marked block, and the place is where that rendering begins to differ from the plain one.

What must always hold: marks never change the text; their places do not decrease.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from quipu.actors.messages import CallMark, ChatPrompt, ContentMark, Mark, ToolMark

Message = Mapping[str, Any]

_END = "\ufdd0"
_MARK = "\ufdd1"
"""Noncharacters: text never has them, and no template treats them specially."""


class TemplateError(ValueError):
    """The chat template refused the messages, or there is none; the message is for the client."""


@attrs.frozen
class RenderedChat:
    text: str
    mark_ends: tuple[int, ...]
    """Characters before each mark, in the order of the marks; 0 where the template left no trace of it."""


class ChatTemplate:
    """One compiled template. Raises jinja2.TemplateError where the source is none."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: the special tokens by their names."""
        environment = _environment()
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._variables = dict(variables)
        self._names = _names_in(tree)

    def render(self, chat: ChatPrompt) -> RenderedChat:
        """The prompt's text. Raises TemplateError."""
        text = self._text(chat)
        ends: list[int] = []
        for mark in chat.marks:
            end = self._end_of(mark, chat, text)
            if chat.tools and isinstance(mark, ContentMark) and chat.messages[mark.message]["role"] == "system":
                # Tools come before the system prompt, whichever of them the template puts first.
                end = max(end, self._end_of(ToolMark(mark.ttl, len(chat.tools) - 1), chat, text))
            ends.append(max(end, ends[-1]) if ends else end)
        return RenderedChat(text, tuple(ends))

    def _end_of(self, mark: Mark, chat: ChatPrompt, text: str) -> int:
        """Characters of `text` before `mark`."""
        for marked in _with_mark(mark, chat):
            changed = self._text(marked)
            if changed != text:
                return _common_prefix(text, changed)
        return 0

    def _text(self, chat: ChatPrompt) -> str:
        messages, tools = chat.messages, chat.tools
        if chat.continue_final:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END})
        if "tool_calls" not in self._names and any(message.get("tool_calls") for message in messages):
            messages = _plain_calls(messages)
        if "reasoning_content" not in self._names:
            messages = tuple(map(_plain_reasoning, messages))
        if tools and "tools" not in self._names:
            messages, tools = _plain_tools(messages, tools), ()
        try:
            text = self._template.render(
                messages=messages,
                add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
                **({"tools": tools} if tools else {}),
                **{**self._variables, **chat.template_kwargs},
            )
        except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
            raise TemplateError(f"the chat template refuses these messages: {error}") from error
        if not chat.continue_final:
            return text
        text, found, _ = text.rpartition(_END)
        if not found:
            raise TemplateError("the chat template does not show the last message, so it cannot be continued")
        return text


# ---------------------------------------------------------------- marks


def _with_mark(mark: Mark, chat: ChatPrompt) -> Sequence[ChatPrompt]:
    """`chat` with something after the marked block, in each of the ways that a template may show."""
    match mark:
        case ContentMark():
            content = chat.messages[mark.message]["content"]
            content = content[: mark.num_chars] + _MARK + content[mark.num_chars :]
            return [_with_message(chat, mark.message, content=content)]
        case CallMark():
            calls = list(chat.messages[mark.message]["tool_calls"])
            function = calls[mark.call]["function"]
            arguments = {**function["arguments"], _MARK: _MARK}
            calls[mark.call] = {**calls[mark.call], "function": {**function, "arguments": arguments}}
            return [_with_message(chat, mark.message, tool_calls=calls)]
        case ToolMark():
            tool = chat.tools[mark.tool]
            described = {**tool["function"], "description": tool["function"].get("description", "") + _MARK}
            return [
                # after all else that is printed of it, where it is printed whole
                _with_tool(chat, mark.tool, {**tool, _MARK: _MARK}),
                _with_tool(chat, mark.tool, {**tool, "function": described}),
            ]


def _with_message(chat: ChatPrompt, index: int, **fields: Any) -> ChatPrompt:
    message = {**chat.messages[index], **fields}
    return attrs.evolve(chat, messages=(*chat.messages[:index], message, *chat.messages[index + 1 :]))


def _with_tool(chat: ChatPrompt, index: int, tool: Mapping[str, Any]) -> ChatPrompt:
    return attrs.evolve(chat, tools=(*chat.tools[:index], tool, *chat.tools[index + 1 :]))


def _common_prefix(one: str, other: str) -> int:
    """How many characters two texts begin alike with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---------------------------------------------------------------- for templates that know less


def _plain_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The tools as the beginning of the system prompt."""
    listed = "\n".join(_json(tool) for tool in tools)
    text = (
        f"These tools can be called:\n<tools>\n{listed}\n</tools>\n"
        'To call one, write <tool_call>{"name": its name, "arguments": an object}</tool_call>.'
    )
    if messages and messages[0]["role"] == "system":
        return ({**messages[0], "content": f"{text}\n\n{messages[0]['content']}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


def _plain_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Calls as text of the assistant, their results as text of the user, with whom the turns still alternate."""
    plain: list[Message] = []
    after_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        is_result = role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in message.get("tool_calls") or ():
            function = call["function"]
            named = _json({"name": function["name"], "arguments": function["arguments"]})
            content = f"{content}\n<tool_call>\n{named}\n</tool_call>".lstrip("\n")
        said = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if role == "user" and after_result:
            plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{content}"}
        else:
            plain.append({**said, "role": role, "content": content})
        after_result = is_result
    return tuple(plain)


def _plain_reasoning(message: Message) -> Message:
    reasoning = message.get("reasoning_content")
    if not reasoning:
        return message
    said = {key: value for key, value in message.items() if key != "reasoning_content"}
    return {**said, "content": f"<think>\n{reasoning}\n</think>\n\n{message['content']}"}


def _json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


# ---------------------------------------------------------------- Jinja


def _environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)  # noqa: DTZ005 -- templates mean the local date

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _names_in(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Every name that a template may look up: variables, attributes, and keys written as strings."""
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    names.update(node.attr for node in tree.find_all(jinja2.nodes.Getattr))
    names.update(node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
    return frozenset(names)
