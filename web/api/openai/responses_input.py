"""The `input` of a response: items of a conversation, read into the messages of a chat prompt.

A string is one user message. Items are messages, calls of tools, their results, and reasoning; calls and reasoning next
to an assistant message become part of it, as chat templates expect. A compacted history is an assistant message with
its summary. What OpenAI's server does by itself (searches, images) is skipped and reported to the client; every other
type is refused by name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from quipu.actors.config.declarations import RESPONSES
from quipu.actors.messages.prompts import ChatPart

from ...auth.sealed_texts import NOTHING_SEALED, NotSealedHere, TenantSeal
from ...request.errors import bad_value
from ..body_table import SHAPES
from ..fields import Fields, missing, unsupported_type, wrong_type
from ..image_parts import NO_IMAGES, ImageParts
from ..item_shapes import COMPACTIONS, SKIPPED
from ..pace import Pace
from .chat_messages import ReadMessages, TextParts, read_arguments, read_parts
from .prompt_cache import NO_WISHES, PartBreakpoints
from .response_state import NO_STATE, ResponseState
from .responses_tools import ResponseTools
from .tool_choice import read_flat_name

_TEXT_PARTS = ("input_text", "output_text")
_ANSWER_PARTS = (*_TEXT_PARTS, "refusal")
_UNREADABLE = ("input_image", "input_file")
"""Refused in a message, and skipped in a tool's result: a history that has one could never be continued. Images only if
the model reads none."""
_REASONING_PARTS = {"content": ("reasoning_text", "text"), "summary": ("summary_text",)}
SUMMARY = "Summary of the conversation so far:\n\n"
"""Precedes the summary of a compacted history."""
SEALED = "encrypted_content"
_SEALED_CHARS_AN_ITEM = 512
"""It takes about as long to open them as to read a message."""

Message = dict[str, Any]


async def read_input(
    fields: Fields,
    tools: ResponseTools,
    breakpoints: PartBreakpoints,
    pace: Pace,
    state: ResponseState = NO_STATE,
    seal: TenantSeal = NOTHING_SEALED,
    images: ImageParts = NO_IMAGES,
) -> ReadMessages:
    """Return the messages of `instructions`, of what the response continues, and of `input`. Raises APIError.

    Tools and items that are skipped are added to `tools`, breakpoints to `breakpoints`, and images to `images`. `seal`
    opens summaries.
    """
    instructions = fields.optional_text("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    reader = _Reader(system, tools, breakpoints, pace, seal, images)
    if state.context:
        earlier = Fields({"input": state.context}, state.param, SHAPES[RESPONSES])
        for item in earlier.objects("input", "a list of items", pace.check_messages):
            await reader.read(item)
    items = fields.get("input")
    if items is None and not state.context:
        raise missing("input")
    if items is None:
        pass
    elif type(items) is str:
        reader.messages.append({"role": "user", "content": items})
        reader.end_parts("user", TextParts(items))
    else:
        for index, item in enumerate(fields.objects("input", "a string or a list of items", pace.check_messages)):
            reader.item = index
            await reader.read(item)
    if len(reader.messages) == len(system):
        reader.messages.append({"role": "user", "content": ""})  # agents send an empty input to see who answers
    return ReadMessages(tuple(reader.messages), tuple(reader.parts))


async def check_items(fields: Fields, name: str, pace: Pace, seal: TenantSeal, images: ImageParts) -> None:
    """Check a list of items that a response may continue later. Raises APIError."""
    reader = _Reader([], ResponseTools(pace), PartBreakpoints(NO_WISHES), pace, seal, images)
    for item in fields.objects(name, "a list of items", pace.check_messages):
        await reader.read(item)


class _Reader:
    def __init__(
        self,
        system: list[Message],
        tools: ResponseTools,
        breakpoints: PartBreakpoints,
        pace: Pace,
        seal: TenantSeal,
        images: ImageParts,
    ) -> None:
        """`system`: the messages before the input."""
        self._images = images
        self.messages = [*system]
        self.parts = [ChatPart(None, None, "system", 0, len(message["content"])) for message in system]
        self._num_before = len(system)
        self._breakpoints = breakpoints
        self.item: int | None = None
        self._tools = tools
        self._pace = pace
        self._seal = seal
        self._readers: Mapping[str, Callable[[Fields], Awaitable[None]]] = {
            "additional_tools": self._read_tools,
            "apply_patch_call": partial(self._read_client_call, name="apply_patch", arguments="operation"),
            "apply_patch_call_output": partial(self._read_call_output, may_be_absent=True),
            "custom_tool_call": self._read_custom_call,
            "custom_tool_call_output": self._read_call_output,
            "function_call": self._read_call,
            "function_call_output": self._read_call_output,
            "local_shell_call": partial(self._read_client_call, name="local_shell", arguments="action"),
            "local_shell_call_output": self._read_call_output,
            "message": self._read_message,
            "reasoning": self._read_reasoning,
            "shell_call": partial(self._read_client_call, name="shell", arguments="action"),
            "shell_call_output": self._read_shell_output,
            **dict.fromkeys(COMPACTIONS, self._read_compaction),
        }

    async def read(self, fields: Fields) -> None:
        await self._pace.tick()
        item_type = fields.optional_text("type")
        if item_type is None:
            if fields.get("role") is None:
                raise missing(fields.param("type"))
            item_type = "message"  # which may omit it
        if item_type in SKIPPED:
            self._tools.unused.append(fields.path)
            return
        read = self._readers.get(item_type)
        if read is None:
            raise unsupported_type(fields, "items")
        await read(fields)

    def end_parts(self, role: str, text: TextParts) -> None:
        """Note the ends of the parts that are the content of the last message."""
        index = len(self.messages) - 1
        ends = [(None, len(text.text))] if text.part_ends is None else enumerate(text.part_ends)
        self.parts += [ChatPart(self.item, part, role, index, num_chars) for part, num_chars in ends]
        for found, num_chars in zip(text.breakpoints, text.part_ends or (), strict=False):
            self._breakpoints.add(found, index, num_chars)

    async def _read_message(self, fields: Fields) -> None:
        role = fields.text("role")
        types = _ANSWER_PARTS if role == "assistant" else _TEXT_PARTS
        text = TextParts("")
        if role != "assistant" or fields.get("content") != []:  # an answer that was cut before its first text
            text = await self._read_text(fields, "content", types, images=self._images if role == "user" else None)
        last = self.messages[-1] if len(self.messages) > self._num_before else {}
        if role == "assistant" and "reasoning_content" in last and not last["content"] and "tool_calls" not in last:
            last["content"] = text.text  # the preceding reasoning belongs to this message
        else:
            self.messages.append({"role": role, "content": text.text})
        self.end_parts(role, text)

    async def _read_tools(self, fields: Fields) -> None:
        await self._tools.read(fields, skip_known=True)

    async def _read_call(self, fields: Fields) -> None:
        self._call(fields.text("call_id"), read_flat_name(fields), await read_arguments(fields, self._pace))

    async def _read_custom_call(self, fields: Fields) -> None:
        self._call(fields.text("call_id"), read_flat_name(fields), {"input": fields.text("input")})

    async def _read_client_call(self, fields: Fields, name: str, arguments: str) -> None:
        """Read a call of a tool that OpenAI defines and the client carries out."""
        value = fields.get(arguments)
        if type(value) is not dict:
            raise wrong_type(fields.param(arguments), "an object")
        self._call(fields.text("call_id"), name, value)

    def _call(self, call_id: str, name: str, arguments: Any) -> None:
        if len(self.messages) == self._num_before or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        message = self.messages[-1]
        calls = message.setdefault("tool_calls", [])
        calls.append(call)
        index, num_chars = len(self.messages) - 1, len(message["content"])
        self.parts.append(ChatPart(self.item, None, "assistant", index, num_chars, len(calls) - 1))

    async def _read_call_output(self, fields: Fields, *, may_be_absent: bool = False) -> None:
        is_empty = fields.get("output") == [] or (may_be_absent and fields.get("output") is None)
        skipped = _UNREADABLE[1:] if self._images.are_read else _UNREADABLE
        content = TextParts("")
        if not is_empty:
            content = await self._read_text(fields, "output", skipped=skipped, images=self._images)
        self._add_result(fields, content)

    async def _read_shell_output(self, fields: Fields) -> None:
        if fields.get("output") is None:
            raise wrong_type(fields.param("output"), "a list of outputs")
        texts = []
        for printed in fields.objects("output", "a list of outputs", self._pace.check_parts):
            await self._pace.tick()
            texts += [printed.optional_text(name) or "" for name in ("stdout", "stderr")]
        self._add_result(fields, TextParts("".join(texts)))

    def _add_result(self, fields: Fields, content: TextParts) -> None:
        message = {"role": "tool", "content": content.text}
        for name, key in (("call_id", "tool_call_id"), ("name", "name")):
            if (value := fields.optional_text(name)) is not None:
                message[key] = value
        self.messages.append(message)
        self.end_parts("tool", content)

    async def _read_reasoning(self, fields: Fields) -> None:
        """Read the text of the reasoning, or else its summary. What is encrypted only its issuer can read."""
        name = next((name for name in _REASONING_PARTS if fields.get(name)), None)
        if name is not None:
            text = await self._read_text(fields, name, _REASONING_PARTS[name])
            self.messages.append({"role": "assistant", "content": "", "reasoning_content": text.text})
            self._tools.unused.extend(found.path for found in text.breakpoints if found is not None)
        elif fields.get("encrypted_content"):
            self._tools.unused.append(fields.param("encrypted_content"))

    async def _read_compaction(self, fields: Fields) -> None:
        sealed = fields.text(SEALED)
        await self._pace.tick(len(sealed) // _SEALED_CHARS_AN_ITEM)
        try:
            summary = self._seal.open(sealed)
        except NotSealedHere:
            problem = "this server cannot read it: only what it has returned for the same tenant, unchanged"
            raise bad_value(fields.param(SEALED), problem, code="invalid_encrypted_content") from None
        self.messages.append({"role": "assistant", "content": f"{SUMMARY}{summary}"})
        self.end_parts("assistant", TextParts(self.messages[-1]["content"]))

    async def _read_text(
        self,
        fields: Fields,
        name: str,
        part_types: tuple[str, ...] = _TEXT_PARTS,
        skipped: tuple[str, ...] = (),
        images: ImageParts | None = None,
    ) -> TextParts:
        allowed, unused = " or ".join(part_types), self._tools.unused
        return await read_parts(fields, name, part_types, skipped, unused, self._pace, allowed, images, "input_image")
