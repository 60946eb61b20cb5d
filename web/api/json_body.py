"""Parsing a request's JSON without holding the event loop, however the JSON was written.

`orjson` holds the interpreter lock: 10 ms for 64 KiB of the worst kind, half a second for 8 MiB. So only a small body
is parsed in one call. In a larger one the commas and brackets are located first (`json_structure.py`, in a worker
thread); orjson then parses it piece by piece, with checkpoints in between.

What must always hold: the result is what orjson makes of the whole body, and what orjson refuses is refused; no call
parses more than PIECE_VALUES values or PIECE_BYTES bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import orjson
import trio

from quipu.actors.threads import run_in_thread

from ..http.turns import turn
from .json_structure import COMMA, MAX_VALUES, InvalidJson, Structure, TooComplex, find_structure

INLINE_BYTES = 64 * 1024
"""A body up to this size is parsed in one call."""
PIECE_VALUES = 16_384
PIECE_BYTES = 1 << 20
MAX_LARGE_DEPTH = 64
"""Nesting of objects and arrays that are too large to be parsed in one call."""
MAX_KEY_BYTES = 64 * 1024
"""Of a key that, with its value, is too large to be parsed in one call."""

_MODEST_BYTES = 1 << 20
_modest_scans, _large_scans = trio.CapacityLimiter(1), trio.CapacityLimiter(1)
"""One body of each size at a time: the more threads want the interpreter lock, the longer the loop waits for it, 10 ms
a round with 16 threads."""
_WHITESPACE = re.compile(rb"[ \t\n\r]*+")
_KEY = re.compile(rb'("[^"\\]*+(?:\\.[^"\\]*+)*+")[ \t\n\r]*+:', re.DOTALL)
_LONGEST_ESCAPE = 12
"""Bytes of a character outside the Basic Multilingual Plane, written as two escapes."""


async def parse_json(
    data: bytes | bytearray, expect: Callable[[int], object] | None = None, max_values: int = MAX_VALUES
) -> Any:
    """Parse a body of at most `max_values` values. Raises InvalidJson and TooComplex.

    `expect(num_bytes)`, which may raise, is told the approximate memory of a large body's values before they are made.
    """
    if len(data) <= INLINE_BYTES:
        try:
            return orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise InvalidJson(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    limiter = _modest_scans if len(data) <= _MODEST_BYTES else _large_scans
    structure = await run_in_thread(find_structure, data, max_values, limiter=limiter)
    if expect is not None:
        expect(structure.num_bytes)
    return await _Pieces(data, structure, limiter).whole()


@attrs.frozen
class _Span:
    """A range of bytes of a body, and the range of its commas and brackets."""

    start: int
    end: int
    first: int
    last: int


class _Pieces:
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
            raise TooComplex(f"The request body nests large objects or arrays more than {MAX_LARGE_DEPTH} deep.")
        start = self._skip_whitespace(span.start, span.end)
        match self._data[start : start + 1]:
            case b"[" | b"{":
                return await self._container(attrs.evolve(span, start=start), depth)
            case b'"' if span.first == span.last:
                return await self._string(start, span.end)
            case _:
                return await self._parse(start, span.end)

    async def _container(self, span: _Span, depth: int) -> Any:
        groups = await run_in_thread(self._groups, span, limiter=self._limiter)
        is_array = self._data[span.start : span.start + 1] == b"["
        values: list[Any] = []
        members: dict[str, Any] = {}
        for group in groups:
            if self._skip_whitespace(group.start, group.end) == group.end:
                if len(groups) > 1:
                    raise _invalid("value expected", group.end)
                break  # an empty array or object
            is_large = group.end - group.start > PIECE_BYTES or group.last - group.first > PIECE_VALUES
            if is_array and is_large:
                values.append(await self._value(group, depth + 1))
            elif is_array:
                values += await self._parse(group.start, group.end, b"[%b]")
            elif is_large:
                key, start = self._key(group)
                members[key] = await self._value(attrs.evolve(group, start=start), depth + 1)
            else:
                members |= await self._parse(group.start, group.end, b"{%b}")
        return values if is_array else members

    def _check_brackets(self, span: _Span) -> None:
        """Check that the bracket that opens a span closes at its end. Raises InvalidJson."""
        positions, kinds, depths = self._at.positions, self._at.kinds, self._at.depths
        closing = int(positions[span.last - 1])
        outer = depths[span.first] - 1
        if (
            span.last - span.first < 2
            or kinds[span.last - 1] != kinds[span.first] + 2  # in ASCII one character lies between each pair
            or depths[span.last - 1] != outer
            or depths[span.first : span.last - 1].min() <= outer
            or self._skip_whitespace(closing + 1, span.end) != span.end
        ):
            raise _invalid("unbalanced bracket", span.start)

    def _groups(self, span: _Span) -> list[_Span]:
        """Return a container's children, as many at a time as may be parsed in one call, a large one by itself.

        Raises InvalidJson. Called in a worker thread.
        """
        self._check_brackets(span)
        end, first, last = int(self._at.positions[span.last - 1]), span.first + 1, span.last - 1
        own = self._at.depths[first:last] == self._at.depths[span.first]
        own &= self._at.kinds[first:last] == COMMA
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
        """Return the key of one member, and the offset of its value."""
        start = self._skip_whitespace(member.start, member.end)
        found = _KEY.match(self._data, start, min(member.end, start + MAX_KEY_BYTES))
        if found is None:
            if member.end - start > MAX_KEY_BYTES and self._data[start : start + 1] == b'"':
                raise TooComplex(f"The request body has a key of more than {MAX_KEY_BYTES} bytes.")
            raise _invalid("key expected", start)
        return self._loads(found.start(1), found.end(1), b"%b"), found.end()

    async def _string(self, start: int, end: int) -> str:
        """Parse a long string in parts that each end with a whole character."""
        closing = self._data.rfind(b'"', start + 1, end)
        if closing < 0 or self._skip_whitespace(closing + 1, end) != end:
            raise _invalid("unterminated string", start)
        parts: list[str] = []
        at = start + 1
        while at < closing:
            until = min(at + PIECE_BYTES, closing)
            # A part that ends within an escape or a character does not parse; then try one that ends a little earlier.
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
            raise _invalid(error.msg, start + error.pos) from None

    def _skip_whitespace(self, start: int, end: int) -> int:
        found = _WHITESPACE.match(self._data, start, end)
        return start if found is None else found.end()


def _invalid(what: str, offset: int) -> InvalidJson:
    return InvalidJson(f"{what} (near byte {offset})")
