"""Find out which fields of a request body the server knows by sending requests: no table in the code is read.

Every word of the source code is sent as a field, many at a time, with a value that no field accepts. Fields that the
response names in `X-Quipu-Ignored-Fields` are unknown; the others are rejected, with a code that is recorded, or
accepted. Requests go to the app directly, in front of a desk without an engine: nothing is generated, and there is no
socket. The header may list all fields of a request here: within its usual limits there would be ten times as many
requests. Used by `wire_names.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock
from urllib.parse import unquote

import attrs
import trio
from structlog.testing import capture_logs

from quipu.web.api import ignored_fields
from quipu.web.app import make_app
from tests.web.asgi_client import Client, Exchange
from tests.web.fakes import INFO, FakeDesk

Body = dict[str, Any]
HEADER = "x-quipu-ignored-fields"
MAX_FIELDS = 240
"""As many as are compared with what an object may have, next to those that it needs."""
INVALID_VALUE = {"no_field": 1}
"""Not a number, a string, a list or a meaningful object."""
USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
TEXT = {"type": "text", "text": "x"}
FUNCTION = {"name": "f", "arguments": "{}"}


@attrs.frozen
class Place:
    """An object in a body, and the path under which the server reports it."""

    api: str
    path: str
    fill: Callable[[Body], Body]
    """Makes a body whose object has the given fields."""


def _messages(*messages: Body) -> Body:
    return {"messages": list(messages)}


PLACES = (
    Place("completions", "", lambda odd: {"prompt": "x", **odd}),
    Place("completions", "stream_options.", lambda odd: {"prompt": "x", "stream": True, "stream_options": odd}),
    Place("chat/completions", "", lambda odd: {**_messages(USER), **odd}),
    Place("chat/completions", "prompt_cache_options.", lambda odd: {**_messages(USER), "prompt_cache_options": odd}),
    Place("chat/completions", "messages[0].", lambda odd: _messages({**USER, **odd})),
    Place("chat/completions", "messages[0].content[0].", lambda odd: _messages({**USER, "content": [{**TEXT, **odd}]})),
    Place(
        "chat/completions",
        "messages[0].tool_calls[0].",
        lambda odd: _messages({"role": "assistant", "tool_calls": [{"id": "t", "function": FUNCTION, **odd}]}, USER),
    ),
    Place("responses", "", lambda odd: {"input": "x", **odd}),
    Place("responses", "reasoning.", lambda odd: {"input": "x", "reasoning": odd}),
    Place("responses", "text.", lambda odd: {"input": "x", "text": odd}),
    Place("responses", "prompt_cache_options.", lambda odd: {"input": "x", "prompt_cache_options": odd}),
    Place("responses", "input[0].", lambda odd: {"input": [{**USER, **odd}]}),
    Place(
        "responses",
        "input[0].content[0].",
        lambda odd: {"input": [{**USER, "content": [{"type": "input_text", "text": "x", **odd}]}]},
    ),
    Place("messages", "", lambda odd: {**_messages(USER), **odd}),
    Place("messages", "metadata.", lambda odd: {**_messages(USER), "metadata": odd}),
    Place("messages", "output_config.", lambda odd: {**_messages(USER), "output_config": odd}),
    Place("messages", "thinking.", lambda odd: {**_messages(USER), "thinking": {"type": "disabled", **odd}}),
    Place("messages", "tool_choice.", lambda odd: {**_messages(USER), "tool_choice": {"type": "auto", **odd}}),
    Place("messages", "cache_control.", lambda odd: {**_messages(USER), "cache_control": {"type": "ephemeral", **odd}}),
    Place("messages", "messages.0.", lambda odd: _messages({**USER, **odd})),
    Place("messages", "messages.0.content.0.", lambda odd: _messages({**USER, "content": [{**TEXT, **odd}]})),
    Place(
        "messages",
        "messages.1.content.0.",
        lambda odd: _messages(
            USER, {"role": "assistant", "content": [{**CALL, **odd}]}, {"role": "user", "content": [RESULT]}
        ),
    ),
    Place("messages", "system.0.", lambda odd: {**_messages(USER), "system": [{**TEXT, **odd}]}),
    Place("messages", "tools.0.", lambda odd: {**_messages(USER), "tools": [{"name": "f", "input_schema": {}, **odd}]}),
)


def request_fields(words: Iterable[str]) -> dict[str, list[str]]:
    """Return the known fields by place, each with the outcome of an odd value."""
    desk = FakeDesk(info=attrs.evolve(INFO, model_names=("demo",)))
    client = Client(make_app(desk))

    async def ask_everywhere() -> dict[str, list[str]]:
        return {f"/v1/{place.api} {place.path}".strip(): await _known(client, place, list(words)) for place in PLACES}

    limits = mock.patch.multiple(ignored_fields, MAX_NAMES=MAX_FIELDS, MAX_HEADER_BYTES=1 << 20)
    with limits, capture_logs():  # the log is of no interest
        return trio.run(ask_everywhere)


async def _known(client: Client, place: Place, words: list[str]) -> list[str]:
    known = []
    batches = [words[start : start + MAX_FIELDS] for start in range(0, len(words), MAX_FIELDS)]
    while batches:
        batch = batches.pop()
        exchange, answer = await _ask(client, place, batch)
        ignored = {unquote(path) for path in exchange.headers.get(HEADER, "").split(",")}
        if exchange.status == 200 and "…" not in ignored:
            rest = [word for word in batch if f"{place.path}{word}" not in ignored]
            known += [f"{word}: accepted" for word in rest]
            continue
        rejected = _named(answer["error"], place.path, batch) if exchange.status == 400 else None
        if rejected is None:
            assert len(batch) > 1, answer
            batches += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        elif len(batch) == 1:
            known.append(f"{rejected}: {answer['error'].get('code', answer['error']['type'])}")
        else:  # alone, for some fields have an effect only beside others, which chance puts into one batch
            batches += [[rejected], [word for word in batch if word != rejected]]
    return sorted(known)


async def _ask(client: Client, place: Place, batch: list[str]) -> tuple[Exchange, Any]:
    """Send a body with these fields; return the exchange and its JSON, or None for a stream."""
    limit = "max_output_tokens" if place.api == "responses" else "max_tokens"
    body = {"model": "demo", limit: 1, **place.fill(dict.fromkeys(batch, INVALID_VALUE))}
    async with client.open("POST", f"/v1/{place.api}", body) as exchange:
        is_stream = await exchange.wait_started() == 200 and "event-stream" in exchange.headers["content-type"]
        data = await exchange.read()
        return exchange, None if is_stream else json.loads(data)


def _named(error: Body, path: str, batch: list[str]) -> str | None:
    """Return the field that an error is about; if it does not say, the only one sent."""
    quoted = re.findall(r"`([^`]+)`", error["message"])
    for param in [error.get("param") or "", *quoted]:
        first = re.split(r"[.\[]", param.removeprefix(path))[0]
        if param.startswith(path) and first in batch:
            return first
    return batch[0] if len(batch) == 1 else None
