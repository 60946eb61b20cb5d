"""Answers of an upstream, drawn by number: heads, framings, bodies and counts that no server should send.

`upstream.py` sends them for `bench.stalls --fuzz`, and `tests/actors/fleet/upstreams/test_drawn_answers.py` a few
hundred in the test command. The same number gives the same answer everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import attrs

ODD_NUMBERS: Sequence[Any] = (
    0,
    -1,
    1,
    2**31,
    2**53 - 1,
    2**63,
    10**30,
    1.5,
    1e300,
    True,
    None,
    "7",
    [],
    {},
    "x" * 2000,
)
NAMES = (
    "prompt_tokens",
    "completion_tokens",
    "total_tokens",
    "cached_tokens",
    "prompt_cache_hit_tokens",
    "cache_read_input_tokens",
    "cache_creation_input_tokens",
)
ODD_HEADERS: Sequence[bytes] = (
    b"Location: //p@/x",
    b"Location: http://[::1/",
    b"Set-Cookie: caf\xc3\xa9=1",
    b"Set-Cookie: a=" + b"x" * 4000,
    b"Content-Encoding: gzip",
    b"Content-Encoding: \xff",
    b"Content-Type: \xff/\x80",
    b"Content-Type: text/event-stream; charset=utf-16",
    b"Retry-After: \xe9",
    b"Retry-After: -1e9",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity",
    b"Content-Length: 0",
    b"Content-Length: 99999999999999999999",
    b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: websocket",
    b"Trailer: x",
    b"X:" + b" y" * 20_000,
    b" folded: x",
    b"no colon",
    b": empty",
    b"X: \x00",
    b"\xff: x",
)
STATUSES = (b"200 OK",) * 12 + (
    b"200",
    b"201 Created",
    b"204 No Content",
    b"302 Found",
    b"304 Not Modified",
    b"400 Bad",
    b"401 Who",
    b"407 Proxy",
    b"429 Slow",
    b"499 \xff",
    b"503 Busy",
    b"599 X",
    b"700 X",
    b"99 X",
    b"101 Switching",
    b"-1 X",
)


@attrs.frozen
class DrawnAnswer:
    data: bytes
    closes: bool
    """Whether the connection has to be closed, since it is not clear where the answer ends."""


def drawn_answer(number: int, *, streams: bool) -> DrawnAnswer:
    """Return the bytes that follow a request."""
    chooser = random.Random(number)
    body = b"".join(_events(chooser)) if streams else _whole(chooser)
    if chooser.random() < 0.2:
        body = _broken(chooser, body)
    headers = [b"Content-Type: " + (b"text/event-stream" if streams else b"application/json")]
    if chooser.random() < 0.4:
        headers[chooser.randrange(2) :] = [chooser.choice(ODD_HEADERS)]
    framing = chooser.choice((_sized, _sized, _chunked, _unframed, _too_short, _too_long, _broken_chunks))
    framed, header, closes = framing(chooser, body)
    status = chooser.choice(STATUSES)
    before = b"HTTP/1.1 103 Hints\r\nLink: x\r\n\r\n" * chooser.choice((0, 0, 0, 0, 1, 40))
    head = b"\r\n".join([b"HTTP/1.1 " + status, *headers, *header])
    data = before + head + b"\r\n\r\n" + framed
    if chooser.random() < 0.1:
        data += b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"more"'
    if chooser.random() < 0.05:
        data, closes = _broken(chooser, data), True
    return DrawnAnswer(data, closes or len(headers) > 1 or headers[0] in ODD_HEADERS or status != b"200 OK")


def _usage(chooser: random.Random) -> Any:
    if chooser.random() < 0.1:
        return chooser.choice(ODD_NUMBERS)
    numbers = [*ODD_NUMBERS, *range(200)]
    usage: dict[str, Any] = {name: chooser.choice(numbers) for name in NAMES if chooser.random() < 0.5}
    for details in ("prompt_tokens_details", "completion_tokens_details"):
        if chooser.random() < 0.4:
            names = ("cached_tokens", "cache_write_tokens", "reasoning_tokens")
            inside: Any = {name: chooser.choice(numbers) for name in names if chooser.random() < 0.7}
            usage[details] = chooser.choice((inside, inside, inside, None, 7, []))
    return usage


def _choices(chooser: random.Random, name: str) -> Any:
    reasons = ("stop", "length", None, None, "", "x" * 5000, 7, "tool_calls")
    choices: list[dict[str, Any]] = [
        {"index": chooser.choice((0, 0, 0, 1, -1, 10**20, None)), name: {"content": "Hi"}}
        for _ in range(chooser.randrange(3))
    ]
    for choice in choices:
        if chooser.random() < 0.8:
            choice["finish_reason"] = chooser.choice(reasons)
    return chooser.choice((choices, choices, choices, choices, choices, None, {}, [None], 7))


def _message(chooser: random.Random, name: str) -> bytes:
    message: dict[str, Any] = {"id": "x", "choices": _choices(chooser, name)}
    if chooser.random() < 0.5:
        message["usage"] = _usage(chooser)
    if chooser.random() < 0.05:
        message["error"] = chooser.choice((None, {}, "no", {"message": "no", "code": 500}))
    return json.dumps(message, ensure_ascii=chooser.random() < 0.5).encode()


def _whole(chooser: random.Random) -> bytes:
    return _message(chooser, "message")


def _events(chooser: random.Random) -> list[bytes]:
    lines = (
        b": wait\n\n",
        b": wait\n",
        b":\n\n",
        b"event: x\n",
        b"id: 1\nretry: 5\n\n",
        b"\n\n",
        b"data:\n\n",
        b"data: :x\n\n",
    )
    events = []
    for _ in range(chooser.randrange(5)):
        if chooser.random() < 0.3:
            events.append(chooser.choice(lines))
        events.append(b"data: " + _message(chooser, "delta") + chooser.choice((b"\n\n", b"\r\n\r\n", b"\n\n", b"\n")))
    if chooser.random() < 0.7:
        events.append(b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n')
    if chooser.random() < 0.7:
        events.append(b"data: [DONE]\n\n")
    return events


def _broken(chooser: random.Random, data: bytes) -> bytes:
    """Change some bytes, cut it off, or both."""
    changed = bytearray(data)
    for _ in range(chooser.randrange(4)):
        if changed:
            changed[chooser.randrange(len(changed))] = chooser.randrange(256)
    return bytes(changed[: chooser.randrange(len(changed) + 1)] if chooser.random() < 0.5 else changed)


_Framed = tuple[bytes, list[bytes], bool]


def _sized(chooser: random.Random, body: bytes) -> _Framed:
    return body, [b"Content-Length: %d" % len(body)], False


def _unframed(chooser: random.Random, body: bytes) -> _Framed:
    return body, [], True


def _too_short(chooser: random.Random, body: bytes) -> _Framed:
    return body, [b"Content-Length: %d" % (len(body) // 2)], False


def _too_long(chooser: random.Random, body: bytes) -> _Framed:
    return body, [b"Content-Length: %d" % (len(body) + 10)], True


def _chunked(chooser: random.Random, body: bytes) -> _Framed:
    size = chooser.choice((1, 7, 1000))
    chunks = [body[start : start + size] for start in range(0, len(body), size)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return framed + b"0\r\n\r\n", [b"Transfer-Encoding: chunked"], False


def _broken_chunks(chooser: random.Random, body: bytes) -> _Framed:
    framed, header, _ = _chunked(chooser, body)
    return _broken(chooser, framed), header, True
