"""An in-memory journal for tests, with a dial for a full disk."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from quipu.actors.messages.usage_record import UsageRecord


@attrs.define(eq=False)
class KeptJournal:
    """Implements `quipu.actors.accountant.journal.Journal`. Releases wait for a flush, as with a file."""

    has_room: Callable[[UsageRecord], bool] = lambda record: True
    open: dict[str, UsageRecord] = attrs.field(factory=dict)
    """Admitted and not closed, with the latest values."""
    admitted: list[UsageRecord] = attrs.field(factory=list)
    """Every admission, in order."""
    closed: list[UsageRecord] = attrs.field(factory=list)
    _firsts: dict[str, str] = attrs.field(factory=dict)
    _releases: list[Callable[[], None]] = attrs.field(factory=list)

    def admit(self, so_far: UsageRecord) -> bool:
        if not self.has_room(so_far):
            return False
        self.open[so_far.request_id] = so_far
        self.admitted.append(so_far)
        if so_far.idempotency_digest is not None and so_far.retry_of is None:
            self._firsts.setdefault(so_far.idempotency_digest, so_far.request_id)
        return True

    def close(self, record: UsageRecord, release: Callable[[], None]) -> None:
        self.open.pop(record.request_id, None)
        self.closed.append(record)
        self._releases.append(release)

    def flush(self) -> None:
        releases, self._releases = self._releases, []
        for release in releases:
            release()

    def retry_of(self, record: UsageRecord) -> str | None:
        first = self._firsts.get(record.idempotency_digest or "")
        return None if first == record.request_id else first

    @property
    def trouble(self) -> str | None:
        return None
