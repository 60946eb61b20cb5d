"""Keys that are pressed while `quipu top` runs, without waiting for the end of a line."""

from __future__ import annotations

import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

import trio

QUIT = b"qQ\x04"
"""Ctrl-D too. Ctrl-C is a signal."""


@contextmanager
def heard_keys() -> Iterator[int | None]:
    """Give the descriptor from which single keys are read, None if nobody types; restore the terminal at the end."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    fileno = sys.stdin.fileno()
    before = termios.tcgetattr(fileno)
    try:
        tty.setcbreak(fileno)
        yield fileno
    finally:
        termios.tcsetattr(fileno, termios.TCSADRAIN, before)


async def wait_quit(fileno: int | None) -> None:
    """Wait until somebody presses `q`; for ever if nobody can."""
    if fileno is None:
        await trio.sleep_forever()
        return
    while True:
        await trio.lowlevel.wait_readable(fileno)
        pressed = os.read(fileno, 64)
        if not pressed or any(key in QUIT for key in pressed):
            return
