"""The output items of a response: messages, reasoning, function calls and calls of custom tools.

Whole responses and streams make them from the same blocks. The model writes the input of a custom tool as `{"input":
"..."}`, of which the client gets the text; anything else is the input as it is.

What must always hold: an item's id is the same in every event and in the response; a call that was cut is incomplete;
a response that succeeded has at least one item.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import orjson

from ..content import Block, CallBlock, CallIds, Content, GrowingText, ReasoningBlock, TextBlock
from ..generation import ReplyRules
from .responses_logprobs import Logprobs

CALL_ID_PREFIX = "call_"
Told = orjson.Fragment | tuple[()]
"""The logprobs of a text, as they are encoded."""
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class _CustomInput(msgspec.Struct, forbid_unknown_fields=True):
    input: str


_CUSTOM_INPUT = msgspec.json.Decoder(_CustomInput)


@attrs.frozen
class OutputItems:
    call_ids: CallIds
    rules: ReplyRules
    logprobs: Logprobs | None = None
    """Of the texts of messages. None: they are not told."""

    def output(self, content: Content, *, is_whole: bool) -> Iterator[dict[str, Any]]:
        """Yield all items; the last is incomplete unless the output `is_whole`. At least one."""
        blocks = content.blocks or [TextBlock(GrowingText())]
        last = len(blocks) - 1
        num_texts = 0
        for number, block in enumerate(blocks):
            is_text = isinstance(block, TextBlock)
            told = self.told(num_texts) if is_text else ()
            num_texts += is_text
            yield self.item(number, block, self.final_status(block, is_whole=is_whole or number < last), told)

    def told(self, number: int) -> Told:
        """Return what stands for the logprobs of a block of text; such blocks are counted from 0."""
        return () if self.logprobs is None else self.logprobs.hole(self.logprobs.scores.block(number))

    def final_status(self, block: Block, *, is_whole: bool) -> str:
        """Return a block's status once nothing is added to it."""
        return COMPLETED if (block.is_complete if isinstance(block, CallBlock) else is_whole) else INCOMPLETE

    def item(self, number: int, block: Block, status: str, told: Told = ()) -> dict[str, Any]:
        """Return the item of a block, empty while it is in progress. `told`: the logprobs of its text."""
        if isinstance(block, CallBlock):
            return self._call(number, block, status)
        text = str(block.text)
        part = reasoning_part(text) if isinstance(block, ReasoningBlock) else text_part(text, told)
        content = [] if status == IN_PROGRESS else [part]
        item = {"id": self.item_id(number, block)}
        if isinstance(block, ReasoningBlock):
            rest = {"summary": [], "content": content, "encrypted_content": None, "status": status}
            return {**item, "type": "reasoning", **rest}
        return {**item, "type": "message", "status": status, "role": "assistant", "content": content}

    def _call(self, number: int, block: CallBlock, status: str) -> dict[str, Any]:
        tool = self.rules.namespaces.get(block.name)
        told = "" if status == IN_PROGRESS else self.argument(block)
        is_custom = self.is_custom(block)
        return {
            "id": self.item_id(number, block),
            "type": "custom_tool_call" if is_custom else "function_call",
            "status": status,
            "call_id": self.call_ids.call_id(CALL_ID_PREFIX, 0, block.index),
            "name": block.name if tool is None else tool.name,
            **({} if tool is None else {"namespace": tool.namespace}),
            "input" if is_custom else "arguments": told,
        }

    def is_custom(self, block: Block) -> bool:
        return isinstance(block, CallBlock) and block.name in self.rules.custom_tools

    def argument(self, block: CallBlock) -> str:
        """Return a call's arguments, or the input of a custom tool."""
        text = str(block.text)
        if not self.is_custom(block):
            return text
        try:
            return _CUSTOM_INPUT.decode(text).input
        except (msgspec.DecodeError, RecursionError):
            return text

    def item_id(self, number: int, block: Block) -> str:
        prefix = "msg"
        if isinstance(block, ReasoningBlock):
            prefix = "rs"
        elif isinstance(block, CallBlock):
            prefix = "ctc" if self.is_custom(block) else "fc"
        item_id = f"{prefix}_{self.call_ids.request_id}"
        return f"{item_id}_{number}" if number else item_id


def text_part(text: str, told: Told = ()) -> dict[str, Any]:
    """Return the only part of a message, with its logprobs."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": told}


def reasoning_part(text: str) -> dict[str, Any]:
    """Return the only part of a reasoning item."""
    return {"type": "reasoning_text", "text": text}
