"""The `Journal` protocol: where usage records are written before their clients see the end of the response.

The accountant writes through it; `ledger/` has the durable implementation, `NoJournal` keeps nothing. All methods are
synchronous and never block for long: a journal that has to wait for a disk calls `release` when it is done.

What must always hold: a release is called once, after its record is stored where a crash cannot lose it; after
`admit` has returned True there is room for the closing record, and it is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..messages.usage_record import UsageRecord


class Journal(Protocol):
    def admit(self, so_far: UsageRecord) -> bool:
        """Write what is known of an admitted request, as its record in case it is never closed.

        May be called again for the same request when more of its prompts are admitted; the last call counts. Returns
        False, with nothing written, if there is no room for this entry and the closing record.
        """

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        """Write a closing record; `release` lets the client see the end of its response and must not raise.

        Also called for requests that were never admitted; of rejected ones it may write a bounded number only.
        """

    def flush(self) -> None:
        """Write everything since the last flush at once."""

    def retry_of(self, record: UsageRecord) -> str | None:
        """Return the first admitted request with the same idempotency digest within the window, if one is known."""

    @property
    def trouble(self) -> str | None:
        """Why no request is admitted, for `/health`; None if all is well."""


class NoJournal:
    """A journal that keeps nothing and always has room."""

    def admit(self, so_far: UsageRecord) -> bool:
        return True

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        release()

    def flush(self) -> None:
        pass

    def retry_of(self, record: UsageRecord) -> str | None:
        return None

    @property
    def trouble(self) -> str | None:
        return None
