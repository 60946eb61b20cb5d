"""Log lines are written by a thread, so that logging neither waits nor fails, whatever happens to the output."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator

import attrs
import pytest
import structlog

from quipu.actors.fleet.processes import log_writer
from quipu.actors.fleet.processes.log_writer import ERROR_BYTES, MAX_BYTES, LogLines, LogWriter, Relay

PATIENCE_S = 20.0
LINE = b"x" * 999 + b"\n"


@attrs.define
class Pipe:
    """A pipe to which log lines are written, with its reader."""

    reader: int
    writer: int

    def read_all(self, until: bytes) -> bytes:
        """Read everything up to and including `until`."""
        data = b""
        while until not in data:
            data += os.read(self.reader, 1 << 16)
        return data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    it = Pipe(*os.pipe())
    yield it
    for fileno in (it.reader, it.writer):
        try:
            os.close(fileno)
        except OSError:
            continue


def test_lines_in_order(pipe: Pipe) -> None:
    """Lines are written completely and in order, even if there are many times more than the pipe holds."""
    writer = LogWriter(pipe.writer)
    lines = [f"{number}\n".encode() for number in range(20_000)]
    for line in lines:
        writer.put(line)
    assert pipe.read_all(lines[-1]) == b"".join(lines)
    writer.drain(PATIENCE_S)
    assert writer.num_dropped == 0


def test_thread_is_waited_for(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no thread can be started, nothing fails, and the lines are written once there is one."""
    start, errors = threading.Thread.start, [MemoryError(), RuntimeError("can't start new thread")]

    def start_or_fail(thread: threading.Thread) -> None:
        if errors:
            raise errors.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    writer = LogWriter(pipe.writer)
    writer.put(b"first\n")
    writer.put(b"second\n")
    assert pipe.read_all(b"second\n") == b"first\nsecond\n" and not errors


def test_non_blocking_pipe(pipe: Pipe) -> None:
    """The writer waits for a slow reader."""
    os.set_blocking(pipe.writer, False)
    writer = LogWriter(pipe.writer)
    for _ in range(500):
        writer.put(LINE)
    writer.put(b"end\n")
    assert pipe.read_all(b"end\n") == LINE * 500 + b"end\n"
    assert writer.num_dropped == 0


def test_reader_is_gone(pipe: Pipe) -> None:
    """Every line is dropped and counted, without an error for the code that logs."""
    os.close(pipe.reader)
    writer = LogWriter(pipe.writer)
    for number in range(10):
        writer.put(LINE, is_error=number == 9)
    writer.drain(PATIENCE_S)
    assert writer.num_dropped == 10


def test_partition_is_full() -> None:
    """Lines are dropped as long as the partition is full."""
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        writer = LogWriter(full)
        writer.put(LINE)
        writer.drain(PATIENCE_S)
        assert writer.num_dropped == 1
    finally:
        os.close(full)


def test_reader_stops_reading(pipe: Pipe) -> None:
    """The queue is bounded; error lines have additional room, and are written once the reader reads again."""
    writer = LogWriter(pipe.writer)
    began_s = time.monotonic()
    num_lines = 3 * MAX_BYTES // len(LINE)
    for _ in range(num_lines):
        writer.put(LINE)
    dropped = writer.num_dropped
    assert 0 < dropped < num_lines
    writer.put(b"an error\n", is_error=True)
    assert writer.num_dropped == dropped
    for _ in range(2 * ERROR_BYTES // len(LINE)):
        writer.put(LINE, is_error=True)
    assert writer.num_dropped > dropped, "the additional room must be bounded as well"
    writer.drain(0.05)
    assert time.monotonic() - began_s < PATIENCE_S / 2, "logging must not wait for the reader"
    received = pipe.read_all(b"an error\n")
    assert received.partition(b"an error\n")[0] == LINE * (num_lines - dropped)
    os.close(pipe.reader)


def test_no_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without standard error writes nowhere, because its descriptor may be a client's socket."""
    monkeypatch.setattr(sys, "stderr", None)
    writer = LogWriter(log_writer.standard_error())
    writer.put(LINE)
    writer.drain(PATIENCE_S)
    assert writer.num_dropped == 1


def test_levels_and_libraries(pipe: Pipe) -> None:
    """structlog's methods for errors use the additional room; records of libraries are forwarded."""
    writer = LogWriter(pipe.writer)
    lines = LogLines(writer)
    puts: list[tuple[bytes, bool]] = []
    writer.put = lambda line, *, is_error=False: puts.append((line, is_error))
    structlog.configure(processors=[lambda _, name, event: f"{name} {event['event']}"], logger_factory=lines)
    try:
        log = structlog.get_logger()
        log.debug("a")
        log.warning("b")
        log.error("c")
        log.exception("d")
        library = logging.getLogger("some.library")
        handler = Relay()
        library.addHandler(handler)
        library.error("%s of %s", "one", "two")
        library.removeHandler(handler)
    finally:
        structlog.reset_defaults()
    expected = [(b"debug a\n", False), (b"warning b\n", False), (b"error c\n", True)]
    assert puts[:3] == expected and puts[3][1] and puts[4] == (b"error one of two\n", True)
