"""Reading a request's JSON without holding the event loop, however it was written.

`orjson` parses a body in one call that keeps the interpreter lock: 10 ms for 64 KiB of the worst kind, half a second
for 8 MiB. So only a small body is parsed at once. In a larger one the commas and brackets are located first
(`Structure`, in a worker thread: numpy releases the lock), and it is then parsed piece by piece, by orjson, with
checkpoints between.

Used by `fields.parse_object`. What must always hold: what comes out is what orjson makes of the whole body, and what
orjson refuses is refused; no call parses more than PIECE_VALUES values and PIECE_BYTES bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import orjson
import trio

from ..http.turns import turn

INLINE_BYTES = 64 * 1024
"""A body up to this size is parsed in one call."""
PIECE_VALUES = 16_384
PIECE_BYTES = 1 << 20
MAX_CONTAINERS = 1 << 18
"""Objects and lists of one body; the garbage collector walks through all of them."""
MAX_VALUES = 1 << 22
"""Values of one body; most of them token ids."""
MAX_CHAT_VALUES = 1 << 19
"""Values of one body that has no token ids: a chat's go on to a process that renders it."""
MAX_DEPTH = 1024
"""As orjson has it."""
MAX_LARGE_DEPTH = 64
"""How deep objects and lists may be nested that are too large to be parsed in one call."""
CONTAINER_BYTES = 256
"""What an object or a list takes in memory, roughly."""
VALUE_BYTES = 48
"""What any other value takes, a long text's characters left out."""

_SCAN_BYTES = 1 << 18
_MODEST_BYTES = 1 << 20
_modest_scans, _large_scans = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
"""One body at a time, and one of those beyond `_MODEST_BYTES`: each thread that wants the interpreter lock makes the
loop wait for it whenever it has let go of it, and with 16 of them for 10 ms a round."""
_QUOTE, _COMMA, _BACKSLASH = b'",\\'
_OPENING, _CLOSING = b"{}"
_CASE = 0x20
"""`[` and `]` differ from `{` and `}` by this bit."""
_BLANKS = re.compile(rb"[ \t\n\r]*+")
_KEY = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:', re.DOTALL)
MAX_KEY_BYTES = 64 * 1024
"""Of a key whose value, with it, is too large to be parsed in one call."""
_LONGEST_ESCAPE = 12
"""Bytes of a character outside of Unicode's first plane, as two escapes."""


class InvalidJson(ValueError):
    """A body that is not JSON. The message says what is wrong, and where."""


class TooComplex(ValueError):
    """A body of more values than one request may have. The message is for the client."""


@attrs.frozen(eq=False)
class Structure:
    """The commas and brackets of a body, except those within texts."""

    positions: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    """Which character each of them is."""
    depths: npt.NDArray[np.int32]
    """Brackets that are open behind each of them."""
    num_containers: int

    @property
    def num_bytes(self) -> int:
        """What the parsed values take, texts left out, roughly."""
        return self.num_containers * CONTAINER_BYTES + len(self.positions) * VALUE_BYTES


async def parse_json(
    data: bytes | bytearray, expect: Callable[[int], object] | None = None, max_values: int = MAX_VALUES
) -> Any:
    """Parse a body of at most `max_values` values. Raises InvalidJson and TooComplex.

    `expect(num_bytes)` is told how much memory the values of a large body will take before they are made. It may raise.
    """
    if len(data) <= INLINE_BYTES:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise InvalidJson(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    limiter = _modest_scans if len(data) <= _MODEST_BYTES else _large_scans
    structure = await trio.to_thread.run_sync(find_structure, data, max_values, limiter=limiter)
    if expect is not None:
        expect(structure.num_bytes)
    return await _Pieces(data, structure, limiter).whole()


# ---------------------------------------------------------------- finding


def find_structure(data: bytes | bytearray, max_values: int = MAX_VALUES) -> Structure:
    """Locate the commas and brackets of a body. Raises InvalidJson and TooComplex."""
    stretches = list(_scan(data, max_values))
    positions = np.concatenate([positions for positions, _ in stretches])
    kinds = np.concatenate([kinds for _, kinds in stretches])
    folded = kinds | _CASE
    opening = folded == _OPENING
    changes = opening.astype(np.int8)
    changes -= folded == _CLOSING
    depths = np.cumsum(changes, dtype=np.int32)
    if len(depths) and depths.max() > MAX_DEPTH:
        raise InvalidJson("Recursion limit reached")
    return Structure(positions, kinds, depths, int(np.count_nonzero(opening)))


def _scan(data: bytes | bytearray, max_values: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
    whole = np.frombuffer(data, np.uint8)
    in_text = is_escaped = False
    num_values = num_containers = 0
    for start in range(0, len(whole), _SCAN_BYTES):
        part = whole[start : start + _SCAN_BYTES]
        quotes = part == _QUOTE
        escaped = _escaped(part, is_escaped)
        quotes &= ~escaped[:-1]
        is_escaped = bool(escaped[-1])
        inside = np.bitwise_xor.accumulate(quotes)
        outside = inside if in_text else ~inside
        in_text ^= bool(inside[-1])
        folded = part | _CASE
        found = folded == _OPENING
        num_containers += int(np.count_nonzero(found & outside))
        found |= folded == _CLOSING
        found |= part == _COMMA
        found &= outside
        at = np.flatnonzero(found)
        num_values += len(at)
        if num_containers > MAX_CONTAINERS:
            raise TooComplex(f"The body has more than {MAX_CONTAINERS} objects and lists.")
        if num_values > max_values:
            raise TooComplex(f"The body has more than {max_values} values.")
        yield at + start, part[at]


def _escaped(part: npt.NDArray[np.uint8], first: bool) -> npt.NDArray[np.bool_]:
    """For each byte, and the one behind the last, whether a backslash escapes it; `first`: the first one is."""
    escaped = np.zeros(len(part) + 1, np.bool_)
    escaped[0] = first
    backslashes = part == _BACKSLASH
    if not backslashes.any():
        return escaped
    indexes = np.arange(len(part), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslashes, np.int32(-1), indexes))
    place_in_run = indexes - last_other
    if first:
        place_in_run[last_other < 0] += 1  # the backslash before this part counts
    np.logical_and(place_in_run & 1, backslashes, out=escaped[1:])
    return escaped


# ---------------------------------------------------------------- parsing


@attrs.frozen
class _Span:
    """Some bytes of a body, and which commas and brackets lie in them."""

    start: int
    end: int
    first: int
    last: int


class _Pieces:
    """One large body."""

    def __init__(self, data: bytes | bytearray, structure: Structure, limiter: trio.CapacityLimiter) -> None:
        self._limiter = limiter
        self._data = data
        self._view = memoryview(data)
        self._at = structure

    async def whole(self) -> Any:
        return await self._value(_Span(0, len(self._data), 0, len(self._at.positions)), 0)

    async def _value(self, span: _Span, depth: int) -> Any:
        if span.end - span.start <= PIECE_BYTES and span.last - span.first <= PIECE_VALUES:
            return await self._parse(span.start, span.end)
        if depth > MAX_LARGE_DEPTH:
            raise TooComplex(f"The body has large objects or lists nested more than {MAX_LARGE_DEPTH} deep.")
        start = self._skip_blanks(span.start, span.end)
        match self._data[start : start + 1]:
            case b"[" | b"{":
                return await self._container(attrs.evolve(span, start=start), depth)
            case b'"' if span.first == span.last:
                return await self._text(start, span.end)
            case _:
                return await self._parse(start, span.end)

    async def _container(self, span: _Span, depth: int) -> Any:
        groups = await trio.to_thread.run_sync(self._groups, span, limiter=self._limiter)
        is_list = self._data[span.start : span.start + 1] == b"["
        values: list[Any] = []
        members: dict[str, Any] = {}
        for group in groups:
            if self._skip_blanks(group.start, group.end) == group.end:
                if len(groups) > 1:
                    raise _wrong("a value is missing", group.end)
                break  # an empty list or object
            is_large = group.end - group.start > PIECE_BYTES or group.last - group.first > PIECE_VALUES
            if is_list and is_large:
                values.append(await self._value(group, depth + 1))
            elif is_list:
                values += await self._parse(group.start, group.end, b"[%b]")
            elif is_large:
                key, start = self._key(group)
                members[key] = await self._value(attrs.evolve(group, start=start), depth + 1)
            else:
                members |= await self._parse(group.start, group.end, b"{%b}")
        return values if is_list else members

    def _check_brackets(self, span: _Span) -> None:
        """That what opens at the start of a span closes at its end. Raises InvalidJson."""
        positions, kinds, depths = self._at.positions, self._at.kinds, self._at.depths
        closing = int(positions[span.last - 1])
        outer = depths[span.first] - 1
        if (
            span.last - span.first < 2
            or kinds[span.last - 1] != kinds[span.first] + 2  # in ASCII, each pair has one character between
            or depths[span.last - 1] != outer
            or depths[span.first : span.last - 1].min() <= outer
            or self._skip_blanks(closing + 1, span.end) != span.end
        ):
            raise _wrong("a bracket has no counterpart", span.start)

    def _groups(self, span: _Span) -> list[_Span]:
        """A container's children, as many at a time as may be parsed in one call; a large one by itself.

        Raises InvalidJson. To be called in a worker thread.
        """
        self._check_brackets(span)
        end, first, last = int(self._at.positions[span.last - 1]), span.first + 1, span.last - 1
        own = self._at.depths[first:last] == self._at.depths[span.first]
        own &= self._at.kinds[first:last] == _COMMA
        commas = np.flatnonzero(own) + first
        ends = np.append(self._at.positions[commas], end)
        lasts = np.append(commas, last)
        groups = []
        start, child = span.start + 1, 0
        while child < len(ends):
            fitting = min(
                np.searchsorted(ends, start + PIECE_BYTES, "right"),
                np.searchsorted(lasts, first + PIECE_VALUES, "right"),
            )
            child = max(int(fitting), child + 1)
            groups.append(_Span(start, int(ends[child - 1]), first, int(lasts[child - 1])))
            start, first = groups[-1].end + 1, groups[-1].last + 1
        return groups

    def _key(self, member: _Span) -> tuple[str, int]:
        """The key of one member, and where its value begins."""
        start = self._skip_blanks(member.start, member.end)
        found = _KEY.match(self._data, start, min(member.end, start + MAX_KEY_BYTES))
        if found is None:
            if member.end - start > MAX_KEY_BYTES and self._data[start : start + 1] == b'"':
                raise TooComplex(f"The body has a key of more than {MAX_KEY_BYTES} bytes.")
            raise _wrong("a key is missing", start)
        return self._loads(found.start(1), found.end(1), b"%b"), found.end()

    async def _text(self, start: int, end: int) -> str:
        """A long text, in parts that each end with a whole character."""
        closing = self._data.rfind(b'"', start + 1, end)
        if closing < 0 or self._skip_blanks(closing + 1, end) != end:
            raise _wrong("a text has no end", start)
        parts: list[str] = []
        at = start + 1
        while at < closing:
            until = min(at + PIECE_BYTES, closing)
            # a part that ends within an escape or a character is no text; a whole one before it is never split
            for shorter in range(_LONGEST_ESCAPE if until < closing else 1):
                try:
                    parts.append(await self._parse(at, until - shorter, b'"%b"'))
                except InvalidJson:
                    if shorter == _LONGEST_ESCAPE - 1 or until == closing:
                        raise
                else:
                    at = until - shorter
                    break
        return "".join(parts)

    async def _parse(self, start: int, end: int, around: bytes = b"%b") -> Any:
        async with turn():
            return self._loads(start, end, around)

    def _loads(self, start: int, end: int, around: bytes) -> Any:
        piece = self._view[start:end]
        try:
            return orjson.loads(piece if around == b"%b" else around % piece)
        except orjson.JSONDecodeError as error:
            raise _wrong(error.msg, start + error.pos) from None

    def _skip_blanks(self, start: int, end: int) -> int:
        found = _BLANKS.match(self._data, start, end)
        return start if found is None else found.end()


def _wrong(what: str, offset: int) -> InvalidJson:
    return InvalidJson(f"{what} (near byte {offset})")
