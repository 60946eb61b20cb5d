"""One process that checks grammars, seen from the web process.

Used by `grammar_pool.py`. The process runs `grammar_worker.py`, which documents the messages. What must always hold: an
exchange is complete, or the process is not used again.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import trio

from ..fleet.forks.fork_program import LENGTH, frame_of
from ..fleet.forks.fork_server import FATAL, Fork, ForkServer
from ..messages.grammar import GrammarSpec
from ..messages.outcomes import ErrorKind, RequestError
from ..threads import run_in_thread
from .exact_receive import receive_exactly


class ProcessGone(Exception):
    """The process has ended, or has not answered in time."""

    def __init__(self, exit_code: int | None) -> None:
        """`exit_code`: None if it had to be killed, or if it is not known."""
        super().__init__(f"exit code {exit_code}")
        self.exit_code = exit_code

    @property
    def was_slow(self) -> bool:
        """Whether its processor time was at an end."""
        return self.exit_code == -signal.SIGPROF

    def verdict(self, spec: GrammarSpec) -> RequestError | None:
        """Return what is wrong with the grammar that it was checking, None if that is unknown."""
        if self.was_slow:
            reason = "it takes too long to compile"
        elif self.exit_code is not None and -self.exit_code in FATAL:
            reason = "it ends the process that compiles it"
        else:
            return None
        return RequestError(ErrorKind.INVALID, f"Invalid value for `{spec.param}`: {reason}.", spec.param)


class GrammarProcess:
    """A process that has loaded the tokenizer. To be used by one task at a time."""

    def __init__(self, server: ForkServer, fork: Fork) -> None:
        self._server = server
        self._fork = fork
        fork.link.setblocking(False)
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(fork.link))
        self._is_broken = False

    @classmethod
    async def start(cls, server: ForkServer) -> GrammarProcess:
        """Have a process forked. Raises OSError."""
        return cls(server, await run_in_thread(server.fork))

    @property
    def pid(self) -> int:
        return self._fork.pid

    @property
    def is_usable(self) -> bool:
        """Whether its exchanges were complete, and it can be killed if another takes too long. It may have ended."""
        return not self._is_broken and self._server.is_usable

    async def check(self, spec: GrammarSpec, limit_s: float, timeout_s: float) -> str | RequestError:
        """Return the grammar as text for the engine, or why it is refused. Raises ProcessGone.

        `limit_s` is processor time.
        """
        answer = await self._exchange([spec.kind, spec.source, spec.param, limit_s], timeout_s)
        if "text" in answer:
            return str(answer["text"])
        return RequestError(ErrorKind.INVALID, answer["error"], spec.param)

    async def end(self) -> int | None:
        """Kill the process, whatever it is doing. Return its exit code, None if it had to be killed."""
        self._is_broken = True
        code = None
        with trio.CancelScope(shield=True):
            await trio.aclose_forcefully(self._stream)
            code = await run_in_thread(self._server.end_child, self._fork)
        return code

    async def _exchange(self, job: list[Any], timeout_s: float) -> dict[str, Any]:
        self._is_broken = True
        answer: dict[str, Any] = {}
        try:
            with trio.move_on_after(timeout_s) as scope:
                await self._stream.send_all(frame_of(json.dumps(job).encode()))
                (num_bytes,) = LENGTH.unpack(await receive_exactly(self._stream, LENGTH.size))
                answer = json.loads(await receive_exactly(self._stream, num_bytes))
                self._is_broken = False
        except (OSError, trio.BrokenResourceError, EOFError):
            raise ProcessGone(await self.end()) from None  # nothing but its end closes its socket
        if scope.cancelled_caught:
            raise ProcessGone(None)
        return answer
