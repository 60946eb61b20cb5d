"""A checkpoint's chat template: from a chat to its prompt's text, and to the positions of the client's marks in it.

It runs in processes of its own (`text_workers/chat_worker.py`): a template ships with a checkpoint and may never end or
write without end. A template that ignores `tools`, `tool_calls` or `reasoning_content` would drop them silently, so
they are converted to plain text first (`plain_chat.py`); one that does not know the role `developer`, or refuses system
messages, at all or after the first, gets a chat without them (`system_messages.py`).

A mark is located without knowledge of the template: the chat is rendered again with text added right after the marked
block, and the position is where the two renderings begin to differ.

What must always hold: marks never change the text; their positions do not decrease; every failure of a template is a
TemplateError.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import jinja2
import jinja2.nodes
import jinja2.sandbox

from ..messages.images import IMAGE_MARK
from ..messages.prompts import CacheTtl, CallMark, ChatPrompt, ContentMark, Mark, ToolMark
from ..shared.template_names import EXTENSIONS, names_in
from .message_spans import find_part_ends
from .plain_chat import (
    ONLY_SINGLE_CALLS,
    as_json,
    object_arguments,
    parts_of,
    plain_calls,
    plain_reasoning,
    plain_tools,
    reasoning_as_thinking,
    single_calls,
    tools_in_system,
)
from .system_messages import NO_SYSTEM_ROLE, merge_upward, system_as_user, without_developer

_END = "\ufdd0"
_MARK = "\ufdd1"
"""Noncharacters: they never occur in text, and no template treats them specially."""

INVALID_UNICODE = "The messages contain characters that are not valid Unicode."
MAX_REASON_CHARACTERS = 1000
"""Of the reason a template gives for refusing a chat."""


class TemplateError(ValueError):
    """The chat template refused the messages, or the model has none. The message is for the client."""


class ChatTooLong(Exception):
    def __init__(self, num_characters: int) -> None:
        super().__init__(f"{num_characters} characters")
        self.num_characters = num_characters
        """A lower bound."""


@attrs.frozen
class RenderedChat:
    text: str
    mark_ends: tuple[int, ...]
    """Characters before each mark, in the order of the marks; 0 if the template does not show the marked block."""
    part_ends: tuple[int, ...] = ()
    """What `message_spans.find_part_ends` has returned, if the chat asks for it."""


class ChatTemplate:
    """One compiled template, or two: a checkpoint may have another for chats with tools."""

    def __init__(
        self, source: str, variables: Mapping[str, str], tool_source: str | None = None, *, lists_parts: bool = False
    ) -> None:
        """`variables`: the special tokens by name. Raises jinja2.TemplateError if a source does not compile."""
        self._for_tools = None if tool_source is None else ChatTemplate(tool_source, variables, lists_parts=lists_parts)
        self._lists_parts = lists_parts
        self._names = names_in(source)
        self._takes_several_calls = not any(text in source for text in ONLY_SINGLE_CALLS)
        self._knows_system = NO_SYSTEM_ROLE not in source
        self._template = _environment().from_string(source)
        self._variables = dict(variables)

    def render(self, chat: ChatPrompt, max_characters: int = sys.maxsize) -> RenderedChat:
        """Render a chat. Raises TemplateError, and ChatTooLong beyond `max_characters`.

        If the template refuses the chat, later system messages are merged into the first, and arguments that are text
        are put into objects.
        """
        if chat.tools and self._for_tools is not None:
            return self._for_tools.render(chat, max_characters)
        rendered = self._render_any(chat, max_characters)
        if not chat.locates_parts:
            return rendered
        limit = 2 * max_characters
        last_tool = (ToolMark(CacheTtl.FIVE_MINUTES, len(chat.tools) - 1),) if chat.tools else ()
        with_tools = self._render_any(attrs.evolve(chat, marks=last_tool), limit) if last_tool else None

        def render(other: ChatPrompt) -> str | None:
            try:
                return self._render_any(other, limit).text
            except (TemplateError, ChatTooLong):
                return None

        tools_end = 0 if with_tools is None else with_tools.mark_ends[0]
        return attrs.evolve(rendered, part_ends=find_part_ends(chat, rendered.text, render, tools_end))

    def _render_any(self, chat: ChatPrompt, max_characters: int) -> RenderedChat:
        if "developer" not in self._names:
            chat = without_developer(chat)
        try:
            return self._render_as_is(chat, max_characters)
        except TemplateError:
            for other in _rearranged(chat):
                with suppress(TemplateError):
                    return self._render_as_is(other, max_characters)
            raise

    def _render_as_is(self, chat: ChatPrompt, max_characters: int) -> RenderedChat:
        try:
            return self._render(chat, max_characters)
        except (TemplateError, ChatTooLong):
            raise
        except Exception as error:  # a template can raise anything, RecursionError and MemoryError included
            reason = (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]
            raise TemplateError(f"The chat template rejected the messages: {reason}") from error

    def _render(self, chat: ChatPrompt, max_characters: int) -> RenderedChat:
        text = self._text(chat, max_characters)
        limit = 2 * max_characters  # a mark adds text wherever the template shows it
        ends: list[int] = []
        for mark in chat.marks:
            end = self._end_of(mark, chat, text, limit)
            if chat.tools and isinstance(mark, ContentMark) and chat.messages[mark.message]["role"] == "system":
                # tools precede the system prompt in the order of breakpoints, whatever the template does
                end = max(end, self._end_of(ToolMark(mark.ttl, len(chat.tools) - 1), chat, text, limit))
            ends.append(max(end, ends[-1]) if ends else end)
        return RenderedChat(text, tuple(ends))

    def _end_of(self, mark: Mark, chat: ChatPrompt, text: str, limit: int) -> int:
        for marked in _with_mark(mark, chat):
            changed = self._text(marked, limit)
            if changed != text:
                return _common_prefix(text, changed)
        return 0

    def _text(self, chat: ChatPrompt, max_characters: int) -> str:
        messages, tools = chat.messages, chat.tools
        if chat.continue_final:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END})
        if not self._names.shows_calls and any(message.get("tool_calls") for message in messages):
            messages = plain_calls(messages)
        elif not self._takes_several_calls:
            before, messages = messages, single_calls(messages)
            if _contents_with_images(before) != _contents_with_images(messages):
                raise TemplateError("Results of tools that have images must be in the order of their calls.")
        if "reasoning_content" not in self._names:
            knows = "thinking" in self._names.attributes
            messages = tuple(map(reasoning_as_thinking if knows else plain_reasoning, messages))
        if tools and "tools" not in self._names.variables:
            add = tools_in_system if "tools" in self._names.attributes else plain_tools
            messages, tools = add(messages, tools), ()
        if not self._knows_system:
            messages = system_as_user(messages)
        if self._lists_parts:
            messages = tuple({**message, "content": parts_of(message["content"])} for message in messages)
        written = self._template.generate(
            messages=list(messages),
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
            tools=list(tools) or None,
            documents=list(chat.documents) or None,
            **{**self._variables, **chat.template_kwargs},
        )
        text = _join(written, max_characters)
        if not chat.continue_final:
            return text
        text, found, _ = text.rpartition(_END)
        if not found:
            raise TemplateError("The chat template does not show the last message, so it cannot be continued.")
        return text


def _rearranged(chat: ChatPrompt) -> Iterator[ChatPrompt]:
    """Yield the same chat in other forms, which its template may accept."""
    objects = object_arguments(chat.messages)
    forms = [chat] if objects is None else [chat, attrs.evolve(chat, messages=objects)]
    yield from forms[1:]
    yield from (merged for form in forms if (merged := merge_upward(form)) is not None)


def _contents_with_images(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what images take their order from."""
    return [message["content"] for message in messages if IMAGE_MARK in message["content"]]


def _join(pieces: Iterable[str], max_characters: int) -> str:
    kept: list[str] = []
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > max_characters:
            raise ChatTooLong(num_characters)
        kept.append(piece)
    return "".join(kept)


# ---------------------------------------------------------------- marks


def _with_mark(mark: Mark, chat: ChatPrompt) -> Sequence[ChatPrompt]:
    """Return `chat` with text added after the marked block, in each way that a template might show it."""
    match mark:
        case ContentMark():
            content = chat.messages[mark.message]["content"]
            content = content[: mark.num_chars] + _MARK + content[mark.num_chars :]
            return [_with_message(chat, mark.message, content=content)]
        case CallMark():
            calls = list(chat.messages[mark.message]["tool_calls"])
            function = calls[mark.call]["function"]
            arguments = function["arguments"]  # a text, if they were no JSON object
            arguments = arguments + _MARK if isinstance(arguments, str) else {**arguments, _MARK: _MARK}
            calls[mark.call] = {**calls[mark.call], "function": {**function, "arguments": arguments}}
            return [_with_message(chat, mark.message, tool_calls=calls)]
        case ToolMark():
            tool = chat.tools[mark.tool]
            described = {**tool["function"], "description": (tool["function"].get("description") or "") + _MARK}
            return [
                # at the end, if the template prints the whole object
                _with_tool(chat, mark.tool, {**tool, _MARK: _MARK}),
                _with_tool(chat, mark.tool, {**tool, "function": described}),
            ]


def _with_message(chat: ChatPrompt, index: int, **fields: Any) -> ChatPrompt:
    message = {**chat.messages[index], **fields}
    return attrs.evolve(chat, messages=(*chat.messages[:index], message, *chat.messages[index + 1 :]))


def _with_tool(chat: ChatPrompt, index: int, tool: Mapping[str, Any]) -> ChatPrompt:
    return attrs.evolve(chat, tools=(*chat.tools[:index], tool, *chat.tools[index + 1 :]))


def _common_prefix(one: str, other: str) -> int:
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


# ---------------------------------------------------------------- Jinja


@jinja2.pass_eval_context
def _unchanged(_: jinja2.nodes.EvalContext, value: object) -> object:
    return value


def _environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)  # noqa: DTZ005 -- templates expect the local date

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=EXTENSIONS,
        # Jinja evaluates constants when it compiles, but nothing of a template may run at startup: neither in the
        # optimizer nor in printed expressions, which Jinja does not fold if `finalize` asks for the context.
        optimized=False,
        finalize=_unchanged,
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
