"""Keeps a web-side actor running: restarts it when it dies, and gives up when it keeps dying.

Used by `wiring`. What an actor's successor needs is kept in a store outside of the actor.

A death with a request in hand is blamed on that request, which its actor refuses after the second one. So no client can
end the server by sending a request that kills an actor again and again.

What must always hold: every death is logged and counted; an actor that handles messages between its deaths is always
restarted; one that does not, although no request is to blame, ends the server with an error after more deaths than
allowed within the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import attrs
import structlog
import trio

log = structlog.get_logger()

MAX_BLAMED = 2
"""Deaths for which one request is to blame. If there are more, refusing it did not help."""
MAX_SUSPECTS = 256
"""Requests whose deaths are counted; a further one takes the place of the oldest."""


class ActorGivenUp(Exception):
    """An actor died too often. The server must end with an error."""


@attrs.define(eq=False)
class Deaths:
    """The deaths of one actor."""

    actor: str
    _max_restarts: int = attrs.field(kw_only=True)
    _window_s: float = attrs.field(kw_only=True)
    _progress: Callable[[], int] = attrs.field(kw_only=True)
    """Its result changes when the actor has handled something; refusing a request that kills it does not count."""
    _count: Callable[[str], object] = attrs.field(kw_only=True)
    num_restarts: int = attrs.field(default=0, init=False)
    _progress_at_last: int = attrs.field(init=False)
    _recent: deque[float] = attrs.field(factory=deque, init=False)
    """Deaths since the actor last handled anything, without those for which a request is to blame."""
    _suspects: dict[str, int] = attrs.field(factory=dict, init=False)
    """Deaths by the request in hand, likewise."""

    def __attrs_post_init__(self) -> None:
        self._progress_at_last = self._progress()

    def record(self, error: Exception, request_id: str | None) -> None:
        """Record a death from `error` with a request in hand, if there was one. Raises ActorGivenUp from `error`."""
        now, progress, recent = trio.current_time(), self._progress(), self._recent
        if progress != self._progress_at_last:
            self._progress_at_last = progress
            recent.clear()
            self._suspects.clear()
        if not self._is_to_blame(request_id):
            recent.append(now)
        while recent and recent[0] < now - self._window_s:
            recent.popleft()
        self.num_restarts += 1
        self._count(self.actor)
        log.error("actor.died", actor=self.actor, request_id=request_id, num_deaths=len(recent), exc_info=error)
        if len(recent) > self._max_restarts:
            reason = f"the {self.actor} died {len(recent)} times in {self._window_s:g} seconds without doing any work"
            raise ActorGivenUp(reason) from error

    def _is_to_blame(self, request_id: str | None) -> bool:
        """Count a death against the request that was in hand; return whether it explains that death."""
        if request_id is None:
            return False
        suspects = self._suspects
        suspects[request_id] = suspects.get(request_id, 0) + 1
        if len(suspects) > MAX_SUSPECTS:
            del suspects[next(iter(suspects))]
        return suspects[request_id] <= MAX_BLAMED


async def keep_running(
    start: Callable[[], Awaitable[None]], deaths: Deaths, on_death: Callable[[], str | None]
) -> None:
    """Run `start()` again whenever it raises, until it returns or is cancelled.

    `on_death` is called after each death, before the next start; it may return the id of the request that the actor was
    working on. Raises ActorGivenUp from the last error.
    """
    while True:
        try:
            await start()
            return
        except Exception as error:
            deaths.record(error, on_death())
