"""A program that loads something once, and then forks a child whenever it is asked to.

`fork_server.py` starts it and uses its children. A fork takes milliseconds, starting an interpreter and loading a
tokenizer a second, and what was loaded is in memory once. So children may be killed at any time, which is the only way
to stop a library that computes without end.

    request  b"f" and the number of descriptors that come with it: fork a child that serves them. The answer is its
             process id; 0: it cannot be forked
             b"k" and a process id: kill that child, if it has not ended. The answer is its exit code, or UNKNOWN

What must always hold: this process has one thread when it forks; it ends when its parent does; only its own children
are killed; a child that it forked ends with `os._exit`, whatever its work raises.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO

REQUEST = struct.Struct("<cq")
ANSWER = struct.Struct("<q")
LENGTH = struct.Struct("<Q")
FORK, KILL = b"f", b"k"
UNKNOWN = 1 << 32
"""Instead of an exit code: there is no such child, or it ended well."""
MAX_KEPT_STATUSES = 1024
MAX_DESCRIPTORS = 2

Serve = Callable[[list[int]], None]
"""Serves the socket that is the first of some descriptors, in a child of its own, until the other end closes it."""


def become_server(memory_bytes: int) -> socket.socket:
    """Limit the memory of this process and its children, and return the socket to the parent on standard input."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return socket.socket(fileno=os.dup(0))


def serve_forks(link: socket.socket, serve: Serve) -> None:
    """Fork children as they are asked for, until the parent is gone."""
    gc.collect()
    gc.freeze()  # what was loaded stays where it is: no child's collection touches, and so copies, it
    _Forks(link, serve).run()


class _Forks:
    def __init__(self, link: socket.socket, serve: Serve) -> None:
        self._link = link
        self._serve = serve
        self._running: set[int] = set()
        self._statuses: OrderedDict[int, int] = OrderedDict()
        """Exit codes other than 0 of children that nobody has asked about, the latest last."""

    def run(self) -> None:
        wakes, wake = socket.socketpair()
        for end in (wakes, wake):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            while True:
                ready, _, _ = select.select([self._link, wakes], [], [])
                if wakes in ready:
                    with suppress(BlockingIOError):
                        wakes.recv(4096)
                    self._reap()
                if self._link in ready and not self._answer((wakes, wake)):
                    return
        finally:
            signal.set_wakeup_fd(-1)  # a child that ends after this writes to no closed socket

    def _answer(self, own: tuple[socket.socket, socket.socket]) -> bool:
        """Answer one request. False: the parent is gone."""
        data, descriptors, _, _ = socket.recv_fds(self._link, REQUEST.size, MAX_DESCRIPTORS)
        while len(data) < REQUEST.size:
            received = self._link.recv(REQUEST.size - len(data)) if data else b""
            if not received:
                return False
            data += received
        kind, number = REQUEST.unpack(data)
        if kind == KILL:
            answer = self._kill(number)
        else:
            answer = self._fork(descriptors, own) if len(descriptors) == number else 0
        for descriptor in descriptors:
            os.close(descriptor)
        self._link.sendall(ANSWER.pack(answer))
        return True

    def _fork(self, descriptors: list[int], own: tuple[socket.socket, socket.socket]) -> int:
        try:
            pid = os.fork()
        except OSError:
            pid = -1
        if pid == 0:
            self._become_child(descriptors, own)
        if pid > 0:
            self._running.add(pid)
        return max(0, pid)

    def _become_child(self, descriptors: list[int], own: tuple[socket.socket, socket.socket]) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)  # which is the link, too: the parent must see its end when the program ends
            for end in (self._link, *own):
                end.close()
            self._serve(descriptors)
            code = 0
        except (EOFError, ConnectionError):  # the parent is gone, or needs this child no more
            code = 0
        finally:
            os._exit(code)

    def _kill(self, pid: int) -> int:
        if pid in self._running:
            os.kill(pid, signal.SIGKILL)  # which changes nothing for one that is ending already
            self._note(*os.waitpid(pid, 0))
        return self._statuses.pop(pid, UNKNOWN)

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                self._note(pid, status)

    def _note(self, pid: int, status: int) -> None:
        self._running.discard(pid)
        if code := os.waitstatus_to_exitcode(status):
            self._statuses[pid] = code
            if len(self._statuses) > MAX_KEPT_STATUSES:
                self._statuses.popitem(last=False)


def read_frame(stream: BinaryIO) -> bytes:
    """Return what comes after its length. Raises EOFError."""
    return read_exactly(stream, LENGTH.unpack(read_exactly(stream, LENGTH.size))[0])


def frame_of(data: bytes) -> bytes:
    return LENGTH.pack(len(data)) + data


def read_exactly(stream: BinaryIO, num_bytes: int) -> bytes:
    """Return the next bytes. Raises EOFError if there are fewer."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        raise EOFError
    return data
