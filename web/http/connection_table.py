"""Which connections are open, how many there may be, and who makes way when there is no room.

Used by `web.server`, which asks for a place before it serves an accepted socket. Beyond `max_connections` a newcomer
takes the place of a connection that has been idle, or has been sending its request, for a while. Where everybody is
being served it gets one of a few reserved places: on those the application answers probes and turns everything else
away (`app.install_reserved_places`), so that `/health` can be asked however full the server is.

What must always hold: there are never more than `max_connections` + RESERVED_PLACES connections; one whose request has
arrived is never cut off for another.
"""

from __future__ import annotations

import resource

import structlog
import trio

from .connection import Connection

RESERVED_PLACES = 16
RESERVED_FILES = 64
"""File descriptors that connections leave to the rest of the process."""
DEFAULT_MAX_CONNECTIONS = 4096
IDLE_S = 0.5
"""Between two requests: after that a connection makes way for another."""
SLOW_S = 5.0
"""From a request's first byte until all of it has come: likewise."""
LOOK_EVERY_S = 0.05
"""To look through all connections takes time; how often it is done at most."""
LOG_EVERY_S = 60.0

_log = structlog.get_logger("quipu.web")


def default_max_connections() -> int:
    """As many as this process may have file descriptors for, within reason."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return DEFAULT_MAX_CONNECTIONS
    return max(1, min(DEFAULT_MAX_CONNECTIONS, soft - RESERVED_FILES - RESERVED_PLACES))


class ConnectionTable:
    """Every open connection of one server."""

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        self._members: dict[Connection, None] = {}
        self._reserved: dict[Connection, None] = {}
        """Oldest first, as the members."""
        self._looked_at = -float("inf")
        self._logged_at = -float("inf")

    def __len__(self) -> int:
        return len(self._members) + len(self._reserved)

    def has_room(self) -> bool:
        """Whether a newcomer may be served like any other. Makes room where somebody can make way."""
        if len(self._members) < self._max_connections or self._make_way():
            return True
        self.note_full("connections.full")
        return False

    def add(self, connection: Connection) -> None:
        """Serve one more. The oldest with a reserved place makes way for a newcomer to these."""
        if not connection.is_reserved:
            self._members[connection] = None
            return
        if len(self._reserved) >= RESERVED_PLACES:
            self._cut(next(iter(self._reserved)))
        self._reserved[connection] = None

    def discard(self, connection: Connection) -> None:
        """It has ended."""
        self._members.pop(connection, None)
        self._reserved.pop(connection, None)

    def drain(self) -> None:
        """Have all of them take no further request."""
        for connection in [*self._members, *self._reserved]:
            connection.drain()

    def free_a_file(self) -> None:
        """Close somebody's socket, if anybody can make way."""
        if not self._make_way() and self._reserved:
            self._cut(next(iter(self._reserved)))

    def note_full(self, event: str) -> None:
        """Log that newcomers are turned away, once in a while."""
        now = trio.current_time()
        if now >= self._logged_at + LOG_EVERY_S:
            self._logged_at = now
            _log.warning(event, num_connections=len(self), max_connections=self._max_connections)

    def _make_way(self) -> bool:
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
            self._looked_at = now  # nobody for now: this look was for nothing
            return False
        self._cut(leaving)
        return True

    def _cut(self, connection: Connection) -> None:
        self.discard(connection)
        connection.abort()


def raise_file_limit() -> None:
    """Take as many file descriptors as the system lets this process have without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
