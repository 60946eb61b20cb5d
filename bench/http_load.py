"""A cheap load generator for OpenAI-compatible servers: prompts of token ids in, arrival times of events out.

Used by `bench.peers`, `bench.engine_overhead`, `bench.request_budget` and `bench.stalls`. All requests of a call are
sent at once over separate connections. Every event with a choice counts as one token, whatever its text: random weights
produce incomplete characters.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any

import attrs

PATIENCE_S = 600.0
COMPLETIONS = "/v1/completions"


def free_port() -> int:
    """Return a port on loopback that is currently unused."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class LoadFailed(Exception):
    """A server did not respond as expected; the message quotes what it sent."""


class NeverTogether(LoadFailed):
    """One stream ended before another began, or all tokens were read at once."""


@attrs.frozen
class Answer:
    """When one request was sent and when its tokens arrived, on the same clock."""

    sent_s: float
    tokens_s: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        """Time to first token."""
        return self.tokens_s[0] - self.sent_s


@attrs.define(eq=False)
class EventCounter:
    """Counts the events of a stream that arrives in arbitrary pieces."""

    is_done: bool = False
    _rest: bytes = b""
    _is_body: bool = False

    def feed(self, received: bytes) -> int:
        """Return how many tokens these bytes complete. Raises LoadFailed if the response is not an event stream."""
        data = self._rest + received
        if not self._is_body:
            head, found, data = data.partition(b"\r\n\r\n")
            if not found:
                self._rest = head
                return 0
            if not head.split(b"\r\n", 1)[0].split(b" ")[1:2] == [b"200"]:
                raise LoadFailed((head + data).decode("utf-8", "replace")[-500:])
            self._is_body = True
        *lines, self._rest = data.split(b"\n")
        num_tokens = 0
        for line in lines:
            if line.startswith(b"data: [DONE]"):
                self.is_done = True
            elif line.startswith(b"data:") and b'"choices"' in line:
                num_tokens += _is_token(json.loads(line[5:]))
            elif line.startswith(b"data:") and b'"error"' in line:
                raise LoadFailed(line.decode("utf-8", "replace")[:500])
        return num_tokens


def _is_token(event: dict[str, Any]) -> bool:
    """Return whether an event carries a token: not only usage, a role, or an empty last chunk."""
    if not event["choices"]:
        return False
    choice = event["choices"][0]
    if "delta" in choice:
        return bool(choice["delta"].get("content"))
    return "token" in choice or bool(choice.get("text")) or not choice["finish_reason"]


def request_of(port: int, body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    """Return the bytes of a request, with `Connection: close`."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(payload), payload)


def completion(model: str, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the body that all servers are sent: greedy, streamed, and with exactly `max_tokens` output tokens."""
    fields = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True}
    return fields | {"ignore_eos": True, "min_tokens": max_tokens}


def ask_all(port: int, bodies: Sequence[dict[str, Any]], path: str = COMPLETIONS) -> list[Answer]:
    """Send all requests at once and read the responses to the end. Raises LoadFailed."""
    poll, answers = select.epoll(), []
    open_socks: dict[int, Any] = {}
    try:
        requests = [request_of(port, body, path) for body in bodies]
        for index, request in enumerate(requests):
            sock = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            open_socks[sock.fileno()] = (index, sock, EventCounter(), [])
            sent_s = time.perf_counter()
            sock.sendall(request)
            sock.setblocking(False)
            poll.register(sock, select.EPOLLIN)
            answers.append(sent_s)
        tokens: dict[int, list[float]] = {}
        deadline = time.perf_counter() + PATIENCE_S
        while open_socks:
            ready = poll.poll(1.0)
            now_s = time.perf_counter()
            if now_s > deadline:
                raise LoadFailed(f"{len(open_socks)} streams have not ended after {PATIENCE_S:.0f} s")
            for descriptor, _ in ready:
                index, sock, counter, times_s = open_socks[descriptor]
                received = sock.recv(1 << 18)
                times_s += [now_s] * counter.feed(received)
                if counter.is_done or not received:
                    if not counter.is_done or not times_s:
                        raise LoadFailed("a stream ended early")
                    tokens[index] = times_s
                    poll.unregister(descriptor)
                    sock.close()
                    del open_socks[descriptor]
    finally:
        for _, sock, _, _ in open_socks.values():
            sock.close()
        poll.close()
    return [Answer(sent_s, tuple(tokens[index])) for index, sent_s in enumerate(answers)]


def decode_rate(answers: Sequence[Answer]) -> float:
    """Return tokens per second over all streams, counted only while every stream decodes. Raises NeverTogether."""
    begin_s = max(answer.tokens_s[0] for answer in answers)
    end_s = min(answer.tokens_s[-1] for answer in answers)
    num_tokens = sum(begin_s < at_s <= end_s for answer in answers for at_s in answer.tokens_s)
    if num_tokens == 0:
        raise NeverTogether("the streams never decoded at the same time: use longer outputs")
    return num_tokens / (end_s - begin_s)
