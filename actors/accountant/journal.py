"""Where the accountant's records go before their clients hear the end: the interface, and the one that keeps nothing.

The accountant writes through a `Journal`; `ledger/` has the durable one. All of it is synchronous and never blocks for
long: what has to wait for a disk calls back when it is done.

What must always hold: a release is called once, after its record is where a crash cannot lose it; after `admit` has
said yes, the closing record has room, and is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import structlog

from ..messages.usage_record import UsageRecord

log = structlog.get_logger()


def run_release(release: Callable[[], None]) -> None:
    """Call a release. Where it raises, that is the trouble of its own request, and not of those behind it."""
    try:
        release()
    except Exception:
        log.exception("release.failed")


class Journal(Protocol):
    def admit(self, so_far: UsageRecord) -> bool:
        """A request is admitted: write what is known, as the record it shall have if nobody closes it.

        May come again for the same request, with more prompts admitted; the last one counts. False: there is no room
        for it and its closing record, and nothing was written.
        """
        ...

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        """Write a closing record; `release` lets its client hear the end.

        Also for requests that were never admitted; of those that were refused it may write a bounded number only.
        """
        ...

    def flush(self) -> None:
        """Write everything that was said since the last time, in one go."""
        ...

    def retry_of(self, record: UsageRecord) -> str | None:
        """The first admitted request with the same idempotency digest within the window; None: none is known."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why nobody is admitted, for `/health`; None where all is well."""
        ...


class NoJournal:
    """Keeps nothing, and always has room for it."""

    def admit(self, so_far: UsageRecord) -> bool:
        return True

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        run_release(release)

    def flush(self) -> None:
        pass

    def retry_of(self, record: UsageRecord) -> str | None:
        return None

    @property
    def trouble(self) -> str | None:
        return None
