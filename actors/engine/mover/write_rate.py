"""A limit for the bytes per second that a tier writes: a token bucket (`--kv-disk-write-rate`).

The caller passes the time in, asks how long to wait before it begins a write, and says what it has written.

What must always hold: over any span of time, no more is begun than the rate allows for it, one burst and one write; a
write that is larger than a burst is not refused.
"""

from __future__ import annotations


class RateLimit:
    """A bucket that fills with the rate, up to a burst. It may be overdrawn by the last write."""

    def __init__(self, bytes_per_s: float, burst_bytes: float, now: float) -> None:
        """Begin with a full bucket. `now` and all later times are seconds of one clock. Raises ValueError."""
        if not bytes_per_s > 0 or not burst_bytes >= 0:
            raise ValueError(f"a rate of {bytes_per_s} bytes per second with bursts of {burst_bytes} allows no write")
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level_bytes = burst_bytes
        self._filled_at = now

    def wait_s(self, now: float) -> float:
        """Return how long to wait before the next write begins; 0.0 if it may begin now."""
        self._fill(now)
        return max(0.0, -self._level_bytes / self._bytes_per_s)

    def spend(self, num_bytes: int, now: float) -> None:
        """Take what is written from the bucket. What was not written after all is returned as a negative number."""
        self._fill(now)
        self._level_bytes = min(self._level_bytes - num_bytes, self._burst_bytes)

    def _fill(self, now: float) -> None:
        elapsed_s = max(0.0, now - self._filled_at)  # a clock that goes back fills nothing
        self._filled_at = max(self._filled_at, now)
        self._level_bytes = min(self._level_bytes + elapsed_s * self._bytes_per_s, self._burst_bytes)
