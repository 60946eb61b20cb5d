"""Timed spans from the processes of one server: written while it runs, read afterwards.

Functions are wrapped in place (`watch`), so that the unchanged server is measured, at a cost of 3 us per span. All
times are from the machine's monotonic clock, which its processes share with `time.perf_counter` of the client.
"""

from __future__ import annotations

import functools
import inspect
import os
import struct
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any

import attrs

FOLDER = "QUIPU_BENCH_SPANS"
"""Environment variable: the folder to write spans to."""
RECORD = struct.Struct("=16sddIQ")


@attrs.frozen
class Span:
    name: str
    start_s: float
    end_s: float
    size: int
    """A number from the `size` function of `watch`, such as the rows of a step."""
    thread: tuple[int, int] = (0, 0)
    """Process and thread."""

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@functools.cache
def _descriptor() -> int:
    path = Path(os.environ[FOLDER]) / f"{os.getpid()}.spans"
    return os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)


def watch(owner: Any, attribute: str, name: str, size: Callable[..., int] = lambda *_, **__: 0) -> None:
    """Record every call of `owner.attribute` as a span `name`; `size` is called with the same arguments.

    For a coroutine every turn is a span, from where it resumes to where it waits.
    """
    watched = getattr(owner, attribute)

    def write(start_s: float, num: int) -> None:
        end_s = time.perf_counter()
        os.write(_descriptor(), RECORD.pack(name.encode(), start_s, end_s, num, threading.get_ident()))

    @functools.wraps(watched)
    def timed(*arguments: Any, **named: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return watched(*arguments, **named)
        finally:
            write(start_s, size(*arguments, **named))

    @functools.wraps(watched)
    async def timed_turns(*arguments: Any, **named: Any) -> Any:
        return await _in_turns(watched(*arguments, **named), lambda start_s: write(start_s, size(*arguments, **named)))

    setattr(owner, attribute, timed_turns if inspect.iscoroutinefunction(watched) else timed)


@types.coroutine
def _in_turns(coroutine: Coroutine[Any, Any, Any], write: Callable[[float], None]) -> Generator[Any, Any, Any]:
    """Drive a coroutine; `write` is called with the start of each turn after it."""
    turn = functools.partial(coroutine.send, None)
    while True:
        start_s = time.perf_counter()
        try:
            wanted = turn()
        except StopIteration as stop:
            return stop.value
        finally:
            write(start_s)
        try:
            turn = functools.partial(coroutine.send, (yield wanted))
        except BaseException as error:  # a cancellation, for example, is passed to the coroutine
            turn = functools.partial(coroutine.throw, error)


def read_spans(folder: Path) -> list[Span]:
    """Read the spans of all processes, ordered by start."""
    spans = []
    for path in folder.glob("*.spans"):
        data = path.read_bytes()
        whole = data[: len(data) // RECORD.size * RECORD.size]
        spans += [
            Span(name.rstrip(b"\0").decode(), start_s, end_s, size, (int(path.stem), thread))
            for name, start_s, end_s, size, thread in RECORD.iter_unpack(whole)
        ]
    return sorted(spans, key=lambda span: span.start_s)


def own_seconds(spans: Sequence[Span]) -> list[float]:
    """Return each span's time excluding nested spans of the same thread."""
    own = [span.seconds for span in spans]
    open_ones: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(spans)), key=lambda at: (spans[at].start_s, -spans[at].end_s)):
        span = spans[index]
        around = open_ones.setdefault(span.thread, [])
        while around and spans[around[-1]].end_s <= span.start_s:
            around.pop()
        if around:
            own[around[-1]] -= span.seconds
        around.append(index)
    return own
