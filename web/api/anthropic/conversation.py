"""From the blocks of a conversation to the messages of a chat template, as `prompt.py` lists them.

Every block that may have a `cache_control` is passed to the `Breakpoints`, with the point where it ends.
"""

from __future__ import annotations

from typing import Any

from quipu.actors.messages.prompts import CallMark, ChatPart, ContentMark

from ...request.errors import bad_value
from ..fields import Fields, wrong_type
from ..image_parts import ImageParts
from ..message_shapes import CACHE_CONTROL as NAME
from ..pace import Pace
from .block_texts import blocks_of, is_skipped, read_text
from .cache_control import Breakpoints, Place
from .deferred_tools import DeferredTools

REDACTED = "[redacted]"
"""Stands for encrypted thinking."""
_PARAGRAPH = "\n\n"


class Conversation:
    """The messages so far. The last one may still grow."""

    def __init__(self, breakpoints: Breakpoints, pace: Pace, images: ImageParts, deferred: DeferredTools) -> None:
        self.images = images
        self.deferred = deferred
        self.breakpoints = breakpoints
        self.pace = pace
        self.pending_calls: set[str] = set()
        """Ids of tool calls without a result."""
        self.parts: list[ChatPart] = []
        self.message: int | None = None
        """The client's message that is being read; None: the system prompt."""
        self.unused: list[str] = []
        """Paths of blocks that were skipped."""
        self._messages: list[dict[str, Any]] = []
        self._said: list[str] = []
        self._num_chars = 0
        self._thought: list[str] = []

    def begin(self, role: str) -> None:
        """Continue the last message if it has this role, or begin a new one."""
        if not self._messages or self._messages[-1]["role"] != role:
            self.add({"role": role, "content": ""})
        elif self._num_chars:
            self.say(_PARAGRAPH)

    def add(self, message: dict[str, Any]) -> None:
        """Begin `message`; the previous one is complete."""
        self._complete()
        self._messages.append(message)

    def say(self, text: str) -> None:
        self._said.append(text)
        self._num_chars += len(text)

    def add_text(self, role: str, text: str) -> None:
        """Add the client's text without blocks."""
        self.begin(role)
        if text:
            self.say(text)
            self.breakpoints.text(self.place())
            self.end_part(None, role)

    def think(self, text: str) -> None:
        self._thought.append(text)

    def call(self, call: dict[str, Any]) -> Place:
        """Add a tool call to the last message, and return its place."""
        calls = self._messages[-1].setdefault("tool_calls", [])
        calls.append(call)
        message, index = len(self._messages) - 1, len(calls) - 1
        return lambda ttl: CallMark(ttl, message, index)

    def place(self) -> Place:
        """Return the end of the content so far."""
        message, num_chars = len(self._messages) - 1, self._num_chars
        return lambda ttl: ContentMark(ttl, message, num_chars)

    def end_part(self, part: int | None, role: str, *, is_call: bool = False) -> None:
        """Note the end of a part of the client's message."""
        if self._messages:
            call = len(self._messages[-1]["tool_calls"]) - 1 if is_call else None
            place = len(self._messages) - 1, self._num_chars, call
            self.parts.append(ChatPart(self.message, part, role, *place))

    @property
    def has_calls(self) -> bool:
        return "tool_calls" in self._messages[-1]

    @property
    def has_text(self) -> bool:
        return self._num_chars > 0

    @property
    def ends_with_space(self) -> bool:
        return next((text for text in reversed(self._said) if text), "")[-1:].isspace()

    def finish(self) -> tuple[dict[str, Any], ...]:
        self._complete()
        return tuple(self._messages)

    def _complete(self) -> None:
        if self._messages:
            self._messages[-1]["content"] = "".join(self._said)
            if self._thought:
                self._messages[-1]["reasoning_content"] = _PARAGRAPH.join(self._thought)
        self._said, self._thought, self._num_chars = [], [], 0


async def read_system(blocks: list[Fields], conversation: Conversation, first: int = 0) -> None:
    """Read blocks of the system prompt, or of a message of its role, from the block with the index `first` on."""
    for index, block in enumerate(blocks, first):
        await conversation.pace.tick()
        if _is_skipped(block, conversation):
            _skip(block, conversation)
        else:
            await say_text(block, conversation)
            conversation.end_part(index, "system")


async def read_user(blocks: list[Fields], conversation: Conversation) -> None:
    if all(_is_skipped(block, conversation) for block in blocks):
        conversation.begin("user")  # a message is never lost with its blocks
    begun = False
    for index, block in enumerate(blocks):
        await conversation.pace.tick()
        if block.get("type") == "tool_result":
            await _read_result(block, conversation)
            begun = False
        elif _is_skipped(block, conversation):
            _skip(block, conversation)
            continue
        else:
            if not begun:
                conversation.begin("user")
                begun = True
            await say_text(block, conversation, is_users=True)
        conversation.end_part(index, "user")


async def read_assistant(blocks: list[Fields], conversation: Conversation) -> None:
    conversation.begin("assistant")
    for index, block in enumerate(blocks):
        await conversation.pace.tick()
        match block.get("type"):
            case "thinking":
                _refuse_mark(block)
                conversation.think(block.text("thinking"))
            case "redacted_thinking":
                _refuse_mark(block)
                block.text("data")
                conversation.think(REDACTED)
            case "tool_use":
                _read_call(block, conversation)
                conversation.end_part(index, "assistant", is_call=True)
            case _ if _is_skipped(block, conversation):
                _skip(block, conversation)
            case _:
                await say_text(block, conversation)
                conversation.end_part(index, "assistant")


def _read_call(block: Fields, conversation: Conversation) -> None:
    arguments = block.get("input")
    if type(arguments) is not dict:
        raise wrong_type(block.param("input"), "an object")
    call_id = block.text("id")
    function = {"name": block.text("name"), "arguments": arguments}
    conversation.pending_calls.add(call_id)
    place = conversation.call({"id": call_id, "type": "function", "function": function})
    conversation.breakpoints.block(block, place)


async def _read_result(block: Fields, conversation: Conversation) -> None:
    call_id = block.text("tool_use_id")
    if call_id not in conversation.pending_calls:
        problem = "must be the `id` of a `tool_use` block in the previous message that has no result yet"
        raise bad_value(block.param("tool_use_id"), problem)
    conversation.pending_calls.remove(call_id)
    conversation.add({"role": "tool", "content": "", "tool_call_id": call_id})
    if block.flag("is_error"):
        conversation.say("Error: ")
    content = block.get("content")
    if type(content) is str:
        conversation.say(content)
    else:
        for inner in blocks_of(block, "content", conversation.pace):
            await conversation.pace.tick()
            if _is_skipped(inner, conversation):
                _skip(inner, conversation)
            else:
                await say_text(inner, conversation, is_result=True)
    conversation.breakpoints.block(block, conversation.place())


async def say_text(
    block: Fields, conversation: Conversation, *, is_result: bool = False, is_users: bool = False
) -> None:
    """Add the text of a block. `is_result`: it is part of a tool's result, whose images are skipped if the model reads
    none; `is_users`: of a user's message, whose images are read."""
    if block.get("type") == "image" and (is_users or (is_result and conversation.images.are_read)):
        text = conversation.images.read_block(block)
    elif conversation.deferred.are_named(block):
        text = ("\n" if conversation.has_text else "") + await conversation.deferred.describe(block)
    else:
        text = await read_text(block, conversation.pace, conversation.unused if is_result else None)
    conversation.say(text)
    if not text and block.get("type") == "text" and block.get(NAME) is not None:
        raise bad_value(block.param(NAME), "cannot be set for an empty text block")
    conversation.breakpoints.block(block, conversation.place() if text else None)


def _is_skipped(block: Fields, conversation: Conversation) -> bool:
    return is_skipped(block) and not conversation.deferred.are_named(block)


def _skip(block: Fields, conversation: Conversation) -> None:
    """Skip a block, whose `cache_control` then has no effect."""
    conversation.breakpoints.block(block, None)
    conversation.unused.append(block.path)


def _refuse_mark(block: Fields) -> None:
    if block.get(NAME) is not None:
        raise bad_value(block.param(NAME), "cannot be set for a thinking block")
