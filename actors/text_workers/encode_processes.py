"""The processes that encode long texts, lent to the threads of the lane for long texts one at a time (`lanes.py`).

A process can be ended where a thread cannot: when its client leaves, when the server ends, and when a text took much
memory, which the library's allocator would keep. Each has its copy of the tokenizer, so one is kept and others are
started when they are needed. All methods but `Loan.stop` block: they are for threads.

What must always hold: a process serves one loan at a time; a stopped loan ends within a moment, whatever its process
does; after `close` none is left.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

import attrs
import structlog

from ..processes.child import OWN_GROUP, command_of
from ..shared.tokenizers_library import LibraryPanic
from ..tokenizer.encoder import TextEncoder
from .encode_worker import ANSWER, JOB, LENGTH, PIECE_LENGTH, Kind, What

log = structlog.get_logger()

MODULE = "quipu.actors.text_workers.encode_worker"
START_S = 60.0
"""How long an interpreter may take to start and to load a tokenizer, on a machine with other things to do."""
SPARE_S = 10.0
"""How long a process may be idle beside another."""
MAX_GROWTH_BYTES = 256 << 20
"""A process that holds so much more than after its start is not used again."""
PIECE_CHARACTERS = 1 << 18
"""Of a text that is encoded to UTF-8 at once: 1 ms at worst."""
PIECE_BYTES = 1 << 20
"""Of ids that are taken over at once."""

T = TypeVar("T")


class CannotStart(Exception):
    """No process is to be had: no memory, no descriptors, no time."""


class ProcessEnded(LibraryPanic):
    """The process died under a text: killed, or out of memory."""


class Loan:
    """One call's hold on a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: EncodeProcess | None = None
        self._is_stopped = False

    def stop(self) -> None:
        """Nobody wants the result any more: end the process, or see that none is taken. Does not block."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()

    def take(self, process: EncodeProcess) -> bool:
        """False: it has been stopped."""
        with self._lock:
            if not self._is_stopped:
                self._process = process
            return not self._is_stopped

    def give_back(self) -> None:
        with self._lock:
            self._process = None

    @property
    def is_stopped(self) -> bool:
        return self._is_stopped


@attrs.define
class _Idle:
    process: EncodeProcess
    since_s: float


class EncodeProcesses:
    """Starts processes, lends them out and ends them."""

    def __init__(self, encoder: TextEncoder, source: bytes) -> None:
        """`encoder`: the same tokenizer in this process. `source`: its `tokenizer.json`."""
        self._encoder = encoder
        self._source = source
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []
        self._all: set[EncodeProcess] = set()
        self._is_closed = False

    @property
    def process_ids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._all]

    @property
    def num_idle(self) -> int:
        """Processes that wait for a text."""
        with self._lock:
            return len(self._idle)

    def run(self, call: Callable[[TextEncoder], T], loan: Loan) -> T:
        """Have `call` use an encoder whose backend is a process of its own. Raises CannotStart, and what `call` does;
        once the loan is stopped, anything.

        Where a process ends that was idle before, `call` runs once more, with a new one: perhaps it had been killed.
        """
        process = self._take()
        try:
            return self._run_in(process, call, loan)
        except ProcessEnded:
            if not process.was_idle or loan.is_stopped:
                raise
        return self._run_in(self._start(), call, loan)

    def _run_in(self, process: EncodeProcess, call: Callable[[TextEncoder], T], loan: Loan) -> T:
        if not loan.take(process):
            self._put_back(process)
            raise CannotStart
        try:
            return call(attrs.evolve(self._encoder, backend=process))
        except ProcessEnded:
            if not loan.is_stopped:
                log.warning("encode_worker.died", pid=process.pid)
            raise
        finally:
            loan.give_back()
            self._put_back(process)

    def warm_up(self) -> None:
        """Start the first one. A failure is logged: the next call tries again."""
        with contextlib.suppress(CannotStart):
            self._put_back(self._take())

    def dismiss_spare(self) -> None:
        """End those that have been idle for long, but for one."""
        with self._lock:
            border = time.monotonic() - SPARE_S
            num_others = len(self._all) - 1
            spare = [idle for idle in self._idle if idle.since_s < border][:num_others]
            self._idle = [idle for idle in self._idle if idle not in spare]
        for idle in spare:
            self._end(idle.process)

    def close(self) -> None:
        """End all of them; no other is started."""
        with self._lock:
            self._is_closed = True
            self._idle.clear()
            doomed = list(self._all)
        for process in doomed:
            self._end(process)

    def _take(self) -> EncodeProcess:
        while True:
            with self._lock:
                if self._is_closed:
                    raise CannotStart
                idle = self._idle.pop() if self._idle else None
            if idle is None:
                return self._start()
            if idle.process.is_usable:
                idle.process.was_idle = True
                return idle.process
            self._end(idle.process)

    def _start(self) -> EncodeProcess:
        try:
            process = EncodeProcess()
        except OSError as error:
            log.error("encode_worker.not_started", error=type(error).__name__)
            raise CannotStart from error
        with self._lock:
            self._all.add(process)
            is_closed = self._is_closed
        try:
            if is_closed:
                raise CannotStart
            process.load(self._source)
        except (OSError, LibraryPanic) as error:
            self._end(process)
            log.error("encode_worker.not_started", error=type(error).__name__)
            raise CannotStart from error
        except CannotStart:
            self._end(process)
            raise
        return process

    def _put_back(self, process: EncodeProcess) -> None:
        with self._lock:
            is_wanted = not self._is_closed and process.is_usable and process.growth_bytes <= MAX_GROWTH_BYTES
            if is_wanted:
                self._idle.append(_Idle(process, time.monotonic()))
        if not is_wanted:
            self._end(process)

    def _end(self, process: EncodeProcess) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)


class EncodeProcess:
    """One process, as an `EncodingBackend` for the thread that it is lent to."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(  # noqa: S603 -- our own module
                command_of(MODULE),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=OWN_GROUP,
            )
        except BaseException:
            self._link.close()
            raise
        finally:
            theirs.close()
        self.was_idle = False
        """It has served before."""
        self._is_broken = False
        self._base_bytes = 0
        self.growth_bytes = 0
        """Memory that it holds, beyond what it held after its start."""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_usable(self) -> bool:
        """It lives, and the last exchange was whole."""
        return not self._is_broken and self._process.poll() is None

    def kill(self) -> None:
        """Does not block."""
        self._process.kill()

    def end(self) -> None:
        """Kill it and leave nothing of it."""
        self._process.kill()
        self._process.wait()
        self._link.close()

    def load(self, source: bytes) -> None:
        """Hand the tokenizer over. Raises OSError and LibraryPanic."""
        self._link.settimeout(START_S)
        self._link.sendall(LENGTH.pack(len(source)))
        self._link.sendall(source)
        self._receive_head()
        self._link.settimeout(None)
        self._base_bytes += self.growth_bytes
        self.growth_bytes = 0

    def encode(self, text: str, *, most: int, add_special_tokens: bool = True) -> array[int] | int:
        kind, number = self._ask(What.ENCODE, text, most=most, add_special_tokens=add_special_tokens)
        return number if kind is Kind.NUMBER else self._receive_ids(number)

    def encode_with_starts(self, text: str, *, most: int) -> tuple[array[int], array[int]] | int:
        kind, number = self._ask(What.ENCODE_WITH_STARTS, text, most=most)
        return number if kind is Kind.NUMBER else (self._receive_ids(number), self._receive_ids(number))

    def num_tokens_before(self, text: str, end: int) -> int:
        return self._ask(What.NUM_TOKENS_BEFORE, text, end=end)[1]

    def _ask(
        self, what: What, text: str, *, most: int = 0, end: int = 0, add_special_tokens: bool = True
    ) -> tuple[Kind, int]:
        try:
            self._link.sendall(JOB.pack(what, add_special_tokens, most, end))
            for start in range(0, len(text), PIECE_CHARACTERS):
                piece = text[start : start + PIECE_CHARACTERS].encode()
                self._link.sendall(PIECE_LENGTH.pack(len(piece)))
                self._link.sendall(piece)
            self._link.sendall(PIECE_LENGTH.pack(0))
            return self._receive_head()
        except OSError as error:
            self._is_broken = True  # its end of the link closes a moment before it can be waited for
            raise ProcessEnded("the process that encodes has ended") from error

    def _receive_head(self) -> tuple[Kind, int]:
        """Raises OSError and LibraryPanic."""
        kind, number, resident_bytes = ANSWER.unpack(self._receive(ANSWER.size))
        self.growth_bytes = resident_bytes - self._base_bytes
        if kind == Kind.PANIC:
            raise LibraryPanic(self._receive(number).decode())
        return Kind(kind), number

    def _receive_ids(self, number: int) -> array[int]:
        ids: array[int] = array("I")
        num_bytes = number * ids.itemsize
        try:
            for start in range(0, num_bytes, PIECE_BYTES):
                ids.frombytes(self._receive(min(PIECE_BYTES, num_bytes - start)))
        except OSError as error:
            self._is_broken = True
            raise ProcessEnded("the process that encodes has ended") from error
        return ids

    def _receive(self, num_bytes: int) -> bytearray:
        """Exactly so many bytes. Raises OSError."""
        data = bytearray(num_bytes)
        with memoryview(data) as rest:
            while num_bytes:
                received = self._link.recv_into(rest[-num_bytes:])
                if not received:
                    raise ConnectionResetError
                num_bytes -= received
        return data
