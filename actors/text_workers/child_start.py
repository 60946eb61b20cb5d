"""Starts a process of one of our own programs, with a socket as its standard input.

Used by `chat_process.py`, `image_pool.py` and `web/api/admin/report_process.py`. What must always hold: if the
process was not started, no descriptor is left open.
"""

from __future__ import annotations

import socket
import subprocess

import trio

from ..fleet.processes.child import OWN_GROUP, command_of
from ..threads import open_process


async def start_child(module: str) -> tuple[trio.Process, trio.SocketStream]:
    """Start the program `module`, and return its process and our end of the socket. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    try:
        process = await open_process(
            command_of(module), stdin=theirs, stdout=subprocess.DEVNULL, process_group=OWN_GROUP
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return process, stream
