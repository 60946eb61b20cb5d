"""Which fields of a request's body a server knows, found by asking it: no table of the code is read.

Every word of the source is sent as a field, many at a time, with a value that no field takes. What the server names in
`X-Quipu-Ignored-Fields` it does not know; the others it refuses, with a code that is kept, or accepts. Used by
`wire_names.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

import attrs
import httpx

Body = dict[str, Any]
HEADER = "X-Quipu-Ignored-Fields"
AT_ONCE = 16
"""As many as the header names."""
ODD = {"no_field": 1}
"""Neither a number, a text, a list, nor an object that means something."""
USER = {"role": "user", "content": "x"}
CALL = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
TEXT = {"type": "text", "text": "x"}


@attrs.frozen
class Place:
    """An object of a body, and how the server writes the path to it."""

    api: str
    path: str
    fill: Callable[[Body], Body]
    """The body whose object has these fields."""


def _messages(*messages: Body) -> Body:
    return {"messages": list(messages)}


PLACES = (
    Place("completions", "", lambda odd: {"prompt": "x", **odd}),
    Place("completions", "stream_options.", lambda odd: {"prompt": "x", "stream": True, "stream_options": odd}),
    Place("chat/completions", "", lambda odd: {**_messages(USER), **odd}),
    Place("chat/completions", "messages[0].", lambda odd: _messages({**USER, **odd})),
    Place("chat/completions", "messages[0].content[0].", lambda odd: _messages({**USER, "content": [{**TEXT, **odd}]})),
    Place("responses", "", lambda odd: {"input": "x", **odd}),
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


def request_fields(url: str, words: Iterable[str]) -> dict[str, list[str]]:
    """By place, the fields that are known, each with what becomes of an odd value in it."""
    with httpx.Client(base_url=url, timeout=30) as http:
        return {f"/v1/{place.api} {place.path}".strip(): _known(http, place, list(words)) for place in PLACES}


def _known(http: httpx.Client, place: Place, words: list[str]) -> list[str]:
    known = []
    waiting = [words[start : start + AT_ONCE] for start in range(0, len(words), AT_ONCE)]
    while waiting:
        batch = waiting.pop()
        response = _ask(http, place, batch)
        ignored = {unquote(path) for path in response.headers.get(HEADER, "").split(",")}
        if response.status_code == 200 and "…" not in ignored:
            rest = [word for word in batch if f"{place.path}{word}" not in ignored]
            known += [f"{word}: accepted" for word in rest]
            continue
        error = response.json()["error"]
        culprit = _named(error, place.path, batch) if response.status_code == 400 else None
        if culprit is None:
            assert len(batch) > 1, response.text
            waiting += [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        else:
            known.append(f"{culprit}: {error.get('code', error['type'])}")
            waiting.append([word for word in batch if word != culprit])
    return sorted(known)


def _ask(http: httpx.Client, place: Place, batch: list[str]) -> httpx.Response:
    limit = "max_output_tokens" if place.api == "responses" else "max_tokens"
    body = {"model": "demo", limit: 1, **place.fill(dict.fromkeys(batch, ODD))}
    return http.post(f"/v1/{place.api}", json=body)


def _named(error: Body, path: str, batch: list[str]) -> str | None:
    """The field that an error is about; the only one there is, where it does not say."""
    quoted = re.findall(r"`([^`]+)`", error["message"])
    for param in [error.get("param") or "", *quoted]:
        first = re.split(r"[.\[]", param.removeprefix(path))[0]
        if param.startswith(path) and first in batch:
            return first
    return batch[0] if len(batch) == 1 else None
