"""The safetensors files of a checkpoint: the tensors in their headers, and the files mapped into memory.

Headers are validated before anything is read: truncated files, wrong sizes, overlaps and gaps are refused by the
tensor's name. The format: https://github.com/huggingface/safetensors.

What must always hold: each tensor's bytes lie within its file, and belong to no other tensor.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from .gguf_file import shown

STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Supported dtypes of plain tensors, by their name in headers."""
READ_DTYPES = STORED_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""Dtypes of all tensors that can be read, as parts of quantized ones too."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format."""
_MAX_NAME_CHARACTERS = 1024
_MAX_DIMENSIONS = 64
_MAX_NUMBER = 2**63 - 1
_BYTES = {"F64": 8, "U64": 8, "U32": 4, "I16": 2, "U16": 2, "BOOL": 1}


@attrs.frozen
class StoredTensor:
    """One tensor as a header describes it."""

    name: str
    path: Path
    dtype: str
    """The name in the header."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    end: int


def find_tensors(model_path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a checkpoint, sharded or in a single file.

    Raises ValueError for files that are missing, damaged or contradict the index, naming file and tensor.
    """
    index = model_path / "model.safetensors.index.json"
    single = model_path / "model.safetensors"
    if index.is_file():
        found = _find_indexed(model_path, index)
    elif single.is_file():
        found = {tensor.name: tensor for tensor in read_header(single)}
    else:
        raise ValueError(f"{model_path} has neither {single.name} nor {index.name}")
    if not found:
        raise ValueError(f"{model_path} has no tensors")
    return found


def _find_indexed(model_path: Path, index: Path) -> dict[str, StoredTensor]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        paths = {str(name): model_path / Path(file).name for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{index.name} is not a valid index of a sharded checkpoint") from None
    found: dict[str, StoredTensor] = {}
    for path in sorted(set(paths.values())):
        if not path.is_file():
            lost = min(name for name, its in paths.items() if its == path)
            raise ValueError(f"checkpoint lacks file {path.name}, which holds tensor {lost} as {index.name} says")
        for tensor in read_header(path):
            if tensor.name in found:
                raise ValueError(f"tensor {tensor.name} is in both {found[tensor.name].path.name} and {path.name}")
            found[tensor.name] = tensor
    for name, path in paths.items():
        if name not in found or found[name].path != path:
            raise ValueError(f"{path.name} lacks tensor {name}, which {index.name} says it holds")
    return found


def read_header(path: Path) -> list[StoredTensor]:
    """Return a file's tensors in the order of their bytes. Raises ValueError, naming the tensor, if invalid."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        header = file.read(_header_length(start, path, size, _MAX_HEADER_BYTES))
    return _parse_header(header, path, size)


def parse_header(data: bytearray, path: Path, *, most: int) -> list[StoredTensor]:
    """Return the tensors of a file that has been read from `path`, and whose header has at most so many bytes.

    Raises ValueError as `read_header` does.
    """
    length = _header_length(data[:_LENGTH_BYTES], path, len(data), most)
    return _parse_header(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length]), path, len(data))


def _header_length(start: bytes | bytearray, path: Path, size: int, most: int) -> int:
    length = int.from_bytes(start, "little")
    if size < _LENGTH_BYTES or length > most or _LENGTH_BYTES + length > size:
        raise ValueError(f"{path.name} cannot be read: it has {size} bytes, fewer than its header says it needs")
    return length


def _parse_header(header: bytes, path: Path, size: int) -> list[StoredTensor]:
    begin = _LENGTH_BYTES + len(header)
    try:
        entries = json.loads(header, object_pairs_hook=_unique)
        if not isinstance(entries, dict):
            raise ValueError("not a JSON object")
    except RecursionError:
        raise ValueError(f"{path.name} cannot be read: its header is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path.name} cannot be read: its header is damaged ({error})") from None
    tensors = [_describe(path, name, entry, begin) for name, entry in entries.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    at, before = begin, "the header"
    for tensor in tensors:
        if tensor.end > size:
            raise ValueError(
                f"tensor {tensor.name} ends at byte {tensor.end} of {path.name}, which is truncated at {size}"
            )
        if tensor.start != at:
            fault = "overlaps" if tensor.start < at else "leaves a gap after"
            raise ValueError(f"{path.name} cannot be read: tensor {tensor.name} {fault} {before}")
        at, before = tensor.end, f"tensor {tensor.name}"
    if at != size:
        raise ValueError(f"{path.name} cannot be read: {size - at} bytes after {before} belong to no tensor")
    return tensors


def _describe(path: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    if not _is_name(name):
        raise ValueError(f"{path.name} cannot be read: invalid name of a tensor, {shown(name)}")
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not isinstance(dtype, str) or not _is_name(dtype) or len(shape) > _MAX_DIMENSIONS:
            raise ValueError
        if not all(isinstance(number, int) and 0 <= number <= _MAX_NUMBER for number in (*shape, start, end)):
            raise ValueError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise ValueError(f"{path.name} cannot be read: invalid header entry for tensor {name}") from None
    itemsize = READ_DTYPES[dtype].itemsize if dtype in READ_DTYPES else _BYTES.get(dtype)
    # unknown dtypes cannot be checked here; they are refused when the tensor is requested
    if end < start or (itemsize is not None and end - start != math.prod(shape) * itemsize):
        raise ValueError(
            f"tensor {name} takes {end - start} bytes in {path.name}, too few or too many for {dtype} {shape}"
        )
    return StoredTensor(name, path, dtype, shape, begin + start, begin + end)


def _is_name(text: str) -> bool:
    """Return whether a text may be in messages as it is: JSON may have halves of characters, and very long names."""
    return len(text) <= _MAX_NAME_CHARACTERS and text.isprintable()


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{name if _is_name(name) else shown(name)} is in it twice")
    return found


class MappedFiles:
    """Files mapped into memory, each on its first read.

    Pages that were read count as this process's memory while they are mapped; `drop` returns them to the system, which
    may keep them cached.
    """

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
        """Return `count` elements from `first` on, flat. The caller must neither write to them nor keep them."""
        dtype = READ_DTYPES[tensor.dtype]
        start = tensor.start + first * dtype.itemsize
        data = self._map(tensor.path)
        if start % dtype.itemsize:  # the format allows unaligned tensors
            return torch.frombuffer(bytearray(data[start : start + count * dtype.itemsize]), dtype=dtype)
        return torch.frombuffer(data, dtype=dtype, count=count, offset=start)

    def drop(self, tensor: StoredTensor, first: int, count: int) -> None:
        """Release the pages of these elements."""
        itemsize = READ_DTYPES[tensor.dtype].itemsize
        start = (tensor.start + first * itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        data = self._map(tensor.path)
        data.madvise(mmap.MADV_DONTNEED, start, tensor.start + (first + count) * itemsize - start)

    def rows(self, tensor: StoredTensor, first: int, count: int) -> torch.Tensor:
        """Return rows of a matrix from `first` on. The caller must neither write to them nor keep them."""
        width = math.prod(tensor.shape[1:])
        return self.view(tensor, first * width, count * width).view(count, *tensor.shape[1:])

    def close(self) -> None:
        """Unmap all files; a later read maps them again."""
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # private and writable only because torch warns about read-only memory
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[path].madvise(mmap.MADV_SEQUENTIAL)
        return self._maps[path]
