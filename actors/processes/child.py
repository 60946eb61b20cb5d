"""How a child process of the web process is started, what it does first, and how all of them are ended at once.

Used by `text_workers/chat_worker.py` and `text_workers/encode_worker.py`, in part by `engine_process.py`.

What must always hold: such a process ends with its parent, also with a killed one, whatever it is doing; it never has
more memory than it was given.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

OWN_GROUP = 0
"""The process group of a child is its own: Ctrl-C at the terminal is for the web process. Not its session: where each
session is scheduled as one (Linux's autogroup), a niceness counts among its own processes only."""
NICENESS = 10
"""Children step back behind everything that answers somebody, before they import anything: to start takes longer than
most of what they are asked. They still have a tenth of a processor that somebody else wants."""

Read = Callable[[int], bytes]
"""Gives exactly so many bytes, or raises EOFError."""


def command_of(module: str) -> list[str]:
    """What starts `module` as a child: its `main`, with the socket that `become_child` takes as standard input."""
    code = f"import os; os.nice({NICENESS}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code]


def become_child(memory_bytes: int) -> tuple[socket.socket, Read]:
    """Bind this process to its parent by the socket that is its standard input. `memory_bytes`: of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = socket.socket(fileno=os.dup(0))
    threading.Thread(target=end_with_parent, args=(link.fileno(),), daemon=True).start()
    stream = link.makefile("rb")

    def read(num_bytes: int) -> bytes:
        data = stream.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError
        return data

    return link, read


def end_with_parent(fileno: int, end: Callable[[int], None] = os._exit) -> None:
    """Wait for the other end of the socket to close."""
    poll = select.poll()
    poll.register(fileno, select.POLLRDHUP)
    poll.poll()
    end(0)


def kill_children() -> None:
    """Kill every child of this process, and with each its group: also one that is stopped or does not listen."""
    for children in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has ended
            for pid in map(int, children.read_text().split()):
                kill_group(pid)


def kill_group(pid: int) -> None:
    """Kill a child, and the processes that it has started in a group of its own, if they are there."""
    with suppress(OSError):
        (os.killpg if os.getpgid(pid) == pid else os.kill)(pid, signal.SIGKILL)
