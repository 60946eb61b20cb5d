"""A process that encodes long texts: it is given one `tokenizer.json`, and texts one after the other.

Started and killed by `encode_processes.py`, over its standard input. The library takes up to 300 bytes of memory for a
token and cannot be stopped: here both end with the process.

    source  bytes  8 bytes; the `tokenizer.json`
    job     what  1 byte; whether special tokens are added  1 byte; most  8 bytes; end  8 bytes; pieces of the text in
            UTF-8, each behind its bytes  4 bytes; a length of 0
    answer  kind  1 byte; number  8 bytes; memory of this process  8 bytes; ids and starts, 4 bytes each, or UTF-8
"""

from __future__ import annotations

import os
import struct
from array import array
from enum import IntEnum
from pathlib import Path

from ..processes.child import Read, become_child
from ..shared.tokenizers_library import Library, LibraryPanic

MEMORY_BYTES = 4 << 30
"""Address space of one worker: 8 MB of text in which every byte is a token takes 2.9 GB with its offsets."""

LENGTH = struct.Struct("<Q")
PIECE_LENGTH = struct.Struct("<I")
JOB = struct.Struct("<B?qQ")
ANSWER = struct.Struct("<BQQ")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class What(IntEnum):
    """What is asked of a text: the methods of `encoder.EncodingBackend`."""

    ENCODE = 0
    ENCODE_WITH_STARTS = 1
    NUM_TOKENS_BEFORE = 2


class Kind(IntEnum):
    """What an answer holds."""

    READY = 0
    NUMBER = 1
    IDS = 2
    """As many as the number says."""
    IDS_AND_STARTS = 3
    PANIC = 4
    """So many bytes of text say why."""


def main() -> None:
    link, read = become_child(MEMORY_BYTES)
    try:
        (num_bytes,) = LENGTH.unpack(read(LENGTH.size))
        library = Library.load(read(num_bytes))
        link.sendall(_pack(Kind.READY, 0))
        while True:
            what, add_special_tokens, most, end = JOB.unpack(read(JOB.size))
            for data in _answer(library, What(what), _read_text(read), most, end, add_special_tokens):
                link.sendall(data)
                del data
    except (EOFError, OSError):
        pass  # the parent has gone


def _read_text(read: Read) -> str:
    data = bytearray()
    while num_bytes := PIECE_LENGTH.unpack(read(PIECE_LENGTH.size))[0]:
        data += read(num_bytes)
    return data.decode()


def _answer(
    library: Library, what: What, text: str, most: int, end: int, add_special_tokens: bool
) -> tuple[bytes | array[int], ...]:
    try:
        match what:
            case What.ENCODE:
                encoded = library.encode(text, most=most, add_special_tokens=add_special_tokens)
                if isinstance(encoded, int):
                    return (_pack(Kind.NUMBER, encoded),)
                return _pack(Kind.IDS, len(encoded)), encoded
            case What.ENCODE_WITH_STARTS:
                found = library.encode_with_starts(text, most=most)
                if isinstance(found, int):
                    return (_pack(Kind.NUMBER, found),)
                return _pack(Kind.IDS_AND_STARTS, len(found[0])), *found
            case What.NUM_TOKENS_BEFORE:
                return (_pack(Kind.NUMBER, library.num_tokens_before(text, end)),)
    except LibraryPanic as panic:
        reason = str(panic).encode()
        return _pack(Kind.PANIC, len(reason)), reason


def _pack(kind: Kind, number: int) -> bytes:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
    return ANSWER.pack(kind, number, resident)


if __name__ == "__main__":
    main()
