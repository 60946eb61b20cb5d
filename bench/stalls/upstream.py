"""A small upstream with the OpenAI API, whose answers a client chooses: `python -m bench.stalls.upstream`.

It prints its port, and that on which it publishes KV events (`published_blocks.py`), and serves until it is killed, in
a process of its own with a lower priority, as another machine would. The field `user` of a request names one of
`ANSWERS`, or the number of a drawn one (`drawn_answers.py`); any other request gets a short one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import partial

import trio

from bench.stalls.drawn_answers import drawn_answer
from bench.stalls.published_blocks import BlockPublisher

MODEL = "far"
NICENESS = 10
MEBIBYTE = 1 << 20
KEPT_BYTES = 4096
"""Of a body at least so many bytes are looked at, at the beginning and at the end."""
_USER = re.compile(rb'"user": ?"([a-z ]+)"')
_DRAWN = re.compile(rb'"user": ?"drawn ([0-9]{1,9})"')
_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_SAID = b'{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9}'
_CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'
_END = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
_WHOLE = b'{"choices":[{"index":0,"message":{"content":"%b"},"finish_reason":"stop"}%b],"usage":%b%b}'


def _events(text: bytes, times: int) -> Iterator[bytes]:
    """Yield a stream of equal events, in parts of about 64 KiB."""
    event = _CHUNK % text
    per_part = max(1, 65_536 // len(event))
    for _ in range(0, times, per_part):
        yield event * per_part
    yield _END


def _bare_events() -> Iterator[bytes]:
    for _ in range(20):
        yield b"data:{}\n\n" * 7_000
    yield _END


def _line() -> Iterator[bytes]:
    yield _CHUNK % (b"x" * MEBIBYTE)
    yield _END


def _values() -> Iterator[bytes]:
    """Yield an event with as many choices as fit into it."""
    yield _CHUNK % b"Hi."
    yield b'data: {"choices":[' + b"{}," * (600 * 1024) + b"{}]}\n\n"
    yield _END


def _members() -> Iterator[bytes]:
    yield _CHUNK % b"Hi."
    yield (
        b'data: {"choices":[],' + b",".join(b'"%d":0' % number for number in range(150_000)) + b',"usage":{"a":1}}\n\n'
    )
    yield _END


def _endless() -> Iterator[bytes]:
    yield _CHUNK % b"Hi."
    for _ in range(64):
        yield b"x" * MEBIBYTE


def _lines_of_an_event() -> Iterator[bytes]:
    yield _CHUNK % b"Hi."
    for _ in range(32):
        yield b"data:\n" * 10_000
    yield _END


def _whole(text: bytes = b"", choices: bytes = b"", usage: bytes = _SAID, members: bytes = b"") -> Iterator[bytes]:
    yield _WHOLE % (text, choices, usage, members)


def _many_members() -> Iterator[bytes]:
    return _whole(members=b"".join(b',"%d":0' % number for number in range(600_000)), usage=b'{"prompt_tokens":-1}')


STREAMS: Mapping[str, partial[Iterator[bytes]]] = {
    "hello": partial(_events, b"Hello.", 1),
    "small events": partial(_events, b"a", 100_000),
    "bare events": partial(_bare_events),
    "large events": partial(_events, b"x" * 50_000, 1_000),
    "line": partial(_line),
    "values": partial(_values),
    "members": partial(_members),
    "endless": partial(_endless),
    "lines": partial(_lines_of_an_event),
    "bytes": partial(_events, b"a", 3_000),
}
WHOLES: Mapping[str, partial[Iterator[bytes]]] = {
    "short": partial(_whole, text=b"Hello."),
    "blocks": partial(_whole, text=b"Hello."),
    "blocks at once": partial(_whole, text=b"Hello."),
    "text": partial(_whole, text=b"word " * (7 * MEBIBYTE // 5)),
    "choices": partial(_whole, choices=b",{}" * (7 * MEBIBYTE // 3)),
    "usage": partial(_whole, usage=b'{"prompt_tokens":[' + b"[]," * (2 * MEBIBYTE) + b"1]}"),
    "many members": partial(_many_members),
}
IN_BYTES = "bytes"
"""This stream comes in chunks of one byte, as many at once as there is room for."""
PUBLISHED = {"blocks": False, "blocks at once": True}
"""Before these answers, KV events are published: in one batch or not."""
ANSWERS = (*STREAMS, *WHOLES)


async def main() -> None:
    """Serve until killed."""
    os.nice(NICENESS)
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        publisher = BlockPublisher()
        print(listener.socket.getsockname()[1], publisher.port, flush=True)
        await trio.serve_listeners(partial(_serve, publisher), [listener], handler_nursery=nursery)


async def _serve(publisher: BlockPublisher, stream: trio.SocketStream) -> None:
    try:
        async with stream:
            data = bytearray()
            while await _read_request(stream, data):
                if (found := _DRAWN.search(data)) is not None:
                    drawn = drawn_answer(int(found[1]), streams=_streams(data))
                    await stream.send_all(drawn.data)
                    if drawn.closes:
                        return
                else:
                    if (at_once := PUBLISHED.get(_answer_to(data))) is not None:
                        publisher.publish(at_once=at_once)
                    await _answer(stream, data)
                data.clear()
    except* (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the server under test has had enough of it


async def _read_request(stream: trio.SocketStream, data: bytearray) -> bool:
    """Read one request, of which the first and last bytes are kept; return False at the end of the connection."""
    while (end := data.find(b"\r\n\r\n")) < 0:
        if not (received := await stream.receive_some()):
            return False
        data += received
    found = _LENGTH.search(data, 0, end)
    num_left = (0 if found is None else int(found[1])) - (len(data) - end - 4)
    while num_left > 0:
        if not (received := await stream.receive_some(MEBIBYTE)):
            return False
        num_left -= len(received)
        if len(data) < KEPT_BYTES or num_left < KEPT_BYTES:
            data += received
    return True


async def _answer(stream: trio.SocketStream, request: bytearray) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n"
    if request.startswith(b"GET "):
        body = b'{"data":[{"id":"%b"}]}' % MODEL.encode()
        await stream.send_all(head % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body)
        return
    name = _answer_to(request)
    if name in WHOLES:
        body = b"".join(WHOLES[name]())
        await stream.send_all(head % b"application/json" + b"content-length: %d\r\n\r\n" % len(body) + body)
        return
    await stream.send_all(head % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
    for part in STREAMS[name]():
        if name == IN_BYTES:
            await stream.send_all(b"".join(b"1\r\n%c\r\n" % byte for byte in part))
        else:
            await stream.send_all(b"%x\r\n%b\r\n" % (len(part), part))
    await stream.send_all(b"0\r\n\r\n")


def _answer_to(request: bytearray) -> str:
    found = _USER.search(request)
    if found is not None and found[1].decode() in ANSWERS:
        return found[1].decode()
    return "hello" if _streams(request) else "short"


def _streams(request: bytearray) -> bool:
    try:
        return json.loads(request.partition(b"\r\n\r\n")[2])["stream"] is True
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


if __name__ == "__main__":
    trio.run(main)
