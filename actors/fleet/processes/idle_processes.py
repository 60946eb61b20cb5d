"""Child processes that have nothing to do at the moment and are kept for a while, since starting one takes long.

Used by `text_workers/grammar_pool.py` and, in the web process, `web/api/admin/usage_source.py`.

What must always hold: what `take` returns was usable a moment ago; what is no longer usable is ended.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import trio


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def is_usable(self) -> bool: ...

    async def end(self) -> object: ...


P = TypeVar("P", bound=Process)


class IdleProcesses(Generic[P]):
    """Processes that are idle; the last that came back is the first that is taken."""

    def __init__(self, idle_s: float) -> None:
        """Keep a process for at least `idle_s`, and at most half as long again."""
        self._idle_s = idle_s
        self._idle: list[tuple[P, float]] = []
        """Each with the time since which it has been idle."""

    @property
    def ids(self) -> list[int]:
        return [process.pid for process, _ in self._idle]

    async def run(self) -> None:
        """End processes that have been idle for long, until cancelled. Then `end_all` ends the others."""
        while True:
            await trio.sleep(self._idle_s / 2)
            await self._end(trio.current_time() - self._idle_s)

    async def end_all(self) -> None:
        await self._end(trio.current_time())

    async def take(self) -> P | None:
        """Return a process, if there is one."""
        while self._idle:
            process, _ = self._idle.pop()
            if process.is_usable:
                return process
            await process.end()
        return None

    async def put_back(self, process: P) -> None:
        """Keep a process, or end it if it is not usable."""
        if process.is_usable:
            self._idle.append((process, trio.current_time()))
        else:
            await process.end()

    async def _end(self, since_s: float) -> None:
        """End the processes that have been idle since then."""
        ended = [process for process, idle_since_s in self._idle if idle_since_s <= since_s]
        self._idle = [idle for idle in self._idle if idle[1] > since_s]
        for process in ended:
            await process.end()
