"""A checkpoint's chat template: from a chat to the text of its prompt, and where a client's marks lie in that text.

Runs in a process of its own (`text_workers/chat_worker.py`): a template comes with a checkpoint, and may take for ever
or write without end. Templates differ in what they know: one that never looks at `tools`, `tool_calls` or
`reasoning_content` would drop them silently, so a chat that has them is put into plain text first (`plain_chat.py`).

A mark's place is found without knowing the template: the chat is rendered once more with something added right after
the marked block, and the place is where that rendering begins to differ from the plain one.

What must always hold: marks never change the text; their places do not decrease; whatever goes wrong in a template is
a TemplateError.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from ..messages.prompts import CallMark, ChatPrompt, ContentMark, Mark, ToolMark
from .plain_chat import as_json, plain_calls, plain_reasoning, plain_tools

_END = "\ufdd0"
_MARK = "\ufdd1"
"""Noncharacters: text never has them, and no template treats them specially."""


NO_UNICODE = "these messages hold characters that are not valid Unicode"
MAX_REASON_CHARACTERS = 1000
"""Of what a template says against a chat."""


class TemplateError(ValueError):
    """The chat template refused the messages, or there is none; the message is for the client."""


class TooMuchText(Exception):
    """A chat came out longer than it may be."""

    def __init__(self, num_characters: int) -> None:
        super().__init__(f"{num_characters} characters")
        self.num_characters = num_characters
        """So many at least."""


@attrs.frozen
class TemplateSource:
    """A chat template as a checkpoint brings it."""

    origin: str
    """Where it was found, for messages."""
    source: str
    variables: Mapping[str, str]
    """The special tokens by their names."""


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

    def render(self, chat: ChatPrompt, max_characters: int = sys.maxsize) -> RenderedChat:
        """The prompt's text. Raises TemplateError, and TooMuchText where it is longer than `max_characters`."""
        try:
            return self._render(chat, max_characters)
        except (TemplateError, TooMuchText):
            raise
        except Exception as error:  # a template can raise anything, as RecursionError or MemoryError
            told = (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]
            raise TemplateError(f"the chat template refuses these messages: {told}") from error

    def _render(self, chat: ChatPrompt, max_characters: int) -> RenderedChat:
        text = self._text(chat, max_characters)
        limit = 2 * max_characters  # a mark makes it longer, wherever the template shows it
        ends: list[int] = []
        for mark in chat.marks:
            end = self._end_of(mark, chat, text, limit)
            if chat.tools and isinstance(mark, ContentMark) and chat.messages[mark.message]["role"] == "system":
                # Tools come before the system prompt, whichever of them the template puts first.
                end = max(end, self._end_of(ToolMark(mark.ttl, len(chat.tools) - 1), chat, text, limit))
            ends.append(max(end, ends[-1]) if ends else end)
        return RenderedChat(text, tuple(ends))

    def _end_of(self, mark: Mark, chat: ChatPrompt, text: str, limit: int) -> int:
        """Characters of `text` before `mark`."""
        for marked in _with_mark(mark, chat):
            changed = self._text(marked, limit)
            if changed != text:
                return _common_prefix(text, changed)
        return 0

    def _text(self, chat: ChatPrompt, max_characters: int) -> str:
        messages, tools = chat.messages, chat.tools
        if chat.continue_final:
            messages = (*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _END})
        if "tool_calls" not in self._names and any(message.get("tool_calls") for message in messages):
            messages = plain_calls(messages)
        if "reasoning_content" not in self._names:
            messages = tuple(map(plain_reasoning, messages))
        if tools and "tools" not in self._names:
            messages, tools = plain_tools(messages, tools), ()
        written = self._template.generate(
            messages=messages,
            add_generation_prompt=chat.add_generation_prompt and not chat.continue_final,
            **({"tools": tools} if tools else {}),
            **{**self._variables, **chat.template_kwargs},
        )
        text = _join(written, max_characters)
        if not chat.continue_final:
            return text
        text, found, _ = text.rpartition(_END)
        if not found:
            raise TemplateError("the chat template does not show the last message, so it cannot be continued")
        return text


def _join(pieces: Iterable[str], max_characters: int) -> str:
    kept: list[str] = []
    num_characters = 0
    for piece in pieces:
        num_characters += len(piece)
        if num_characters > max_characters:
            raise TooMuchText(num_characters)
        kept.append(piece)
    return "".join(kept)


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


# ---------------------------------------------------------------- Jinja


@jinja2.pass_eval_context
def _as_it_is(_: jinja2.nodes.EvalContext, value: object) -> object:
    return value


def _environment() -> jinja2.Environment:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)  # noqa: DTZ005 -- templates mean the local date

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols],
        # Jinja computes constants when it compiles. Nothing of a template is to run at load: neither by its optimiser,
        # nor in what is printed, which it leaves alone where that goes through a function that asks for the context.
        optimized=False,
        finalize=_as_it_is,
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _names_in(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Every name that a template may look up: variables, attributes, and keys written as strings."""
    names = {node.name for node in tree.find_all(jinja2.nodes.Name)}
    names.update(node.attr for node in tree.find_all(jinja2.nodes.Getattr))
    names.update(node.value for node in tree.find_all(jinja2.nodes.Const) if isinstance(node.value, str))
    return frozenset(names)
