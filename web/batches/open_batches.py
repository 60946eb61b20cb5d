"""The batches that have lines to run, and whose line is next: tenants in turn, and the batches of each in turn.

Used by the service. What must always hold: a tenant with many batches gets no more turns than one with a single one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import attrs
import trio

from .batch_values import Batch, Line

LINES_AT_ONCE: Final = 64
"""That are read from the store."""


@attrs.define(eq=False)
class OpenBatch:
    batch: Batch
    lines: deque[Line] = attrs.field(factory=deque)
    """To be run next."""
    last_number: int = 0
    """The last line that was read from the store."""
    is_exhausted: bool = False
    """No line is to be run beside those that run."""
    num_running: int = 0
    is_finishing: bool = False


FillLines = Callable[[OpenBatch, int, int], Awaitable[list[Line]]]


class OpenBatches:
    def __init__(self) -> None:
        self._by_id: dict[str, OpenBatch] = {}
        self._turns: deque[str] = deque()
        """Tenants, and..."""
        self._of_tenant: dict[str, deque[OpenBatch]] = {}
        self._changed = trio.Event()

    def __iter__(self) -> Iterator[OpenBatch]:
        return iter(list(self._by_id.values()))

    def find(self, batch_id: str) -> OpenBatch | None:
        return self._by_id.get(batch_id)

    def add(self, opened: OpenBatch) -> None:
        self._by_id[opened.batch.id] = opened
        tenant = opened.batch.tenant
        if tenant not in self._of_tenant:
            self._of_tenant[tenant] = deque()
            self._turns.append(tenant)
        self._of_tenant[tenant].append(opened)
        self._changed.set()

    def remove(self, opened: OpenBatch) -> None:
        del self._by_id[opened.batch.id]
        self._drop_turn(opened)
        self._changed.set()

    async def wait_next(
        self,
        fill: FillLines,
        is_wanted: Callable[[OpenBatch], bool],
        on_exhausted: Callable[[OpenBatch], object],
    ) -> OpenBatch:
        """Wait for a batch that has a line to run, whose turn it is.

        `on_exhausted` is called with batches of which no line is to be run any more.
        """
        while True:
            self._changed = trio.Event()
            while (opened := self._rotate()) is not None:
                if not opened.lines and not opened.is_exhausted and is_wanted(opened):
                    lines = await fill(opened, opened.last_number, LINES_AT_ONCE)
                    opened.lines.extend(lines)
                    opened.last_number = lines[-1].number if lines else opened.last_number
                if opened.lines and is_wanted(opened):
                    return opened
                opened.lines.clear()
                opened.is_exhausted = True
                self._drop_turn(opened)
                on_exhausted(opened)
            await self._changed.wait()

    def _rotate(self) -> OpenBatch | None:
        if not self._turns:
            return None
        tenant = self._turns[0]
        self._turns.rotate(-1)
        batches = self._of_tenant[tenant]
        opened = batches[0]
        batches.rotate(-1)
        return opened

    def _drop_turn(self, opened: OpenBatch) -> None:
        """Give a batch no more turns."""
        tenant = opened.batch.tenant
        batches = self._of_tenant.get(tenant)
        if batches is None or opened not in batches:
            return
        batches.remove(opened)
        if not batches:
            del self._of_tenant[tenant]
            self._turns.remove(tenant)
