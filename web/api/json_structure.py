"""Locating the commas and brackets of a JSON body, so that it can be parsed piece by piece (`json_body.py`).

Runs in a worker thread, where numpy releases the interpreter lock. What must always hold: a body with more values,
containers or depth than allowed is refused here, before anything is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import numpy.typing as npt

MAX_CONTAINERS = 1 << 18
"""Objects and arrays of one body; the garbage collector walks through all of them."""
MAX_VALUES = 1 << 22
"""Values of one body; most of them token ids."""
MAX_CHAT_VALUES = 1 << 19
"""Values of a body without token ids: a chat is passed on to a process that renders it."""
MAX_DEPTH = 1024
"""As in orjson."""
CONTAINER_BYTES = 256
"""Approximate memory of an object or array."""
VALUE_BYTES = 48
"""Approximate memory of any other value, without the characters of long strings."""

_SCAN_BYTES = 1 << 18
_QUOTE, COMMA, _BACKSLASH = b'",\\'
_OPENING, _CLOSING = b"{}"
_CASE = 0x20
"""`[` and `]` differ from `{` and `}` by this bit."""


class InvalidJson(ValueError):
    """A body that is not JSON. The message says what is wrong, and where."""


class TooComplex(ValueError):
    """A body with more values than one request may have. The message is for the client."""


@attrs.frozen(eq=False)
class Structure:
    """The commas and brackets of a body, except those within strings."""

    positions: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    """The character at each position."""
    depths: npt.NDArray[np.int32]
    """The number of brackets that are open after each position."""
    num_containers: int

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the parsed values, without the characters of strings."""
        return self.num_containers * CONTAINER_BYTES + len(self.positions) * VALUE_BYTES


def find_structure(data: bytes | bytearray, max_values: int = MAX_VALUES) -> Structure:
    """Locate the commas and brackets of a body. Raises InvalidJson and TooComplex."""
    stretches = list(_scan(data, max_values))
    positions = np.concatenate([positions for positions, _ in stretches])
    kinds = np.concatenate([kinds for _, kinds in stretches])
    changes = depth_changes(kinds)
    depths = np.cumsum(changes, dtype=np.int32)
    if len(depths) and depths.max() > MAX_DEPTH:
        raise InvalidJson("Recursion limit reached")
    return Structure(positions, kinds, depths, int(np.count_nonzero(changes > 0)))


def _scan(data: bytes | bytearray, max_values: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]]:
    whole, scan = np.frombuffer(data, np.uint8), StructureScan()
    num_values = num_containers = 0
    for start in range(0, len(whole), _SCAN_BYTES):
        part = whole[start : start + _SCAN_BYTES]
        at = scan.find(part)
        kinds = part[at]
        num_containers += int(np.count_nonzero(kinds | _CASE == _OPENING))
        num_values += len(at)
        if num_containers > MAX_CONTAINERS:
            raise TooComplex(f"The request body has more than {MAX_CONTAINERS} objects and arrays.")
        if num_values > max_values:
            raise TooComplex(f"The request body has more than {max_values} values.")
        yield at + start, kinds


class StructureScan:
    """Locates the commas and brackets outside strings, in parts of JSON that follow one another."""

    def __init__(self) -> None:
        self._is_in_string = self._is_escaped = False

    def find(self, part: npt.NDArray[np.uint8]) -> npt.NDArray[np.intp]:
        """Return their positions in the next part, which must not be empty."""
        quotes = part == _QUOTE
        escaped = _escaped(part, self._is_escaped)
        quotes &= ~escaped[:-1]
        self._is_escaped = bool(escaped[-1])
        inside = np.bitwise_xor.accumulate(quotes)
        outside = inside if self._is_in_string else ~inside
        self._is_in_string ^= bool(inside[-1])
        folded = part | _CASE
        found = folded == _OPENING
        found |= folded == _CLOSING
        found |= part == COMMA
        found &= outside
        return np.flatnonzero(found)


def depth_changes(kinds: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    """Return by how much each of these characters changes the number of brackets that are open."""
    folded = kinds | _CASE
    changes: npt.NDArray[np.int8] = (folded == _OPENING).astype(np.int8)
    changes -= folded == _CLOSING
    return changes


def _escaped(part: npt.NDArray[np.uint8], first: bool) -> npt.NDArray[np.bool_]:
    """Return whether each byte, and the one after the last, is escaped. `first`: whether the first one is."""
    escaped = np.zeros(len(part) + 1, np.bool_)
    escaped[0] = first
    backslashes = part == _BACKSLASH
    if not backslashes.any():
        return escaped
    indexes = np.arange(len(part), dtype=np.int32)
    last_other = np.maximum.accumulate(np.where(backslashes, np.int32(-1), indexes))
    place_in_run = indexes - last_other
    if first:
        place_in_run[last_other < 0] += 1  # the backslash before this part counts as well
    np.logical_and(place_in_run & 1, backslashes, out=escaped[1:])
    return escaped
