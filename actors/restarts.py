"""Keeping a web-side actor running: restart it when it dies, give up when it dies too often.

Used by `wiring`. An actor that is run like this keeps nothing that its death may take along: what it needs to go on is
where its successor finds it (for the accountant, the entry store).

What must always hold: a death is never silent; more deaths than allowed within the window end the server with an
error.
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
    """Run `start()` again and again until cancelled.

    `on_death` is told of each death before the next start; it may name who was in the actor's hands. Raises
    ActorGivenUp from the last error.
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
