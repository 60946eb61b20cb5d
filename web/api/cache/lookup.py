"""`POST /v1/cache/lookup`: what of a request's prompts is cached now, and where that ends.

The request is written as a line of a batch file: `url` and `body`. It is read, rendered, encoded and keyed as for being
served, and then looked up in the engine that would serve it. No account is opened. With `prefetch`, the engine begins
to load what it finds in lower tiers; otherwise no cache is changed.

What must always hold: a client learns of its own tenant's cache only, and of the salt that it names; the numbers are
those that the request would report if it were admitted now.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from quart import Response
from quart_trio import QuartTrio

from quipu.actors.config.declarations import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from quipu.actors.messages.block_manager import MissReason
from quipu.actors.messages.tiers import Tier
from quipu.actors.messages.tokenizer import Encode
from quipu.actors.request_desk.interface import Desk, PromptLookUp
from quipu.actors.tokenizer.message_spans import span_at

from ...options import AppOptions
from ...request.errors import bad_value, unknown_parameter
from ...request.request_context import current_request_context
from ..answer import Reader, read_reply
from ..anthropic.routes import read_message
from ..bodies import take_body
from ..fields import Fields, missing, parse_object, read_boolean, wrong_type
from ..json_structure import MAX_CHAT_VALUES, MAX_VALUES
from ..openai.routes import read_chat, read_completion
from ..operation import route
from ..usage import all_tiers, miss_for_client
from ..whole_response import whole_response
from .cache_schemas import LOOKED_UP, LOOKUP, PREFETCH

ENDPOINT = "/v1/cache/lookup"
_BEGINS_WITH_COMPLETIONS = re.compile(rb'\s*\{\s*"url"\s*:\s*"/v1/completions"\s*,')
_READERS: Mapping[str, Reader] = {
    CHAT: read_chat,
    COMPLETIONS: read_completion,
    MESSAGES: read_message,
}


def install_lookup(app: QuartTrio, desk: Desk, options: AppOptions, read_response: Reader) -> None:
    """Register the endpoint. `read_response` reads the bodies of responses, with what they continue."""
    readers = {**_READERS, RESPONSES: read_response}

    @route(app, f"POST {ENDPOINT}", LOOKUP)
    async def look_up() -> Response:
        request, prefetch = await _read(desk, options, readers)
        found = await desk.look_up(request, prefetch=prefetch)
        del request
        return await whole_response(_pieces(found, time.time()))


async def _read(desk: Desk, options: AppOptions, readers: Mapping[str, Reader]) -> tuple[Encode, bool]:
    """Return the current request as the endpoint that it names would serve it, and `prefetch`. Raises APIError."""
    data, share = await take_body()
    # only a completion may have as many values as a prompt has token ids
    has_ids = _BEGINS_WITH_COMPLETIONS.match(data) is not None
    parsed = await parse_object(data, share.grow, MAX_VALUES if has_ids else MAX_CHAT_VALUES)
    del data
    fields = Fields(parsed)
    url = fields.text("url")
    read = readers.get(url)
    if read is None:
        raise bad_value("url", f"must be one of {', '.join(readers)}")
    if has_ids and url != COMPLETIONS:
        raise bad_value("url", "must be given once")
    if fields.get("method") not in (None, "POST"):
        raise bad_value("method", "must be `POST`")
    prefetch = parsed.get(PREFETCH) is not None and read_boolean(parsed[PREFETCH], PREFETCH)
    for name in parsed.keys() - LOOKED_UP.by_name.keys():
        raise unknown_parameter(name[:64])
    body = parsed.get("body")
    if body is None:
        raise missing("body")
    if type(body) is not dict:
        raise wrong_type("body", "an object")
    del parsed, fields
    reply, context = await read_reply(url, read, body, desk, options, share.grow), current_request_context()
    return reply.wanted.encode(context.request_id, context.principal.tenant), prefetch


def _pieces(found: Sequence[PromptLookUp], now: float) -> Iterator[bytes]:
    yield b'{"prompts":['
    for index, prompt in enumerate(found):
        yield (b"," if index else b"") + orjson.dumps(_described(prompt, now))
    yield b"]}"


def _described(found: PromptLookUp, now: float) -> dict[str, Any]:
    lower = found.num_tokens_by_tier
    by_tier = {Tier.DEVICE.value: found.num_cached_tokens - sum(lower.values()), **lower}
    return {
        "prompt_tokens": found.num_prompt_tokens,
        "cached_tokens": found.num_cached_tokens,
        "cached_tokens_by_tier": all_tiers(found.num_cached_tokens, by_tier),
        "prefetching_tokens": found.prefetching_tokens,
        "engine": found.engine_id,
        "pinned_until": None if found.pinned_for_s is None else int(now + found.pinned_for_s),
        "ends_at": _end(found),
    }


def _end(found: PromptLookUp) -> dict[str, Any] | None:
    """Return where and why the cached prefix ends; None if all that may be reused is cached."""
    miss = miss_for_client(found.miss)
    if miss.reason is MissReason.NONE:
        return None
    span = span_at(found.spans, miss.token)
    return {
        "token": miss.token,
        "message": None if span is None else span.message,
        "part": None if span is None else span.part,
        "reason": miss.reason.value,
    }
