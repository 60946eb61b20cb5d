"""Server-sent events of an upstream: a stream of bytes, cut into events.

Pure. Comments are kept apart from data: servers send them to keep a connection open, so they go on at once, also those
that no empty line follows.

What must always hold: what is kept of an event that has no end is bounded; each byte is looked at once; a comment is
never taken for data.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 2 << 20
"""One event: a token's logprobs take some kilobytes, the ids of a long prompt a megabyte."""

MAX_LINES = 256
"""Of one event. JSON has one line."""


MAX_COMMENT_BYTES = 1024
"""What is passed on of one comment."""


class Comment(bytes):
    """A comment as it is passed on, without its end."""


class UpstreamGarbage(Exception):
    """An upstream sends what cannot be passed on. The message says what."""


class EventSplitter:
    """Cuts a stream into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Bytes of the buffer that hold no end of an event."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is complete now, and comments, in order. Raises UpstreamGarbage."""
        buffer = self._buffer
        # lines may end in CR LF; JSON has neither of them in a string
        buffer += data.replace(b"\r", b"") if b"\r" in data else data
        found: list[bytes] = []
        start = 0
        while True:
            if buffer.startswith((b":", b"\n"), start):
                # nothing of an event has come
                if (end := buffer.find(b"\n", max(start, self._searched))) < 0:
                    break
                if end > start:
                    found.append(_comment(bytes(buffer[start : min(end, start + MAX_COMMENT_BYTES)])))
                start = self._searched = end + 1
            else:
                if (end := buffer.find(b"\n\n", max(start, self._searched))) < 0:
                    break
                found += _parts_of(bytes(buffer[start:end]))
                start = self._searched = end + 2
        del buffer[:start]
        self._searched = max(0, len(buffer) - 1)
        if len(buffer) > MAX_EVENT_BYTES:
            raise UpstreamGarbage(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def rest(self) -> list[bytes]:
        """Return the event that the end of the stream has completed, if there is one."""
        parts = _parts_of(bytes(self._buffer.removesuffix(b"\n")))
        self._buffer.clear()
        return parts


def _parts_of(event: bytes) -> list[bytes]:
    """Return the comments in an event, and its data if it has any."""
    if event.startswith(b"data: ") and b"\n" not in event:
        data = event[6:].strip()
        return [data] if data else []
    if event.count(b"\n") >= MAX_LINES:
        raise UpstreamGarbage(f"an event of more than {MAX_LINES} lines")
    lines = event.split(b"\n")
    parts: list[bytes] = [_comment(line[:MAX_COMMENT_BYTES]) for line in lines if line.startswith(b":")]
    data = b"\n".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
    return [*parts, data] if data else parts


def _comment(line: bytes) -> Comment:
    return Comment(line.decode(errors="replace").encode())
