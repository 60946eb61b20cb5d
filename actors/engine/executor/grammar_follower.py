"""One process that follows one grammar, seen from the engine. It runs `mask_program.py`, which documents the protocol.

What must always hold: an answer is never taken for that to an earlier question; a process that has not answered in full
is not used again.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading

import attrs
import msgspec

from ...fleet.forks.fork_server import FATAL, Fork, ForkLink, ForkServer
from .mask_program import HAS_MASK, PENDING, SECONDS, Ask
from .mask_rows import RowAsk

COMPILING_S = 60.0
"""Processor time to compile a grammar: the web process has had it compiled in less."""
ANSWER_S = 120.0
"""How long a process may not answer: the limits of processor time are far below it."""
_UNKNOWN = "it does not fit the output"
"""Instead of a reason that a process could not tell any more."""


@attrs.frozen
class Lost:
    """The process has ended, or has been killed, before it has answered."""

    reason: str | None
    """What was wrong with what it computed; None: nothing is known about that."""


class GrammarFollower:
    """A process that has been given a grammar. One thread at a time asks it."""

    def __init__(self, server: ForkServer, text: str, max_rows: int) -> None:
        """Have a process forked and compile a grammar. Raises OSError."""
        self._server = server
        self._mask_bytes = len(server.greeting)
        descriptor = os.memfd_create("masks")
        try:
            os.ftruncate(descriptor, max_rows * (1 + self._mask_bytes))
            self._shared = mmap.mmap(descriptor, 0)
            self._fork: Fork = server.fork(descriptor)
        finally:
            os.close(descriptor)
        self._link = ForkLink(self._fork, ANSWER_S)
        self._lock = threading.Lock()
        self.is_compiled = False
        self._refusal: str | None = None
        self._max_rows = max_rows
        self._num_rows = 0
        self.lost: Lost | None = None
        self._send(SECONDS.pack(COMPILING_S) + text.encode("utf-8", "surrogatepass"))

    @property
    def pid(self) -> int:
        return self._fork.pid

    def wait_until_compiled(self) -> str | None:
        """Wait for the grammar to be compiled. Return why it cannot be. May be called by several threads."""
        with self._lock:
            if not self.is_compiled and self.lost is None:
                answer = self._receive()
                self.is_compiled = True
                if answer:
                    self._refusal = answer.decode("utf-8", "replace")
            return self._refusal

    def ask(self, limit_s: float, gone: list[int], rows: list[RowAsk]) -> None:
        """Begin to compute masks, once the grammar is compiled."""
        self._shared[: len(rows)] = bytes([PENDING]) * len(rows)
        self._send(msgspec.msgpack.encode(Ask(limit_s, gone, rows)))
        self._num_rows = len(rows)

    def masks(self) -> list[bytes | str]:
        """Return the masks that were asked for, or why there is none; fewer if the process is lost."""
        answer = self._receive()
        reasons = {} if answer is None else msgspec.msgpack.decode(answer, type=dict[int, str])
        masks: list[bytes | str] = []
        for place in range(self._num_rows):
            state = self._shared[place]
            if state == PENDING:
                break
            start = self._max_rows + place * self._mask_bytes
            has_mask = state == HAS_MASK
            masks.append(self._shared[start : start + self._mask_bytes] if has_mask else reasons.get(place, _UNKNOWN))
        return masks

    def let_go(self) -> None:
        """Have the process end as soon as it computes nothing."""
        self.lost = self.lost or Lost(None)
        self._link.close()

    def _send(self, data: bytes) -> None:
        if self.lost is None:
            try:
                self._link.send(data)
            except OSError:
                self._lose()

    def _receive(self) -> bytes | None:
        """Return the next frame. None: the process is lost."""
        if self.lost is None:
            try:
                return self._link.receive()
            except OSError:
                self._lose()
        return None

    def _lose(self) -> None:
        self._link.close()
        code = self._server.end_child(self._fork)
        if code == -signal.SIGPROF:
            self.lost = Lost("it takes too long")
        elif code is not None and -code in FATAL:
            self.lost = Lost("it ends the process that computes it")
        else:
            self.lost = Lost(None)
