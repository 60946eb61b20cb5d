"""From `system`, `messages` and `tools` to the one prompt that the chat template renders.

    system                           the first message, of role system
    text                             content of its role's message, concatenated
    thinking                         `reasoning_content` of the assistant's message
    tool_use                         `tool_calls` of the assistant's message
    tool_result                      a message of its own, of role tool
    tool_reference, tool_addition    the definition of a deferred tool (`deferred_tools.py`)
    consecutive messages of a role   one message

What must always hold: the same body makes the same prompt, whether it is served or only counted; what cannot be
rendered is refused with the path of its field, as in `messages.0.content.1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from quipu.actors.messages.grammar import GrammarSpec
from quipu.actors.messages.output import OutputFormat, OutputRules
from quipu.actors.messages.prompts import ChatPrompt

from ...request.errors import bad_value
from ..fields import Fields, missing
from ..forced_calls import read_calls_grammar
from ..image_parts import ImageParts
from ..output_grammar import only_one, read_schema_format
from ..pace import Pace
from ..template_fields import Thinking, read_template_kwargs
from .block_texts import blocks_of, text_of
from .cache_control import Breakpoints
from .conversation import Conversation, read_assistant, read_system, read_user
from .deferred_tools import DeferredTools
from .tools import read_choice, read_tools

BILLING_HEADER = "x-anthropic-billing-header"
"""Claude Code begins its system prompt with such a block, different in each session: it would prevent all cache
hits."""


@attrs.frozen
class AskedPrompt:
    chat: ChatPrompt
    output: OutputRules
    grammar: GrammarSpec | None
    thinking_budget: int | None
    unused_fields: tuple[str, ...]


async def read_prompt(
    fields: Fields, form: OutputFormat, images: ImageParts, *, keep_billing_header: bool
) -> AskedPrompt:
    """Check everything that is rendered. Raises APIError."""
    breakpoints = Breakpoints()
    async with Pace() as pace:
        deferred = DeferredTools(pace)
        tools = await read_tools(fields, breakpoints, deferred, pace)
        choice, one_call = read_choice(fields)
        conversation = Conversation(breakpoints, pace, images, deferred)
        await _read_system(fields, conversation, keep_billing_header)
        continue_final = await _read_messages(fields, conversation)
        answer = await _read_format(fields, pace)
        grammar = await read_calls_grammar(tools, choice, answer, form.call_form, one_call=one_call, pace=pace)
    breakpoints.whole_request(fields)
    thinking = _read_thinking(fields, form)
    chat = ChatPrompt(
        messages=conversation.finish(),
        tools=tuple(tools.shown),
        continue_final=continue_final,
        marks=breakpoints.marks(),
        template_kwargs=read_template_kwargs(fields, thinking),
        parts=tuple(conversation.parts),
        images=images.images,
    )
    return AskedPrompt(
        chat,
        tools.rules(choice.names, one_call=one_call),
        grammar,
        thinking.budget,
        (*thinking.unused, *tools.unused, *conversation.unused),
    )


async def _read_system(fields: Fields, conversation: Conversation, keep_billing_header: bool) -> None:
    system = fields.get("system")
    if system is None or system == []:
        return
    if type(system) is str:
        if system.startswith(BILLING_HEADER) and not keep_billing_header:
            system = system.partition("\n")[2]
        if system:
            conversation.add_text("system", system)
        return
    blocks = blocks_of(fields, "system", conversation.pace)
    if not keep_billing_header and type(system[0].get("text")) is str and system[0]["text"].startswith(BILLING_HEADER):
        text_of(blocks[0])
        conversation.breakpoints.block(blocks.pop(0), None)
    if blocks:
        conversation.begin("system")
    await read_system(blocks, conversation, len(system) - len(blocks))


async def _read_messages(fields: Fields, conversation: Conversation) -> bool:
    """Return whether the last message is the beginning of the response (prefill)."""
    check, messages = conversation.pace.check_messages, fields.get("messages")
    for index, message in enumerate(fields.objects("messages", "a list of messages", check, is_required=True)):
        await conversation.pace.tick()
        conversation.message = index
        await _read_message(message, conversation, is_last=index == len(messages) - 1)
    return _check_end(messages, conversation)


async def _read_message(fields: Fields, conversation: Conversation, *, is_last: bool) -> None:
    role = fields.text("role")
    content, param = fields.get("content"), fields.param("content")
    if content is None:
        raise missing(param)
    if not content and not (is_last and role == "assistant"):
        raise bad_value(param, "must not be empty")
    if type(content) is str:
        conversation.add_text(role, content)
    else:
        blocks = blocks_of(fields, "content", conversation.pace)
        match role:
            case "user":
                await read_user(blocks, conversation)
            case "assistant":
                await read_assistant(blocks, conversation)
            case _:
                conversation.begin(role)
                await read_system(blocks, conversation)
    if role != "assistant" and conversation.pending_calls:
        raise bad_value(param, "must begin with a `tool_result` for each `tool_use` of the previous message")


def _check_end(messages: list[Mapping[str, Any]], conversation: Conversation) -> bool:
    if messages[-1]["role"] != "assistant":
        return False
    param = f"messages.{len(messages) - 1}.content"
    if conversation.has_calls:
        raise bad_value(param, "the final assistant message must not have a `tool_use` without its result")
    if conversation.ends_with_space:
        raise bad_value(param, "the final assistant message must not end with whitespace")
    return True


async def _read_format(fields: Fields, pace: Pace) -> GrammarSpec | None:
    """Read `output_config.format`, or `output_format`, its older name."""
    older = await read_schema_format(fields, "output_format", pace)
    return only_one([older, await read_schema_format(fields.fields("output_config"), "format", pace)])


def _read_thinking(fields: Fields, form: OutputFormat) -> Thinking:
    """Read `thinking` and `output_config.effort`. Without them the template decides."""
    read = Thinking(form)
    read.read_effort(fields.fields("output_config"), "effort", is_switch=False)
    if fields.get("thinking") is None:
        return read
    thinking = fields.fields("thinking")
    kind = thinking.text("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_value("thinking.type", "must be `enabled`, `adaptive` or `disabled`")
    read.switch(kind != "disabled", "thinking")
    budget = thinking.integer("budget_tokens")
    if budget is not None and kind == "enabled":
        read.limit(budget, thinking.param("budget_tokens"))
    return read
