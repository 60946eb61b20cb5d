"""How child processes of the web process are started, what they do first, and how all of them are killed.

Used by both ends of the workers in `text_workers/` and of the engine process, and by `web/cli/serve.py`.

What must always hold: a child ends when its parent does, even if the parent is killed and whatever the child is doing;
it never uses more memory than its limit; importing this module loads nothing but the standard library.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from ..forks.fork_program import become_server, read_exactly

OWN_GROUP = 0
"""Argument for `process_group`: each child has its own, so that Ctrl-C in the terminal reaches the web process only. It
keeps its parent's session, because with Linux's autogroup a niceness is relative to processes of the same session."""
NICENESS = 10
"""Children yield to everything that serves requests, even before they import anything, because starting takes longer
than most of their work. On a contended processor they still get a tenth of it."""

SHORTAGE_NUMBERS = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
SHORTAGE_TEXTS = (
    "failed to map segment from shared object",  # the dynamic linker, as ImportError
    "cannot allocate memory",
    "can't allocate memory",  # torch
    "can't start new thread",
)
LOADING_ERRORS = (ImportError, RuntimeError, OSError, MemoryError)
"""What loading may raise in a shortage, among others."""

Read = Callable[[int], bytes]
"""Reads exactly the given number of bytes, or raises EOFError."""


def command_of(module: str) -> list[str]:
    """Return the command that runs a module's `main` as a child; its standard input must be a socket to its parent."""
    code = f"import os; os.nice({NICENESS}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code]


def become_child(memory_bytes: int) -> tuple[socket.socket, Read]:
    """Bind this process to its parent by the socket on standard input, and limit its address space."""
    link = become_server(memory_bytes)
    threading.Thread(target=end_with_parent, args=(link.fileno(),), daemon=True).start()
    return link, partial(read_exactly, link.makefile("rb"))


def end_with_parent(fileno: int, end: Callable[[int], None] = os._exit) -> None:
    """Wait for the other end of the socket or pipe to close, then call `end(0)`."""
    poll = select.poll()
    poll.register(fileno, select.POLLRDHUP)
    poll.poll()
    end(0)


def kill_children() -> None:
    """Kill every child of this process and its process group, even if it is stopped or unresponsive."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            for pid in map(int, children.read_text().split()):
                kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a child, and its process group if it leads one. Does nothing if they are gone."""
    with suppress(OSError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)


def is_shortage(error: BaseException) -> bool:
    """Return whether memory, threads or file descriptors are short, so that another start may succeed later."""
    if isinstance(error, OSError) and error.errno in SHORTAGE_NUMBERS:
        return True
    return isinstance(error, MemoryError) or (
        isinstance(error, LOADING_ERRORS) and any(text in str(error).lower() for text in SHORTAGE_TEXTS)
    )
