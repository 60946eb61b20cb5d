"""Parsing of server-sent events from bytes, however the network has split them.

Bytes in, the data of complete events out (WHATWG HTML, section 9.2.6). Lines stay bytes until an event is complete, so
a character that was split is never decoded in halves. An incomplete event at the end of the stream is dropped, as the
standard requires; `is_between` tells whether there is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

BOM = b"\xef\xbb\xbf"


@attrs.define(eq=False)
class EventReader:
    _tail: bytes = b""
    _data: list[bytes] = attrs.field(factory=list)
    _has_begun: bool = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """Yield the data of each event that these bytes complete. Exhaust it before feeding again."""
        lines = (self._tail + received).splitlines(keepends=True)
        # A lone CR at the end may be the first half of a CRLF.
        self._tail = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        for line in lines:
            if not self._has_begun:
                self._has_begun = True
                line = line.removeprefix(BOM)
            data = self._take(line.rstrip(b"\r\n"))
            if data is not None:
                yield data

    @property
    def is_between(self) -> bool:
        """Whether all bytes so far belong to complete events."""
        return not self._tail.strip(b"\r\n") and not self._data

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None  # comments, `event`, `id` and `retry` are not measured
