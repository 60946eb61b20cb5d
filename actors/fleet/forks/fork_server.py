"""A process that forks children, seen from the process that uses them.

Used by the executor (masks of grammars) and by `text_workers/` (grammars that are checked), which talk to each child
over a socket of its own. `fork_program.py` documents the requests. Calls block, for milliseconds once the process has
started; any thread may make them.

What must always hold: if no child was forked, no descriptor is left open; after `end`, neither the process nor any of
its children is left, whatever they are doing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress

import attrs

from .fork_program import ANSWER, FORK, KILL, REQUEST, UNKNOWN, frame_of, read_frame

START_S = 60.0
"""How long an interpreter may take to start and load a tokenizer, on a busy machine."""
ANSWER_S = 10.0
FATAL = (signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV)
"""Signals by which a process ends itself."""
_ONE_THREAD = "import os; os.environ['OPENBLAS_NUM_THREADS'] = '1'"
"""numpy would start a thread for each processor, and only a process without any can be forked safely."""


@attrs.frozen
class Fork:
    """A child, and the socket over which it is served."""

    pid: int
    link: socket.socket


class ForkServer:
    def __init__(self, process: subprocess.Popen[bytes], link: socket.socket) -> None:
        self._process = process
        self._link = link
        self._lock = threading.Lock()
        self._has_failed = False
        self.greeting = b""
        """What the program has said when it had loaded."""

    @classmethod
    def start(cls, module: str, *frames: bytes, niceness: int = 0) -> ForkServer:
        """Run the program `module`, send it frames, and wait until it has loaded them. Raises OSError."""
        ours, theirs = socket.socketpair()
        code = f"{_ONE_THREAD}; os.nice({niceness}); from {module} import main; main()"
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 - our own program
                    [sys.executable, "-P", "-c", code],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        server = cls(process, ours)
        try:
            ours.settimeout(START_S)
            for frame in frames:
                ours.sendall(frame_of(frame))
            with ours.makefile("rb") as stream:
                server.greeting = read_frame(stream)
            ours.settimeout(ANSWER_S)
        except EOFError:
            server.end()
            raise OSError(f"{module} has ended") from None
        except BaseException:
            server.end()
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """It is running, and has answered so far."""
        return not self._has_failed and self._process.poll() is None

    def fork(self, *shared: int) -> Fork:
        """Fork a child, which gets copies of these descriptors too. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = self._ask(FORK, 1 + len(shared), (theirs.fileno(), *shared))
                if not pid:
                    raise OSError("no process can be forked")
            except BaseException:
                ours.close()
                raise
        return Fork(pid, ours)

    def end_child(self, fork: Fork) -> int | None:
        """End a child, whatever it is doing. Return the exit code with which it had failed; None: not known."""
        code = UNKNOWN
        with suppress(OSError):
            code = self._ask(KILL, fork.pid)
        return None if code == UNKNOWN else code

    def end(self) -> None:
        """Kill the process and all of its children."""
        self._has_failed = True
        self._link.close()
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ask(self, kind: bytes, number: int, passed: tuple[int, ...] = ()) -> int:
        with self._lock:
            try:
                socket.send_fds(self._link, [REQUEST.pack(kind, number)], passed)
                answer = b""
                while len(answer) < ANSWER.size:
                    received = self._link.recv(ANSWER.size - len(answer))
                    if not received:
                        raise ConnectionError("the process that forks has ended")
                    answer += received
            except OSError:  # or half an answer: what comes next could not be told from it
                self._has_failed = True
                raise
        return int(ANSWER.unpack(answer)[0])


class ForkLink:
    """Frames to and from one child. To be used by one thread at a time."""

    def __init__(self, fork: Fork, timeout_s: float) -> None:
        self.fork = fork
        fork.link.settimeout(timeout_s)
        self._stream = fork.link.makefile("rb")

    def send(self, data: bytes) -> None:
        """Raises OSError if the child has ended, or does not read."""
        self.fork.link.sendall(frame_of(data))

    def receive(self) -> bytes:
        """Return the next frame. Raises OSError if the child has ended, or does not answer."""
        try:
            return read_frame(self._stream)
        except EOFError:
            raise ConnectionError("the child has ended") from None

    def close(self) -> None:
        """Have the child end as soon as it reads."""
        self._stream.close()
        self.fork.link.close()
