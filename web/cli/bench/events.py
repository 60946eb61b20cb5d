"""Server-sent events out of bytes, however the network has cut them.

Bytes in, the data of whole events out (WHATWG HTML, section 9.2.6). Lines stay bytes until an event is whole, so a
character that was cut in two is never decoded in halves. What an unfinished event has said when the stream ends is
dropped, as the standard asks; `is_between` says whether that happened.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

BOM = b"\xef\xbb\xbf"


@attrs.define(eq=False)
class EventReader:
    _tail: bytes = b""
    """Of a line whose end has not come."""
    _data: list[bytes] = attrs.field(factory=list)
    _has_begun: bool = False

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of each event that these bytes complete; consume it before feeding again."""
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
        """Whether all that came belongs to whole events."""
        return not self._tail.strip(b"\r\n") and not self._data

    def _take(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data = self._data, []
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        return None  # comments, `event`, `id` and `retry` carry nothing that is measured
