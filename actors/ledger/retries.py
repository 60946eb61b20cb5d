"""Which admitted request was the first under its idempotency digest.

The journal asks and tells; rebuilt at a start from the write-ahead file and the database. Pure.

What must always hold: the first admitted request of a window wins, whoever asks; memory is bounded by the window.
"""

from __future__ import annotations

from collections import deque

import attrs

from quipu.actors.messages import UsageRecord


@attrs.frozen
class FirstRequest:
    request_id: str
    at: float
    """Unix seconds of its admission."""


class RetryIndex:
    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._firsts: dict[str, FirstRequest] = {}
        self._ages: deque[tuple[float, str]] = deque()

    def __len__(self) -> int:
        return len(self._firsts)

    def first_of(self, record: UsageRecord) -> str | None:
        """The request whose work this one does again; None: nobody's."""
        if record.idempotency_digest is None:
            return None
        first = self._firsts.get(record.idempotency_digest)
        if first is None or first.request_id == record.request_id or first.at < record.received_at - self._window_s:
            return None
        return first.request_id

    def admit(self, record: UsageRecord) -> None:
        """A request is admitted, here or in an earlier life; in any order."""
        if record.idempotency_digest is None or record.retry_of is not None or record.admitted_at is None:
            return
        self.learn(record.idempotency_digest, FirstRequest(record.request_id, record.admitted_at))

    def learn(self, digest: str, new: FirstRequest) -> None:
        known = self._firsts.get(digest)
        if known is None or new.at < known.at or known.at < new.at - self._window_s:
            self._firsts[digest] = new
            self._ages.append((new.at, digest))
        self._forget(new.at - self._window_s)

    def _forget(self, before: float) -> None:
        while self._ages and self._ages[0][0] < before:
            at, digest = self._ages.popleft()
            if (first := self._firsts.get(digest)) is not None and first.at == at:
                del self._firsts[digest]
