"""Server-sent events of an upstream: a stream of bytes, cut into events.

Pure. What must always hold: what is kept of an event that has no end is bounded; each byte is looked at once.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 2 << 20
"""One event: a token's logprobs take some kilobytes, the ids of a long prompt a megabyte."""

MAX_LINES = 256
"""Of one event. JSON has one line."""


class UpstreamGarbage(Exception):
    """An upstream sends what cannot be passed on. The message says what."""


class EventSplitter:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Bytes of the buffer that hold no end of an event."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is complete now, in order. Raises UpstreamGarbage."""
        buffer = self._buffer
        # lines may end in CR LF; JSON has neither of them in a string
        buffer += data.replace(b"\r", b"") if b"\r" in data else data
        found: list[bytes] = []
        start = 0
        while (end := buffer.find(b"\n\n", max(start, self._searched))) >= 0:
            if event := _data_of(bytes(buffer[start:end])):
                found.append(event)
            start = self._searched = end + 2
        del buffer[:start]
        self._searched = max(0, len(buffer) - 1)
        if len(buffer) > MAX_EVENT_BYTES:
            raise UpstreamGarbage(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def rest(self) -> list[bytes]:
        """Return the event that the end of the stream has completed, if there is one."""
        data = _data_of(bytes(self._buffer.removesuffix(b"\n")))
        self._buffer.clear()
        return [data] if data else []


def _data_of(event: bytes) -> bytes:
    """Return an event's data; empty for a comment."""
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:].strip()
    if event.count(b"\n") >= MAX_LINES:
        raise UpstreamGarbage(f"an event of more than {MAX_LINES} lines")
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)
