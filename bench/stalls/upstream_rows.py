"""Rows of requests that are passed on to an upstream: large bodies, and upstreams that answer whatever they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bench.stalls.attack import RawRequest
from bench.stalls.row_parts import CHAT, COMPLETIONS, MEBIBYTE, Row, chat, completion, one, posted, said, text_of
from bench.stalls.upstream import MODEL, STREAMS

SERVER = "passing"
CLIENTS = 4


def _asked(answer: str) -> dict[str, Any]:
    return chat([said("Hi.")], model=MODEL, user=answer, stream=answer in STREAMS)


def _text(num_bytes: int) -> dict[str, Any]:
    return chat([said(text_of(num_bytes))], model=MODEL, stream_options={"include_usage": False})


def _fields(num_fields: int) -> Callable[[int], Sequence[RawRequest]]:
    """Send a body that has many fields of its own."""

    def make(port: int) -> Sequence[RawRequest]:
        many = b"".join(b'"%d":0,' % number for number in range(num_fields))
        head = b'{"model":"%b","prompt":"Hello.","user":"small events",' % MODEL.encode()
        return [RawRequest(posted(port, COMPLETIONS, head + many + b'"stream":true,"stream_options":{}}'))] * CLIENTS

    return make


def _answered(name: str, answer: str) -> Row:
    return Row(f"upstream: {name}", one(CHAT, lambda: _asked(answer), CLIENTS), CLIENTS, SERVER)


UPSTREAM_ROWS: Sequence[Row] = (
    Row("passed on: chat of 8 MB", one(CHAT, lambda: _text(8 * MEBIBYTE - 500), CLIENTS), CLIENTS, SERVER),
    Row(
        "passed on: a million token ids",
        one(COMPLETIONS, lambda: completion([7] * 1_000_000, model=MODEL), CLIENTS),
        CLIENTS,
        SERVER,
    ),
    Row("passed on: 500,000 fields", _fields(500_000), CLIENTS, SERVER),
    Row("upstream: half a million blocks", one(CHAT, lambda: _asked("blocks"), 2), server="following"),
    Row("upstream: half a million at once", one(CHAT, lambda: _asked("blocks at once"), 2), server="following"),
    _answered("100,000 small events", "small events"),
    _answered("bare events", "bare events"),
    _answered("50 MB of large events", "large events"),
    _answered("line of 1 MB", "line"),
    _answered("line without an end", "endless"),
    _answered("event of many lines", "lines"),
    _answered("event of many choices", "values"),
    _answered("event of many fields", "members"),
    _answered("chunks of one byte", "bytes"),
    _answered("whole text of 7 MB", "text"),
    _answered("two million choices", "choices"),
    _answered("usage of 6 MB", "usage"),
    _answered("600,000 fields", "many members"),
)
