"""The keys and the tensors that a GGUF file says it has, as llama.cpp writes them. No torch.

`gguf_parts.py` puts a model together from its files, `gguf_folder.py` makes a checkpoint's JSON files of the keys, and
`gguf_tensors.py` reads the tensors. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

What must always hold: nothing is allocated that the file's own size does not account for; each tensor's bytes lie
within the file, and belong to no other tensor; whatever is wrong is refused by the name of the key or tensor.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs

BLOCKS = {
    "F32": (1, 4),
    "F16": (1, 2),
    "BF16": (1, 2),
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "MXFP4": (32, 17),
}
"""Types of tensors that are read: elements and bytes of a block."""

_NAMES = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4"
)
_TYPES = dict(enumerate(_NAMES.split()))
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_KEYS = 65_536
_MAX_TENSORS = 1_000_000
_MAX_NAME_CHARACTERS = 1024
_MAX_ARRAY_ITEMS = 6_000_000
"""In all arrays together; the largest vocabularies have 300,000 tokens and 600,000 merges."""
_MAX_STRING_BYTES = 128 << 20
"""Of all strings together."""
_MAX_SHOWN_CHARACTERS = 80
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4


@attrs.frozen
class GgufTensor:
    """One tensor as the file describes it."""

    name: str
    path: Path
    """The file that it is in."""
    type: str
    """One of `BLOCKS`."""
    shape: tuple[int, ...]
    """As torch has it: the last dimension is contiguous."""
    start: int
    """First byte in the file."""
    end: int


@attrs.frozen
class GgufFile:
    path: Path
    keys: Mapping[str, Any]
    """Numbers, booleans, strings and lists of these."""
    tensors: Mapping[str, GgufTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read everything but the tensors' numbers. Raises ValueError naming the file, and the key or tensor."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).read()
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        # an empty file cannot be mapped
        raise ValueError(f"{path.name} cannot be read: {error}") from None


def shown(value: object) -> str:
    """Return a value for a message, truncated: it may be as long as the file."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."


class _Reader:
    """Reads from the start of the file to where the tensors begin."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0
        self._what = "the header"
        """What is being read, for messages."""
        self._num_items = 0
        self._num_string_bytes = 0

    def read(self) -> GgufFile:
        if self._take(4) != _MAGIC:
            raise ValueError("it is not a GGUF file")
        version = self._number("I")
        if version not in _VERSIONS:
            raise ValueError(
                f"its version is {version}, supported are {' and '.join(map(str, _VERSIONS))}, little-endian"
            )
        num_tensors, num_keys = self._number("Q"), self._number("Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise ValueError(f"its header says that it has {num_tensors} tensors and {num_keys} keys")
        keys: dict[str, Any] = {}
        for index in range(num_keys):
            self._what = f"the name of key {index}"
            name = self._name()
            self._what = f"key {name!r}"
            if name in keys:
                raise ValueError(f"{self._what} is in it twice")
            keys[name] = self._value(self._number("I"))
        described = [self._describe(index) for index in range(num_tensors)]
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise ValueError(f"key 'general.alignment' is {shown(alignment)}, must be a power of 2")
        begin = -(-self._at // alignment) * alignment
        tensors = [self._place(*one, begin, alignment) for one in described]
        return GgufFile(self._path, keys, _apart(tensors))

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError(f"it is truncated, or damaged, at {self._what}: byte {self._at} of {len(self._data)}")
        taken = self._data[self._at : self._at + count]
        self._at += count
        return taken

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack(f"<{kind}", self._take(struct.calcsize(f"<{kind}")))
        return value

    def _string(self) -> str:
        length = self._number("Q")
        self._num_string_bytes += length
        if self._num_string_bytes > _MAX_STRING_BYTES:
            raise ValueError(f"{self._what} makes its strings longer than {_MAX_STRING_BYTES} bytes")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self._what} is not UTF-8") from None

    def _name(self) -> str:
        name = self._string()
        if not 0 < len(name) <= _MAX_NAME_CHARACTERS:
            raise ValueError(f"{self._what} has {len(name)} characters")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"{self._what} has the unknown type {kind}")
        item, count = self._number("I"), self._number("Q")
        self._num_items += count
        if self._num_items > _MAX_ARRAY_ITEMS:
            raise ValueError(f"{self._what} has {count} items")
        if item in _SCALARS:
            kinds = f"<{count}{_SCALARS[item]}"
            return list(struct.unpack(kinds, self._take(struct.calcsize(kinds))))
        if item != _STRING:
            raise ValueError(f"{self._what} is an array of type {item}, which is not supported")
        if count > (len(self._data) - self._at) // 8:
            raise ValueError(f"it is truncated, or damaged, at {self._what}, which has {count} items")
        return [self._string() for _ in range(count)]

    def _describe(self, index: int) -> tuple[str, str, tuple[int, ...], int]:
        self._what = f"the name of tensor {index}"
        name = self._name()
        self._what = f"tensor {name}"
        num_dimensions = self._number("I")
        if not 0 < num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{self._what} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._number("I"), self._number("Q")
        kind = _TYPES.get(number, f"number {number}")
        if kind not in BLOCKS:
            raise ValueError(f"{self._what} has type {kind}, which is not supported; supported are {', '.join(BLOCKS)}")
        return name, kind, shape, offset

    def _place(
        self, name: str, kind: str, shape: tuple[int, ...], offset: int, begin: int, alignment: int
    ) -> GgufTensor:
        elements, num_bytes = BLOCKS[kind]
        if 0 in shape or shape[-1] % elements:
            raise ValueError(f"tensor {name} has shape {shape}, rows of {kind} must be multiples of {elements}")
        size = math.prod(shape) // elements * num_bytes
        start = begin + offset
        if offset % alignment:
            raise ValueError(f"tensor {name} starts at {offset}, which is not a multiple of {alignment}")
        if start + size > len(self._data):
            raise ValueError(
                f"tensor {name} ends at byte {start + size} of {len(self._data)}: it is truncated, or damaged"
            )
        return GgufTensor(name, self._path, kind, shape, start, start + size)


def _apart(tensors: list[GgufTensor]) -> dict[str, GgufTensor]:
    """Return tensors by name. Raises ValueError for two of one name, or that overlap."""
    found: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.name in found:
            raise ValueError(f"tensor {tensor.name} is in it twice")
        found[tensor.name] = tensor
    ordered = sorted(tensors, key=lambda tensor: tensor.start)
    for before, after in pairwise(ordered):
        if after.start < before.end:
            raise ValueError(f"tensor {after.name} overlaps tensor {before.name}")
    return found
