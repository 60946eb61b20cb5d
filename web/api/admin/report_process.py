"""One process that makes usage reports, seen from the web process.

The process runs `report_worker.py`, which documents what crosses the socket. What must always hold: an exchange is
complete, or the process is not used again; a report that nobody waits for is interrupted, also on a database server,
before its process is killed.
"""

from __future__ import annotations

import signal

import attrs
import trio

from quipu.actors.text_workers.child_start import start_child

from .report_worker import HEAD, Answer, Where, frame_of
from .reports import Report

MODULE = "quipu.web.api.admin.report_worker"
PIECE_BYTES = 1 << 16
"""Of a body, as it is received and sent on."""
INTERRUPT_S = 1.0
"""How long an interrupted process has to cancel its query on the database server."""


class ReportProcessGone(Exception):
    """The process has ended. The message says how."""


@attrs.frozen
class Answered:
    kind: Answer
    pieces: list[bytes]


class ReportProcess:
    """A process that can read the ledger. To be used by one task at a time."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self._process = process
        self._stream = stream
        self._is_ready = False
        self._is_broken = False

    @classmethod
    async def start(cls, where: Where) -> ReportProcess:
        """Start a process and wait until it can make reports. Raises OSError and ReportProcessGone."""
        started = cls(*await start_child(MODULE))
        try:
            await started._exchange(frame_of(where))
            started._is_ready = True
        finally:
            if not started._is_ready:
                await started.end()
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """Whether it is running and its last exchange was complete."""
        return not self._is_broken and self._process.poll() is None

    async def make(self, report: Report) -> Answered:
        """Raises ReportProcessGone."""
        return await self._exchange(frame_of(report))

    async def end(self) -> None:
        """Interrupt the process if it is making a report, then kill it."""
        with trio.CancelScope(shield=True):
            if self._is_ready and self._is_broken:
                self._process.send_signal(signal.SIGINT)
                with trio.move_on_after(INTERRUPT_S):
                    await self._process.wait()
            await trio.aclose_forcefully(self._stream)
            self._process.kill()
            await self._process.wait()

    async def _exchange(self, frame: bytes) -> Answered:
        self._is_broken = True
        try:
            await self._stream.send_all(frame)
            kind, num_bytes = HEAD.unpack(b"".join(await self._receive(HEAD.size)))
            answered = Answered(Answer(kind), await self._receive(num_bytes))
        except (OSError, trio.BrokenResourceError, EOFError):
            # nothing but its end closes its socket
            code = await self._process.wait()
            raise ReportProcessGone(f"the process that reads the ledger ended with exit code {code}") from None
        self._is_broken = False
        return answered

    async def _receive(self, num_bytes: int) -> list[bytes]:
        pieces: list[bytes] = []
        while num_bytes:
            piece = await self._stream.receive_some(min(PIECE_BYTES, num_bytes))
            if not piece:
                raise EOFError
            pieces.append(bytes(piece))
            num_bytes -= len(piece)
        return pieces
