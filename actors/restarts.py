"""Keeps a web-side actor running: restarts it when it dies, and gives up when it keeps dying.

Used by `wiring`. An actor run like this has no state that must survive it: what its successor needs is kept elsewhere
(the accountant's entry store, the detokenizer's text store, the tokenizer's job store).

A death with a request in hand is blamed on that request, which its actor refuses after the second one. So no client can
end the server with a request that kills an actor, however often it is sent and however little else there is to do.

What must always hold: every death is logged and counted; an actor that handles messages between its deaths is always
restarted; one that does not, although no request is to blame, ends the server with an error after more deaths than
allowed within the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import structlog
import trio

log = structlog.get_logger()

MAX_BLAMED = 2
"""Deaths for which one request is to blame. If there are more, refusing it did not help."""
MAX_SUSPECTS = 256
"""Requests whose deaths are counted; a further one takes the place of the oldest."""


class ActorGivenUp(Exception):
    """An actor died too often. The server must end with an error."""


class Deaths:
    """The deaths of one actor."""

    def __init__(
        self,
        actor: str,
        *,
        max_restarts: int,
        window_s: float,
        progress: Callable[[], int],
        count: Callable[[str], object],
    ) -> None:
        """`progress()` changes when the actor has handled something; refusing a request that kills it does not count.

        `count(actor)` is called for each death.
        """
        self.actor = actor
        self.num_restarts = 0
        self._max_restarts = max_restarts
        self._window_s = window_s
        self._progress = progress
        self._count = count
        self._progress_at_last = progress()
        self._recent: deque[float] = deque()
        """Deaths since the actor last handled anything, without those for which a request is to blame."""
        self._suspects: dict[str, int] = {}
        """Deaths by the request in hand, likewise."""

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
