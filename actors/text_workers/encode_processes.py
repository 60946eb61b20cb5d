"""The pool of processes that encode long texts, each leased to one thread at a time (`lanes.py`).

Unlike a thread, a process can be killed: when its client leaves, when the server stops, and when a text took so much
memory that the library's allocator would keep it. Each has its own copy of the tokenizer, so one is kept running and
others are started as needed. All methods except `Lease.cancel` block: call them in threads.

What must always hold: a process serves one lease at a time; a cancelled lease ends promptly, whatever its process is
doing; after `close` no process is left.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import attrs
import structlog

from ..shared.tokenizers_library import LibraryPanic
from ..tokenizer.encoder import TextEncoder
from ..tokenizer.encoding_errors import WorkerUnavailable
from .encode_process import EncodeProcess, ProcessDied

log = structlog.get_logger()

IDLE_S = 10.0
"""How long a process may be idle while there is another."""
MAX_GROWTH_BYTES = 256 << 20
"""A process that has grown by more than this since it started is not reused."""

T = TypeVar("T")


@attrs.define(eq=False)
class Lease:
    is_cancelled: bool = False
    _process: EncodeProcess | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def cancel(self) -> None:
        """Kill the process, or prevent the lease from taking one. Does not block."""
        with self._lock:
            self.is_cancelled = True
            if self._process is not None:
                self._process.kill()

    def attach(self, process: EncodeProcess) -> bool:
        """Hold `process`. Return False if the lease has been cancelled."""
        with self._lock:
            if not self.is_cancelled:
                self._process = process
            return not self.is_cancelled

    def detach(self) -> None:
        with self._lock:
            self._process = None


@attrs.define
class _Idle:
    process: EncodeProcess
    since_s: float


class EncodeProcesses:
    def __init__(self, encoder: TextEncoder, source: bytes) -> None:
        """`encoder` is the same tokenizer in this process, `source` its `tokenizer.json`."""
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
        with self._lock:
            return len(self._idle)

    def run(self, call: Callable[[TextEncoder], T], lease: Lease) -> T:
        """Run `call` with an encoder whose backend is a process.

        If a process that was idle before dies, `call` runs once more with a new one: it may have been dead already.
        Raises WorkerUnavailable and what `call` raises; once the lease is cancelled, any exception.
        """
        process = self._take()
        try:
            return self._run_in(process, call, lease)
        except ProcessDied:
            if not process.was_idle or lease.is_cancelled:
                raise
        return self._run_in(self._start(), call, lease)

    def _run_in(self, process: EncodeProcess, call: Callable[[TextEncoder], T], lease: Lease) -> T:
        if not lease.attach(process):
            self._put_back(process)
            raise WorkerUnavailable
        try:
            return call(attrs.evolve(self._encoder, backend=process))
        except ProcessDied:
            if not lease.is_cancelled:
                log.warning("encode_worker.died", pid=process.pid)
            raise
        finally:
            lease.detach()
            self._put_back(process)

    def warm_up(self) -> None:
        """Start the first process. A failure is logged, and the next call tries again."""
        with contextlib.suppress(WorkerUnavailable):
            self._put_back(self._take())

    def end_idle(self) -> None:
        """End the processes that have been idle for `IDLE_S`, but keep one."""
        with self._lock:
            idle_since = time.monotonic() - IDLE_S
            num_others = len(self._all) - 1
            ended = [idle for idle in self._idle if idle.since_s < idle_since][:num_others]
            self._idle = [idle for idle in self._idle if idle not in ended]
        for idle in ended:
            self._end(idle.process)

    def close(self) -> None:
        """End all processes. No other is started afterwards."""
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
                    raise WorkerUnavailable
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
            raise WorkerUnavailable from error
        with self._lock:
            self._all.add(process)
            is_closed = self._is_closed
        if is_closed:
            self._end(process)
            raise WorkerUnavailable
        try:
            process.load(self._source)
        except (OSError, LibraryPanic) as error:
            self._end(process)
            if not self._is_closed:  # otherwise `close` has ended it
                log.error("encode_worker.not_started", error=type(error).__name__)
            raise WorkerUnavailable from error
        return process

    def _put_back(self, process: EncodeProcess) -> None:
        with self._lock:
            is_kept = not self._is_closed and process.is_usable and process.growth_bytes <= MAX_GROWTH_BYTES
            if is_kept:
                self._idle.append(_Idle(process, time.monotonic()))
        if not is_kept:
            self._end(process)

    def _end(self, process: EncodeProcess) -> None:
        process.end()
        with self._lock:
            self._all.discard(process)
