"""Clients that connect, send a request and vanish at random moments, and a steady client whose events are the clock.

Time is counted in events that a steady client reads (a token per step), so a moment is a point in the engine's work,
independent of the machine's load. The clients' behaviour is generated from one seed.
"""

from __future__ import annotations

import json
import random
import socket
import struct

import attrs
import trio

from tests.e2e.prompts import token_prompt
from tests.e2e.servers import Server

TRAILERS = (
    b"\r\n",
    b"\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x00\xff garbage",
    b"POST /v1/compl",
)


class EventClock:
    """Counts the events that the steady client reads, and lets others wait for a count."""

    def __init__(self) -> None:
        self._now = 0
        self._waiting: list[tuple[int, trio.Event]] = []

    def advance(self, by: int) -> None:
        self._now += by
        for _, event in [w for w in self._waiting if w[0] <= self._now]:
            event.set()
        self._waiting = [w for w in self._waiting if w[0] > self._now]

    async def wait(self, num_events: int) -> None:
        event = trio.Event()
        self._waiting.append((self._now + num_events, event))
        await event.wait()


@attrs.frozen
class Behaviour:
    """How one client behaves."""

    arrives: int
    """Events to wait before it connects."""
    stream: bool
    sends: float
    """Fraction of the request that it sends."""
    trailer: bytes
    """Bytes sent after the request: even then the server must notice that the client disconnects."""
    reads: int
    """Bytes of a stream that it reads before it leaves; always fewer than the whole stream."""
    lingers: int
    """Events to wait afterwards without reading."""
    leaves: str
    """`close`, `reset`, or `half`: it shuts down its sending side and waits for the server to close."""


def draw_behaviours(seed: int, num_clients: int, num_events: int) -> list[Behaviour]:
    """Draw how clients behave that arrive during `num_events` events of the steady client."""
    rng = random.Random(seed)
    return [
        Behaviour(
            arrives=rng.randrange(num_events),
            stream=rng.random() < 0.7,
            sends=rng.random() if rng.random() < 0.2 else 1.0,
            trailer=rng.choice(TRAILERS) if rng.random() < 0.3 else b"",
            reads=rng.choice((0, 0, 0, 1, 500, 3000, 8000)),
            lingers=rng.choice((0, 0, 1, 3, 10, 40)),
            leaves=rng.choice(("close", "close", "reset", "half")),
        )
        for _ in range(num_clients)
    ]


def request_bytes(prompt: list[int], *, stream: bool, max_tokens: int) -> bytes:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


async def read_steadily(server: Server, clock: EventClock) -> None:
    """Act as a client that reads as fast as it can until cancelled."""
    async with await trio.open_tcp_stream(*server.address) as stream:
        await stream.send_all(request_bytes(token_prompt("steady", 20), stream=True, max_tokens=5000))
        while data := await stream.receive_some(65536):
            clock.advance(data.count(b"data: "))
    raise AssertionError("the steady client's stream ended")


async def vanish(server: Server, clock: EventClock, index: int, behaviour: Behaviour) -> None:
    await clock.wait(behaviour.arrives)
    # some share prefixes, so that blocks of clients that left are hit by others
    prompt = token_prompt(f"vanishing {index % 20}", 20 + 37 * (index % 11))
    request = request_bytes(prompt, stream=behaviour.stream, max_tokens=60 + index % 200)
    async with await trio.open_tcp_stream(*server.address) as stream:
        try:
            await stream.send_all(request[: int(len(request) * behaviour.sends)])
            if behaviour.sends == 1.0:
                await stream.send_all(behaviour.trailer)
                num_read, wanted = 0, behaviour.reads if behaviour.stream else min(behaviour.reads, 200)
                while num_read < wanted and (data := await stream.receive_some(1000)):
                    num_read += len(data)
            await clock.wait(behaviour.lingers)
            if behaviour.leaves == "half":
                await stream.send_eof()
                while await stream.receive_some(65536):
                    pass
        except trio.BrokenResourceError:
            pass  # the server may close the connection because of garbage after a request
        if behaviour.leaves == "reset":
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
