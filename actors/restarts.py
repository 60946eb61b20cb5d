"""Keeps a web-side actor running: restarts it when it dies, and gives up when it dies too often.

Used by `wiring`. An actor run like this has no state that must survive it: what its successor needs is kept elsewhere
(for the accountant, in its entry store).

What must always hold: every death is logged; more deaths than allowed within the window end the server with an error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import structlog
import trio

log = structlog.get_logger()


class ActorGivenUp(Exception):
    """An actor died too often. The server must end with an error."""


async def keep_running(
    name: str,
    start: Callable[[], Awaitable[None]],
    *,
    max_restarts: int,
    window_s: float,
    on_death: Callable[[], str | None],
) -> None:
    """Run `start()` again whenever it raises, until it returns or is cancelled.

    `on_death` is called after each death, before the next start; it may return the id of the request that the actor was
    working on. Raises ActorGivenUp from the last error.
    """
    deaths: deque[float] = deque()
    while True:
        try:
            await start()
            return
        except Exception as error:
            now = trio.current_time()
            deaths.append(now)
            while deaths[0] < now - window_s:
                deaths.popleft()
            log.error("actor.died", actor=name, request_id=on_death(), num_deaths=len(deaths), exc_info=True)
            if len(deaths) > max_restarts:
                raise ActorGivenUp(f"the {name} died {len(deaths)} times in {window_s:g} seconds") from error
