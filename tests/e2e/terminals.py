"""Runs a command on a terminal of its own, as a user does: types, reads what is shown, and presses Ctrl-C."""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import attrs

from tests.e2e.servers import PATIENCE_S

CTRL_C = "\x03"
CTRL_D = "\x04"
_ESCAPES = re.compile(r"\x1b\[[?0-9;]*[a-zA-Z]")


@attrs.define(eq=False)
class Typist:
    """The user's side of the terminal."""

    process: subprocess.Popen[bytes]
    _keyboard: int
    _screen: str = ""

    def type(self, text: str) -> None:
        os.write(self._keyboard, text.encode())

    def read_until(self, awaited: str) -> str:
        """Return what is shown next, up to and including `awaited`, without escape sequences."""
        while awaited not in self._screen:
            self._look(awaited)
        shown, found, self._screen = self._screen.partition(awaited)
        return shown + found

    def read_some(self) -> str:
        """Return what is shown next: at least one character."""
        while not self._screen:
            self._look("something")
        shown, self._screen = self._screen, ""
        return shown

    def _look(self, awaited: str) -> None:
        is_readable, _, _ = select.select([self._keyboard], [], [], PATIENCE_S)
        assert is_readable, f"{awaited!r} is not shown: {self._screen[-500:]!r}"
        shown = os.read(self._keyboard, 65536).decode("utf-8", "ignore")
        self._screen = _ESCAPES.sub("", self._screen + shown)


@contextmanager
def on_a_terminal(*command: str) -> Iterator[Typist]:
    """Run a command whose controlling terminal is a new one; it is killed when the block is left."""
    ours, theirs = os.openpty()
    # The first terminal that a session's leader opens becomes its controlling terminal, whose Ctrl-C is a signal.
    script = 'terminal=$1; shift; exec "$@" <"$terminal" >"$terminal" 2>&1'
    process = subprocess.Popen(
        ["sh", "-c", script, "sh", os.ttyname(theirs), *command],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm"},
    )
    try:
        yield Typist(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(theirs)
        os.close(ours)
