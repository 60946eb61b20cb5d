"""The engine's side of a process that follows one grammar. The process runs `mask_program.py`, which documents the
protocol.

What must always hold: an answer is never mistaken for the answer to another request; a process that has not answered in
full is not used again.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading

import attrs
import msgspec

from ...fleet.forks.fork_server import FATAL, Fork, ForkLink, ForkServer
from .mask_program import HAS_MASK, PENDING, SECONDS, Answer, Ask
from .mask_rows import RowAsk

COMPILING_S = 60.0
"""CPU time for compiling a grammar; compiling it for the web process took less."""
ANSWER_S = 120.0
"""Time after which a process that does not answer is given up; the limits on CPU time are far below."""
_UNKNOWN = "it does not fit the output"
"""Used instead of the reason that a killed process could not report."""


@attrs.frozen
class Lost:
    """The process ended, or was killed, before it answered."""

    reason: str | None
    """What was wrong with its computation; None if unknown."""


@attrs.frozen
class RowFound:
    """The masks of one sequence, as `mask_rows.FoundMasks` has them."""

    masks: list[bytes]
    forced: dict[int, list[int]]


class GrammarFollower:
    """A process with a grammar. Used by one thread at a time."""

    def __init__(self, server: ForkServer, text: str, max_masks: int) -> None:
        """Fork a process and have it compile a grammar. Raises OSError."""
        self._server = server
        self._mask_bytes = len(server.greeting)
        descriptor = os.memfd_create("masks")
        try:
            os.ftruncate(descriptor, max_masks * (1 + self._mask_bytes))
            self._shared = mmap.mmap(descriptor, 0)
            self._fork: Fork = server.fork(descriptor)
        finally:
            os.close(descriptor)
        self._link = ForkLink(self._fork, ANSWER_S)
        self._lock = threading.Lock()
        self.is_compiled = False
        self._refusal: str | None = None
        self._max_masks = max_masks
        self._num_masks: list[int] = []
        """Of each row that was asked for."""
        self.lost: Lost | None = None
        self._send(SECONDS.pack(COMPILING_S) + text.encode("utf-8", "surrogatepass"))

    @property
    def pid(self) -> int:
        return self._fork.pid

    def wait_until_compiled(self) -> str | None:
        """Wait until the grammar is compiled. Return the reason if it cannot be. May be called by several threads."""
        with self._lock:
            if not self.is_compiled and self.lost is None:
                answer = self._receive()
                self.is_compiled = True
                if answer:
                    self._refusal = answer.decode("utf-8", "replace")
            return self._refusal

    def ask(self, limit_s: float, gone: list[int], rows: list[RowAsk]) -> None:
        """Begin to compute masks, once the grammar is compiled."""
        self._num_masks = [1 + len(row.drafts) for row in rows]
        num_places = sum(self._num_masks)
        self._shared[:num_places] = bytes([PENDING]) * num_places
        self._send(msgspec.msgpack.encode(Ask(limit_s, gone, rows)))

    def masks(self) -> list[RowFound | str]:
        """Return the requested masks of each row, or the reason why there are none; of fewer if the process is lost."""
        data = self._receive()
        answer = Answer({}, {}) if data is None else msgspec.msgpack.decode(data, type=Answer)
        found: list[RowFound | str] = []
        place = 0
        for num_masks in self._num_masks:
            state = self._shared[place]
            if state == PENDING:
                break
            start, size = self._max_masks + place * self._mask_bytes, self._mask_bytes
            masks = [self._shared[at : at + size] for at in range(start, start + num_masks * size, size)]
            if state == HAS_MASK:
                forced = {num: answer.forced[place + num] for num in range(num_masks) if place + num in answer.forced}
                found.append(RowFound(masks, forced))
            else:
                found.append(answer.reasons.get(place, _UNKNOWN))
            place += num_masks
        return found

    def let_go(self) -> None:
        """Have the process exit as soon as it is idle."""
        self.lost = self.lost or Lost(None)
        self._link.close()

    def _send(self, data: bytes) -> None:
        if self.lost is None:
            try:
                self._link.send(data)
            except OSError:
                self._lose()

    def _receive(self) -> bytes | None:
        """Return the next frame, or None if the process is lost."""
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
