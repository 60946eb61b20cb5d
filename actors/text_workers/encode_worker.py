"""The program of a process that encodes long texts: it receives one `tokenizer.json`, then one text after the other.

`encode_process.py` starts it, talks to it over its standard input, a socket, and kills it. The library needs up to 300
bytes of memory per token and cannot be interrupted: here the process bounds both.

    source  length (8 bytes); the `tokenizer.json`
    job     operation (1 byte); whether to add special tokens (1 byte); max_tokens (8 bytes); end (8 bytes); pieces of
            the text in UTF-8, each after its length (4 bytes); a length of 0
    answer  kind (1 byte); number (8 bytes); memory of this process (8 bytes); ids and starts, 4 bytes each, or UTF-8
"""

from __future__ import annotations

import os
import struct
from array import array
from enum import IntEnum
from pathlib import Path

from ..fleet.processes.child import Read, become_child
from ..shared.tokenizers_library import Library, LibraryPanic

MEMORY_BYTES = 4 << 30
"""Address space of one process: 8 MB of text with one token per byte needs 2.9 GB with its offsets."""

LENGTH = struct.Struct("<Q")
PIECE_LENGTH = struct.Struct("<I")
JOB = struct.Struct("<B?qQ")
ANSWER = struct.Struct("<BQQ")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Operation(IntEnum):
    """The methods of `encoder.EncodingBackend`."""

    ENCODE = 0
    ENCODE_WITH_STARTS = 1
    NUM_TOKENS_BEFORE = 2


class AnswerKind(IntEnum):
    READY = 0
    NUMBER = 1
    IDS = 2
    """The number says how many."""
    IDS_AND_STARTS = 3
    PANIC = 4
    """The number is the length of the reason in bytes."""


def main() -> None:
    link, read = become_child(MEMORY_BYTES)
    try:
        (num_bytes,) = LENGTH.unpack(read(LENGTH.size))
        library = Library.load(read(num_bytes))
        link.sendall(_pack(AnswerKind.READY, 0))
        while True:
            operation, add_special_tokens, max_tokens, end = JOB.unpack(read(JOB.size))
            for data in _answer(library, Operation(operation), _read_text(read), max_tokens, end, add_special_tokens):
                link.sendall(data)
                del data
    except (EOFError, OSError):
        pass  # the parent is gone


def _read_text(read: Read) -> str:
    data = bytearray()
    while num_bytes := PIECE_LENGTH.unpack(read(PIECE_LENGTH.size))[0]:
        data += read(num_bytes)
    return data.decode()


def _answer(
    library: Library, operation: Operation, text: str, max_tokens: int, end: int, add_special_tokens: bool
) -> tuple[bytes | array[int], ...]:
    try:
        match operation:
            case Operation.ENCODE:
                encoded = library.encode(text, max_tokens=max_tokens, add_special_tokens=add_special_tokens)
                if isinstance(encoded, int):
                    return (_pack(AnswerKind.NUMBER, encoded),)
                return _pack(AnswerKind.IDS, len(encoded)), encoded
            case Operation.ENCODE_WITH_STARTS:
                found = library.encode_with_starts(text, max_tokens=max_tokens, add_special_tokens=add_special_tokens)
                if isinstance(found, int):
                    return (_pack(AnswerKind.NUMBER, found),)
                return _pack(AnswerKind.IDS_AND_STARTS, len(found[0])), *found
            case Operation.NUM_TOKENS_BEFORE:
                return (_pack(AnswerKind.NUMBER, library.num_tokens_before(text, end)),)
    except LibraryPanic as panic:
        reason = str(panic).encode()
        return _pack(AnswerKind.PANIC, len(reason)), reason


def _pack(kind: AnswerKind, number: int) -> bytes:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return ANSWER.pack(kind, number, resident)


if __name__ == "__main__":
    main()
