"""The open connections, their limit, and which of them is evicted for a new one.

Beyond `max_connections`, a new connection evicts one that has been idle, or has been sending its request, for a while.
If all are being served, it gets one of a few reserved slots, on which the application serves only probes
(`app.install_reserved_connections`), so that `/health` works however full the server is.

What must always hold: there are never more than `max_connections` + RESERVED_SLOTS connections; one whose request has
arrived is never evicted.
"""

from __future__ import annotations

import resource

import structlog
import trio

from .connection import Connection

RESERVED_SLOTS = 16
RESERVED_FILES = 64
"""File descriptors left to the rest of the process."""
DEFAULT_MAX_CONNECTIONS = 4096
IDLE_S = 0.5
"""Idle time after which a connection may be evicted."""
SLOW_S = 5.0
"""Time from the first byte of an incomplete request after which its connection may be evicted."""
LOOK_EVERY_S = 0.05
"""Minimum interval between scans of all connections."""
LOG_EVERY_S = 60.0

_log = structlog.get_logger("quipu.web")


def default_max_connections(files_each: int = 1) -> int:
    """Return how many connections the file descriptor limit allows, with `files_each` for one and its request."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DEFAULT_MAX_CONNECTIONS
    return max(1, min(DEFAULT_MAX_CONNECTIONS, (soft - RESERVED_FILES - RESERVED_SLOTS) // files_each))


class ConnectionTable:
    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._members: dict[Connection, None] = {}
        self._reserved: dict[Connection, None] = {}
        """Oldest first, as in `_members`."""
        self._looked_at = -float("inf")
        self._logged_at = -float("inf")

    def __len__(self) -> int:
        return len(self._members) + len(self._reserved)

    def has_room(self) -> bool:
        """Return whether a new connection may be served normally. Evicts another one if possible."""
        if len(self._members) < self._max_connections or self._evict():
            return True
        self.note_full("connections.full")
        return False

    def add(self, connection: Connection) -> None:
        """Add a connection. A reserved one evicts the oldest reserved one if there are too many."""
        if not connection.is_reserved:
            self._members[connection] = None
            return
        if len(self._reserved) >= RESERVED_SLOTS:
            self._cut(next(iter(self._reserved)))
        self._reserved[connection] = None

    def discard(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        self._members.pop(connection, None)
        self._reserved.pop(connection, None)

    def drain(self) -> None:
        """Let no connection accept another request."""
        for connection in [*self._members, *self._reserved]:
            connection.drain()

    def free_a_file(self) -> None:
        """Close one socket, if any connection can be evicted."""
        if not self._evict() and self._reserved:
            self._cut(next(iter(self._reserved)))

    def note_full(self, event: str) -> None:
        """Log that the server is full, at most every LOG_EVERY_S."""
        now = trio.current_time()
        if now >= self._logged_at + LOG_EVERY_S:
            self._logged_at = now
            _log.warning(event, num_connections=len(self), max_connections=self._max_connections)

    def _evict(self) -> bool:
        now = trio.current_time()
        if now < self._looked_at + LOOK_EVERY_S:
            return False
        idle = slow = None
        for connection in self._members:
            if connection.is_idle and connection.quiet_since < now - IDLE_S:
                idle = connection
                break
            if slow is None and connection.is_receiving and connection.quiet_since < now - SLOW_S:
                slow = connection
        leaving = idle or slow
        if leaving is None:
            self._looked_at = now  # this scan was for nothing
            return False
        self._cut(leaving)
        return True

    def _cut(self, connection: Connection) -> None:
        self.discard(connection)
        connection.abort()


def raise_file_limit() -> None:
    """Raise the soft limit of file descriptors to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
