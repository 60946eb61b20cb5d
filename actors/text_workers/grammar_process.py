"""One process that checks grammars, seen from the web process.

Used by `grammar_pool.py`. The process runs `grammar_worker.py`, which documents what crosses the socket. What must
always hold: an exchange is complete, or the process is not used again.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import attrs
import trio

from ..messages.grammar import GrammarSpec
from ..messages.outcomes import ErrorKind, RequestError
from .child_start import start_child
from .grammar_worker import LENGTH, WorkerSettings, frame_of

MODULE = "quipu.actors.text_workers.grammar_worker"
START_S = 60.0
"""How long an interpreter may take to start and load a tokenizer, on a busy machine."""
READ_BYTES = 1 << 18
_FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals by which a process ends itself."""


class ProcessGone(Exception):
    """The process has ended, or has not answered in time."""

    def __init__(self, exit_code: int | None) -> None:
        """`exit_code`: None if it had to be killed."""
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code

    def verdict(self, spec: GrammarSpec) -> RequestError | None:
        """Return what is wrong with the grammar that it was checking; None: nothing is known about it."""
        if self.exit_code == -signal.SIGPROF:
            reason = "it takes too long to compile"
        elif self.exit_code is not None and -self.exit_code in _FATAL:
            reason = "it ends the process that compiles it"
        else:
            return None
        return RequestError(ErrorKind.INVALID, f"Invalid value for `{spec.param}`: {reason}.", spec.param)


class GrammarProcess:
    """A process that has loaded the tokenizer. To be used by one task at a time."""

    def __init__(self, process: trio.Process, stream: trio.SocketStream) -> None:
        self._process = process
        self._stream = stream
        self._is_broken = False

    @classmethod
    async def start(cls, tokenizer_json: bytes, settings: WorkerSettings) -> GrammarProcess:
        """Start a process and have it load the tokenizer. Raises OSError and ProcessGone."""
        started = cls(*await start_child(MODULE))
        try:
            source = LENGTH.pack(len(tokenizer_json)), tokenizer_json, frame_of(attrs.asdict(settings))
            await started._exchange(source, START_S)
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """It is running, and its last exchange was complete."""
        return not self._is_broken and self._process.poll() is None

    async def check(self, spec: GrammarSpec, timeout_s: float) -> str | RequestError:
        """Return the grammar as text for the engine, or why it is refused. Raises ProcessGone."""
        answer = await self._exchange((frame_of([spec.kind, spec.source, spec.param]),), timeout_s)
        if "text" in answer:
            return str(answer["text"])
        return RequestError(ErrorKind.INVALID, answer["error"], spec.param)

    async def end(self) -> None:
        """Kill the process, whatever it is doing."""
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)
            self._process.kill()
            await self._process.wait()

    async def _exchange(self, frames: tuple[bytes, ...], timeout_s: float) -> dict[str, Any]:
        self._is_broken = True
        answer: dict[str, Any] = {}
        try:
            with trio.move_on_after(timeout_s) as scope:
                for frame in frames:
                    await self._stream.send_all(frame)
                (num_bytes,) = LENGTH.unpack(await self._receive(LENGTH.size))
                answer = json.loads(await self._receive(num_bytes))
                self._is_broken = False
        except (OSError, trio.BrokenResourceError, EOFError):
            raise ProcessGone(await self._process.wait()) from None  # nothing but its end closes its socket
        if scope.cancelled_caught:
            raise ProcessGone(None)
        return answer

    async def _receive(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            received = await self._stream.receive_some(min(READ_BYTES, num_bytes - len(data)))
            if not received:
                raise EOFError
            data += received
        return bytes(data)
