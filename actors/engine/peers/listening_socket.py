"""The socket at which an engine awaits engines of other machines: at any port, or at the first free one of a range.

Used by `tcp_network.py`.
"""

from __future__ import annotations

import errno
import socket
import time
from typing import Final

BACKLOG: Final = 128
PATIENCE_S: Final = 5.0
"""How long to wait for a port of the range: the engine that this one replaces may have been killed a moment ago."""
RETRY_S: Final = 0.1


class NoPeerPort(Exception):
    """The engine may listen at none of the ports of the range. Free one of them, or name a larger range."""


def listen_at(host: str, ports: tuple[int, int] | None, patience_s: float = PATIENCE_S) -> socket.socket:
    """Listen at an address of this machine. Raises OSError, and NoPeerPort if there is a range."""
    if ports is None:
        return _listen(host, 0)
    until = time.monotonic() + patience_s
    while True:
        for port in range(ports[0], ports[1] + 1):
            try:
                return _listen(host, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise NoPeerPort(f"--peer-ports: cannot listen on {host} port {port}: {error}") from error
        if time.monotonic() >= until:
            first, last = ports
            words = f"port {first} is" if first == last else f"all ports from {first} to {last} are"
            raise NoPeerPort(f"--peer-ports: {words} taken on {host}, and each engine of a node needs one")
        time.sleep(RETRY_S)


def _listen(host: str, port: int) -> socket.socket:
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setblocking(False)
        if port:  # connections of an engine that has ended do not keep it
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
