"""What is said about each kind of advice. Texts have numbers only, never anything of a prompt.

Messages are numbered from 1 in texts, as people count; the field `message` is an index from 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quipu.actors.messages.explanations import Advice, AdviceCode, PromptOutline

TEXTS: Final[Mapping[AdviceCode, str]] = {
    AdviceCode.VOLATILE_PREFIX: (
        "{place} changes a little from request to request, and nothing after it can be reused. Move what changes, such "
        "as a time or an id, behind the conversation."
    ),
    AdviceCode.TOOLS_REORDERED: (
        "The tools are the same as before in another order. Send them in one order, such as by name."
    ),
    AdviceCode.KEYS_REORDERED: (
        "{place} has the same JSON as before with its keys in another order. Write keys in one order, such as sorted."
    ),
    AdviceCode.PER_SESSION_HEADER: (
        "{place} differs in each conversation by a header or an id, so that conversations share nothing. Move it to "
        "the end, or into a field that is not part of the prompt."
    ),
    AdviceCode.REASONING_STRIPPED: (
        "{place} was answered with reasoning and is sent back without it. Send the reasoning back as it was received."
    ),
    AdviceCode.ALTERNATING_SYSTEM_PROMPTS: (
        "This conversation alternates between system prompts, so that each of them has a copy of the conversation. "
        "Use one system prompt, and put what differs into the last message."
    ),
    AdviceCode.POOL_TOO_SMALL: (
        "This had been cached and was evicted. A cache of about {num_blocks} blocks, {num_tokens} tokens, would still "
        "have it."
    ),
}


def describe_advice(advice: Advice, outline: PromptOutline, block_size: int) -> dict[str, Any]:
    """Return one piece of advice with its text."""
    token = outline.start_of(advice.message) if advice.token is None else advice.token
    num_blocks = advice.num_blocks or 0
    without = "The list of tools" if advice.code is AdviceCode.KEYS_REORDERED else "The system prompt"
    place = without if advice.message is None else f"Message {advice.message + 1}"
    text = TEXTS[advice.code].format(place=place, num_blocks=num_blocks, num_tokens=num_blocks * block_size)
    return {"code": advice.code.value, "message": advice.message, "token": token, "text": text}
