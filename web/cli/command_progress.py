"""How far a command is, once it has taken two seconds: a bar on a terminal, elsewhere a line now and then.

Everything goes to standard error. A thread draws, so that also a wait for one long call is seen to go on.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Never, TextIO, TypeVar

from tqdm import tqdm

from quipu.actors.shared.terminals import can_redraw

DELAY_S: Final = 2.0
"""What is done sooner shows nothing."""
DRAW_S: Final = 0.5
LINES_S: Final = (5.0, 60.0)
"""The time between the first lines, and between later ones: each pause is half as long again as the one before."""

Count = Callable[[int], object]
T = TypeVar("T")


@contextmanager
def command_progress(what: str, total: int | None = None, unit: str = "", *, is_off: bool = False) -> Iterator[Count]:
    """Show how far the block is, and give the function that counts what is done.

    Without a `total`, the time that has passed is shown, and what is counted if anything is.
    """
    stream = sys.stderr
    if is_off or stream is None:
        yield lambda count: None
        return
    show = _Bar(what, total, unit, stream) if can_redraw(stream) else _Lines(what, total, unit, stream)
    is_over = threading.Event()
    drawing = threading.Thread(target=show.run, args=(is_over,), daemon=True)
    drawing.start()
    try:
        yield show.count
    finally:
        is_over.set()
        drawing.join()


class _Bar:
    def __init__(self, what: str, total: int | None, unit: str, stream: TextIO) -> None:
        self._bar: tqdm[Never] = tqdm(
            desc=what,
            total=total,
            unit=f" {unit}",
            bar_format=None if total is not None or unit else "{desc}: {elapsed}",
            file=stream,
            delay=DELAY_S,
            mininterval=0.2,
            miniters=0,
            leave=False,
            dynamic_ncols=True,
        )
        self._lock = threading.Lock()

    def count(self, count: int) -> None:
        with self._lock:
            self._bar.update(count)

    def run(self, is_over: threading.Event) -> None:
        while not is_over.wait(DRAW_S):
            self.count(0)
        self._bar.close()


class _Lines:
    def __init__(self, what: str, total: int | None, unit: str, stream: TextIO) -> None:
        self._what, self._total, self._unit = what, total, unit
        self._stream = stream
        self._num_done = 0

    def count(self, count: int) -> None:
        self._num_done += count

    def run(self, is_over: threading.Event) -> None:
        began_s = time.monotonic()
        pause_s, most_s = LINES_S
        while not is_over.wait(pause_s):
            line = progress_line(self._what, self._num_done, self._total, self._unit, time.monotonic() - began_s)
            try:
                print(f"quipu: {line}", file=self._stream, flush=True)
            except (OSError, ValueError):  # nobody reads it
                return
            pause_s = min(most_s, pause_s * 1.5)


def progress_line(what: str, num_done: int, total: int | None, unit: str, elapsed_s: float) -> str:
    """Return the words of one line, with an estimate once something is done."""
    parts = []
    if total:
        parts.append(f"{num_done:,} of {total:,} {unit} ({num_done / total:.0%})")
    elif unit:
        parts.append(f"{num_done:,} {unit}")
    parts.append(f"{elapsed_s:,.0f} s so far")
    if total and 0 < num_done < total:
        parts.append(f"about {elapsed_s * (total - num_done) / num_done:,.0f} s to go")
    return f"{what}: {', '.join(parts)}"


def counted(items: Iterable[T], count: Count) -> Iterator[T]:
    """Yield the items, counting each."""
    for item in items:
        yield item
        count(1)
