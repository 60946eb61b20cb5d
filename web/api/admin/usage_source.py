"""Where usage reports come from: the ledger, read in worker threads.

The routes of this folder query a `UsageSource`. `LedgerUsage` reads the ledger of this server, including records that
have not reached the database yet.

What must always hold: no read runs on the event loop; a few run at a time, a bounded number waits, and each has a
deadline; if the ledger cannot be read, the response is a 503, and the reason is in the log but not in the response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

import attrs
import structlog
import trio
from sqlalchemy.exc import SQLAlchemyError

from quipu.actors.ledger.database import reason
from quipu.actors.ledger.reading import GroupColumn, LedgerError, LedgerReader, LedgerRecord, Query, Sum, open_reader

from ...request.errors import APIError, unavailable

READ_S = 30.0
"""How long a client waits for a report, including the wait for a reader."""
NUM_READERS = 2
MAX_WAITING = 32

_log = structlog.get_logger("quipu.web")
_T = TypeVar("_T")


class UsageSource(Protocol):
    """A source of usage data. Its methods raise APIError (503) if the ledger cannot be read."""

    async def sums(
        self, query: Query, group_by: Sequence[GroupColumn], bucket_s: int | None, *, collapse_retries: bool = False
    ) -> list[Sum]:
        """Return sums as `LedgerReader.sums` does."""
        ...

    async def record(self, query: Query) -> LedgerRecord | None:
        """Return the first record that matches."""
        ...

    async def disputed(self, query: Query, limit: int) -> list[LedgerRecord]:
        """Return the newest matching records of disputed accounts."""
        ...


class LedgerUsage:
    """A source that reads the ledger; `url` is as in LedgerConfig."""

    def __init__(
        self,
        data_dir: Path,
        url: str | None = None,
        *,
        num_readers: int = NUM_READERS,
        max_waiting: int = MAX_WAITING,
        read_s: float = READ_S,
    ) -> None:
        self._data_dir = data_dir
        self._url = url
        self._limiter = trio.CapacityLimiter(num_readers)
        self._max_waiting = max_waiting
        self._read_s = read_s

    async def sums(
        self, query: Query, group_by: Sequence[GroupColumn], bucket_s: int | None, *, collapse_retries: bool = False
    ) -> list[Sum]:
        return await self._read(
            lambda reader: reader.sums(query, group_by=group_by, bucket_s=bucket_s, collapse_retries=collapse_retries)
        )

    async def record(self, query: Query) -> LedgerRecord | None:
        return await self._read(lambda reader: next(reader.records(query), None))

    async def disputed(self, query: Query, limit: int) -> list[LedgerRecord]:
        only = attrs.evolve(query, disputed_only=True)
        return await self._read(lambda reader: list(islice(reader.records(only, newest_first=True), limit)))

    async def _read(self, look: Callable[[LedgerReader], _T]) -> _T:
        if self._limiter.statistics().tasks_waiting >= self._max_waiting:
            raise unavailable("Too many usage reports are being made. Try again later.", "too_many_reports")
        why = f"no answer within {self._read_s:g} s"
        with trio.move_on_after(self._read_s):
            try:
                # An abandoned thread keeps its place in the limiter until it ends, so there are never too many.
                return await trio.to_thread.run_sync(
                    partial(self._look, look), abandon_on_cancel=True, limiter=self._limiter
                )
            except SQLAlchemyError as error:
                why = reason(error)
            except (LedgerError, OSError) as error:
                why = str(error)
        raise _away(why)

    def _look(self, look: Callable[[LedgerReader], _T]) -> _T:
        with open_reader(data_dir=self._data_dir, url=self._url) as reader:
            return look(reader)


def _away(why: str) -> APIError:
    _log.warning("usage.ledger_away", why=why, help="reports are answered 503; nothing is lost")
    return unavailable("The usage ledger is unavailable. Try again later.", "ledger_unavailable")
