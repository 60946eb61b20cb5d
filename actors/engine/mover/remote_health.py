"""When an object store that fails is asked again: a circuit breaker.

Used by `remote_store.py`, under its lock, once for loads and once for stores, because credentials may allow only one.

    closed ──3 failures in a row──▶ open for 1 s ──▶ one attempt ──succeeds──▶ closed
                                        ▲                 │
                                        └── twice as long ┘ fails

What must always hold: while it is open, nobody waits for the object store; however long that was down, it is used again
at most `max_pause_s` after it has come back and is asked.
"""

from __future__ import annotations

import attrs

MAX_FAILURES = 3
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


@attrs.define
class RemoteHealth:
    """Whether to try an operation. Times are of any monotonic clock."""

    max_failures: int = MAX_FAILURES
    first_pause_s: float = FIRST_PAUSE_S
    max_pause_s: float = MAX_PAUSE_S
    num_failures: int = attrs.field(default=0, init=False)
    """In a row."""
    _pause_s: float = attrs.field(default=0.0, init=False)
    _open_until: float = attrs.field(default=0.0, init=False)
    _attempt_until: float | None = attrs.field(default=None, init=False)
    """When the one attempt after a pause no longer keeps others from trying, if it has not ended by then."""

    @property
    def is_open(self) -> bool:
        """Return whether operations are held back: all, or all but one attempt."""
        return self._pause_s > 0

    def may_try(self, now: float) -> bool:
        """Return whether to begin an operation. Each that begins ends in `succeeded` or `failed`."""
        if not self.is_open:
            return True
        if now < self._open_until or (self._attempt_until is not None and now < self._attempt_until):
            return False
        self._attempt_until = now + self.max_pause_s
        return True

    def succeeded(self) -> None:
        self.num_failures = 0
        self._pause_s = 0.0
        self._attempt_until = None

    def failed(self, now: float) -> None:
        self.num_failures += 1
        if self.is_open:
            if self._attempt_until is None:  # it began before the others failed
                return
            self._pause_s = min(2 * self._pause_s, self.max_pause_s)
        elif self.num_failures >= self.max_failures:
            self._pause_s = self.first_pause_s
        else:
            return
        self._attempt_until = None
        self._open_until = now + self._pause_s
