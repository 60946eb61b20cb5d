"""One demanding client: sends whole requests, reads whole responses, and reports their statuses.

It runs in a separate process with a lower priority than the server and the monitor: in reality it would be another
machine, so the processor time that it takes here must not be attributed to the server.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs

NICENESS = 10
PATIENCE_S = 90.0
"""Requests without a response by then get status 0."""


@attrs.frozen
class RawRequest:
    """The bytes to send."""

    data: bytes
    is_complete: bool = True
    """False: do not wait for a response; keep the connection open until the row ends."""
    disconnect_after_s: float | None = None
    """When the client disconnects, with or without a response."""


def run_attack(port: int, requests: Sequence[RawRequest], concurrency: int) -> list[int]:
    """Send everything, at most `concurrency` at a time; return the statuses, 0 for requests without a response."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_attack, args=(port, requests, concurrency, writer))
    process.start()
    writer.close()
    try:
        statuses: list[int] = reader.recv()
    except EOFError:
        statuses = [0]
    process.join()
    return statuses


@attrs.define(eq=False)
class _Open:
    sock: socket.socket
    left: memoryview
    raw: RawRequest
    index: int
    began_s: float
    head: bytes = b""
    held: bool = False


def _attack(port: int, requests: Sequence[RawRequest], concurrency: int, writer: Connection) -> None:
    os.nice(NICENESS)
    statuses = [0] * len(requests)
    waiting = list(enumerate(requests))[::-1]
    poll = select.epoll()
    open_by_fd: dict[int, Any] = {}
    deadline_s = time.perf_counter() + PATIENCE_S
    held: list[socket.socket] = []

    def end(descriptor: int, one: _Open) -> None:
        words = one.head.split(b" ", 2)
        statuses[one.index] = int(words[1]) if len(words) > 2 and words[1].isdigit() else 0
        poll.unregister(descriptor)
        one.sock.close()
        del open_by_fd[descriptor]

    while (waiting or open_by_fd) and time.perf_counter() < deadline_s:
        while waiting and len(open_by_fd) < concurrency:
            index, raw = waiting.pop()
            try:
                sock = socket.create_connection(("127.0.0.1", port), timeout=5)
            except OSError:
                continue
            sock.setblocking(False)
            open_by_fd[sock.fileno()] = _Open(sock, memoryview(raw.data), raw, index, time.perf_counter())
            poll.register(sock, select.EPOLLIN | select.EPOLLOUT)
        for descriptor, events in poll.poll(0.02):
            one = open_by_fd[descriptor]
            try:
                if events & select.EPOLLOUT and one.left:
                    one.left = one.left[one.sock.send(one.left[: 1 << 18]) :]
                    if not one.left:
                        poll.modify(descriptor, select.EPOLLIN)
                        if not one.raw.is_complete:
                            poll.unregister(descriptor)
                            held.append(one.sock)
                            del open_by_fd[descriptor]
                            continue
                if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                    data = one.sock.recv(1 << 18)
                    one.head = (one.head + data)[:64]
                    if not data:
                        end(descriptor, one)
            except BlockingIOError:
                pass
            except OSError:
                end(descriptor, one)
        now_s = time.perf_counter()
        for descriptor, one in list(open_by_fd.items()):
            if one.raw.disconnect_after_s is not None and now_s - one.began_s > one.raw.disconnect_after_s:
                end(descriptor, one)
    if held:
        time.sleep(2.0)  # held while the monitor measures
    for sock in held:
        sock.close()
    writer.send(statuses)
