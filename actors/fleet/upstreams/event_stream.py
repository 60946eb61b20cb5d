"""Server-sent events of an upstream: splits a stream of bytes into events.

Pure. Comments are separated from data: servers send them to keep a connection open, so they are forwarded at once, even
those that no empty line follows.

What must always hold: the buffer for an event without an end is bounded; each byte is searched once; a comment is never
mistaken for data.
"""

from __future__ import annotations

MAX_EVENT_BYTES = 2 << 20
"""Maximum size of an event: a token's logprobs take some kilobytes, the ids of a long prompt a megabyte."""

MAX_LINES = 256
"""Maximum number of lines in an event. JSON has one line."""


MAX_COMMENT_BYTES = 1024
"""Number of bytes of a comment that are forwarded."""


class Comment(bytes):
    """A comment as forwarded, without its line end."""


class UpstreamGarbage(Exception):
    """An upstream's response cannot be forwarded. The message says why."""


class EventSplitter:
    """Splits a stream into events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        """Number of bytes of the buffer already searched for the end of an event."""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is now complete, and comments, in order. Raises UpstreamGarbage."""
        buffer = self._buffer
        # lines may end in CR LF; strings in JSON contain neither
        buffer += data.replace(b"\r", b"") if b"\r" in data else data
        found: list[bytes] = []
        start = 0
        while True:
            if buffer.startswith((b":", b"\n"), start):
                # no part of an event has arrived
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
        """Return the event that the end of the stream completes, if there is one."""
        parts = _parts_of(bytes(self._buffer.removesuffix(b"\n")))
        self._buffer.clear()
        return parts


def _parts_of(event: bytes) -> list[bytes]:
    """Return the comments in an event, and its data if it has any. Data on several lines, which is JSON, is on one."""
    if event.startswith(b"data: ") and b"\n" not in event:
        data = event[6:].strip()
        return [data] if data else []
    if event.count(b"\n") >= MAX_LINES:
        raise UpstreamGarbage(f"an event of more than {MAX_LINES} lines")
    lines = event.split(b"\n")
    parts: list[bytes] = [_comment(line[:MAX_COMMENT_BYTES]) for line in lines if line.startswith(b":")]
    data = b" ".join(line[5:].strip() for line in lines if line.startswith(b"data:"))
    return [*parts, data] if data else parts


def _comment(line: bytes) -> Comment:
    return Comment(line.decode(errors="replace").encode())
