"""An explanation as JSON, for the endpoint and for `quipu explain`.

What must always hold: a reader is told of its own tenant's requests only; a piece takes about a millisecond to make,
however long the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from typing import Any, Final

import attrs
import orjson

from quipu.actors.messages.block_manager import CacheMiss, MissReason
from quipu.actors.messages.explanations import (
    Advice,
    AdviceCode,
    BlockSpan,
    EvictedBlock,
    ExplainedPrompt,
    Explanation,
    PromptEnd,
    PromptOutline,
)

from ..usage import all_tiers, miss_for_client

PIECE_ITEMS = 256
ADVICE: Final[Mapping[AdviceCode, str]] = {
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
"""What each kind of advice says: numbers only, never anything of a prompt. Messages are numbered from 1 here, as people
count; the field `message` is an index from 0."""


@attrs.frozen
class Reader:
    """Who reads an explanation."""

    tenant: str | None
    """None: an operator."""

    def sees(self, tenant: str) -> bool:
        return self.tenant in (None, tenant)

    def miss(self, miss: CacheMiss) -> CacheMiss:
        return miss if self.tenant is None else miss_for_client(miss)


def explanation_pieces(explanation: Explanation, reader: Reader, block_size: int) -> Iterator[bytes]:
    yield b'{"request_id":%b,"model":%b,"adapter":%b,"parent":%b,"state":"%b","usage":%b,"prompts":[' % (
        *map(orjson.dumps, (explanation.request_id, explanation.model, explanation.adapter, explanation.parent)),
        b"open" if explanation.is_open else b"closed",
        orjson.dumps(
            {
                "prompt_tokens": explanation.prompt_tokens,
                "cached_tokens": explanation.cached_tokens,
                "cached_tokens_by_tier": all_tiers(explanation.cached_tokens, explanation.cached_by_tier),
                "restored_tokens": explanation.restored_tokens,
                "recomputed_tokens": explanation.recomputed_tokens,
            }
        ),
    )
    for index, prompt in enumerate(explanation.prompts):
        if index:
            yield b","
        yield from _prompt_pieces(prompt, reader, block_size)
    yield b"]}"


def _prompt_pieces(prompt: ExplainedPrompt, reader: Reader, block_size: int) -> Iterator[bytes]:
    numbers = {
        "prompt_tokens": prompt.prompt_tokens,
        "cached_tokens": prompt.cached_tokens,
        "cached_tokens_by_tier": all_tiers(prompt.cached_tokens, prompt.cached_by_tier),
        "restored_tokens": prompt.restored_tokens,
        "recomputed_tokens": prompt.recomputed_tokens,
        "lost_to_rounding": lost_to_rounding(prompt),
    }
    yield orjson.dumps(numbers)[:-1] + b',"blocks":['
    yield from _list_pieces(map(_block, prompt.blocks))
    yield b'],"messages":['
    yield from _list_pieces(_messages(prompt.outline))
    ended = None if prompt.ended is None else _ended(prompt.ended, prompt.outline, reader)
    advice = [_advice(one, prompt.outline, block_size) for one in prompt.advice]
    yield b'],"ended":%b,"advice":%b}' % (orjson.dumps(ended), orjson.dumps(advice))


def _block(span: BlockSpan) -> dict[str, Any]:
    tier = None if span.tier is None else span.tier.value
    return {"start": span.start, "end": span.end, "source": span.source.value, "tier": tier}


def lost_to_rounding(prompt: ExplainedPrompt) -> int | None:
    """Return how many tokens could not be reused because only whole blocks are; None if that is unknown."""
    if prompt.ended is None or prompt.prompt_tokens is None or prompt.cached_tokens is None:
        return None
    miss = prompt.ended.miss
    match miss.reason:
        case MissReason.NONE | MissReason.TOO_SHORT:
            return prompt.prompt_tokens - prompt.cached_tokens
        case MissReason.DIVERGED | MissReason.OTHER_DOMAIN:
            return max(0, miss.token - prompt.cached_tokens)
        case _:
            return 0


def _list_pieces(values: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    rest = iter(values)
    comma = b""
    while some := list(islice(rest, PIECE_ITEMS)):
        yield comma + orjson.dumps(some)[1:-1]
        comma = b","


def _messages(outline: PromptOutline) -> Iterator[dict[str, Any]]:
    """Yield where each message lies; parts that come from no message have no index."""
    parts = map(outline.__getitem__, range(len(outline)))
    for (message, role), group in groupby(parts, key=lambda part: (part.message, part.role)):
        of_message = list(group)
        yield {"index": message, "role": role, "start": of_message[0].start, "end": of_message[-1].end}


def _ended(ended: PromptEnd, outline: PromptOutline, reader: Reader) -> dict[str, Any]:
    miss = reader.miss(ended.miss)
    part = outline.part_at(miss.token)
    return {
        "reason": miss.reason.value,
        "token": miss.token,
        "message": None if part is None else part.message,
        "part": None if part is None else part.part,
        "diverged_from": ended.diverged_from,
        "evicted": None if ended.evicted is None else _evicted(ended.evicted, reader),
    }


def _evicted(evicted: EvictedBlock, reader: Reader) -> dict[str, Any]:
    by = evicted.by
    return {
        "at": round(evicted.at, 3),
        "by": by.request_id if by is not None and reader.sees(by.tenant) else None,
        "idle_s": None if evicted.idle_s is None else round(evicted.idle_s, 3),
    }


def _advice(advice: Advice, outline: PromptOutline, block_size: int) -> dict[str, Any]:
    token = outline.start_of(advice.message) if advice.token is None else advice.token
    num_blocks = advice.num_blocks or 0
    without = "The list of tools" if advice.code is AdviceCode.KEYS_REORDERED else "The system prompt"
    place = without if advice.message is None else f"Message {advice.message + 1}"
    text = ADVICE[advice.code].format(place=place, num_blocks=num_blocks, num_tokens=num_blocks * block_size)
    return {"code": advice.code.value, "message": advice.message, "token": token, "text": text}
