"""Writes log lines in a thread, so that code that logs never waits for the log's reader, nor fails with it.

Set up by `web/telemetry/logs.py` and, in the engine process, by `engine_server.py`: lines of JSON, or text if stderr is
a terminal. They wait in a bounded queue; those that do not fit, or cannot be written, are dropped and counted.

What must always hold: `put` neither blocks nor raises; lines are written in order, each of them completely unless
writing fails; error lines find room when the queue is full for others; values of local variables, which may quote a
client, never reach a log.
"""

from __future__ import annotations

import errno
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Any

import orjson
import structlog

from ...shared.terminals import has_colors

MAX_BYTES = 4 << 20
ERROR_BYTES = 1 << 20
"""Additional room for error lines."""
LINGER_S = 1.0
"""How long a process that ends waits for its last lines to be written."""
RETRY_S = 0.05
"""Longest wait before a non-blocking descriptor that is not writable is tried again."""


def standard_error() -> int:
    """Return its descriptor, or -1 if this process was started without one: number 2 may be a client's socket."""
    return -1 if sys.stderr is None else sys.stderr.fileno()


class LogWriter:
    """A queue of lines for one file descriptor, and the thread that writes them."""

    def __init__(self, fileno: int) -> None:
        self._fileno = fileno
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._lock = threading.Lock()
        self._has_lines = threading.Condition(self._lock)
        self._is_empty = threading.Condition(self._lock)
        self._is_writing = False
        self.num_dropped = 0
        self._thread: threading.Thread | None = None
        self._start()

    def put(self, line: bytes, *, is_error: bool = False) -> None:
        """Queue a line, which must end with a line break."""
        with self._lock:
            if self._num_bytes + len(line) > MAX_BYTES + (ERROR_BYTES if is_error else 0):
                self.num_dropped += 1
                return
            self._lines.append(line)
            self._num_bytes += len(line)
            if self._thread is None:
                self._start()
            self._has_lines.notify()

    def _start(self) -> None:
        """Start the thread. If there is none at the moment, lines wait for the next one that is put."""
        thread = threading.Thread(target=self._run, name="log writer", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return
        self._thread = thread

    def say(self, message: str) -> None:
        """Queue a plain-text message of the command itself."""
        self.put(f"quipu: {message}\n".encode("utf-8", "replace"), is_error=True)

    def drain(self, timeout_s: float = LINGER_S) -> None:
        """Wait until everything is written, for at most `timeout_s`."""
        with self._lock:
            self._is_empty.wait_for(lambda: not self._lines and not self._is_writing, timeout_s)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._is_writing = False
                if not self._lines:
                    self._is_empty.notify_all()
                self._has_lines.wait_for(lambda: self._lines)
                lines = list(self._lines)
                self._lines.clear()
                self._is_writing = True
            for line in lines:
                is_written = self._write(line)
                with self._lock:
                    self._num_bytes -= len(line)
                    self.num_dropped += not is_written

    def _write(self, line: bytes) -> bool:
        """Write a line, waiting for a slow reader. Returns whether all of it was written."""
        rest = memoryview(line)
        while rest:
            try:
                rest = rest[os.write(self._fileno, rest) :]
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINTR):
                    return False  # the next line is still tried: the partition may have room again
                self._wait_writable()
        return True

    def _wait_writable(self) -> None:
        try:
            select.select((), (self._fileno,), (), RETRY_S)
        except (OSError, ValueError):  # closed, or too large for select
            time.sleep(RETRY_S)


class LogLines:
    """A structlog `LoggerFactory` for one writer, and the logger that it returns."""

    def __init__(self, writer: LogWriter) -> None:
        self._writer = writer

    def __call__(self, *args: Any) -> LogLines:
        return self

    def msg(self, message: bytes | str) -> None:
        self._writer.put(_line(message))

    def err(self, message: bytes | str) -> None:
        self._writer.put(_line(message), is_error=True)

    log = debug = info = warning = warn = msg
    error = exception = critical = fatal = failure = err


def _line(message: bytes | str) -> bytes:
    return (message if isinstance(message, bytes) else message.encode("utf-8", "replace")) + b"\n"


class Relay(logging.Handler):
    """Forwards records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            exc_info = record.exc_info or None
            structlog.get_logger().log(record.levelno, record.getMessage(), logger=record.name, exc_info=exc_info)
        except Exception:  # a record that cannot be rendered must not fail its caller
            self.handleError(record)


def is_for_people() -> bool:
    """Return whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


def processors() -> list[Any]:
    """Return structlog's processors, with the renderer that fits stderr."""
    common: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    if is_for_people():
        # The default renderer of exceptions shows local variables.
        plain, colors = structlog.dev.plain_traceback, has_colors(sys.stderr)
        return [*common, structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain)]
    json = structlog.processors.JSONRenderer(orjson.dumps, option=orjson.OPT_NON_STR_KEYS)
    return [*common, structlog.processors.format_exc_info, json]


def relay_libraries(level: int) -> None:
    """Log what libraries log from `level` up, warnings at least: their handlers would block on an unread stderr."""
    root = logging.getLogger()
    root.setLevel(max(logging.WARNING, level))
    if not any(isinstance(handler, Relay) for handler in root.handlers):
        root.addHandler(Relay())
    logging.captureWarnings(True)
