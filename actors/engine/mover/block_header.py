"""The header of a stored block: the key of its contents, a digest of the numerics, and a checksum of its bytes.

Made by `host_store.py` from the executor's tag when a block leaves the device, and compared before it is loaded.

What must always hold: a block is loaded only if its whole header is the expected one and its bytes have the checksum
from when they were stored; the header contains everything that the bits depend on.
"""

from __future__ import annotations

import hashlib
import json
import zlib

import attrs
import numpy as np

_SUMS = 256
"""64-bit words in a row; the rows are summed."""
_ROW_BYTES = 8 * _SUMS


@attrs.frozen
class BlockHeader:
    """Metadata stored with a block."""

    key: bytes
    """Chain key: identifies all tokens up to the block's last, and tenant, salt, model and adapter."""
    num_tokens: int
    numerics: str
    """Digest of everything else that its bits depend on, as `numerics_digest` makes it."""
    checksum: int


def numerics_digest(numerics: str, weights: str, block_size: int, block_bytes: int) -> str:
    """Return a digest that two engines share if the same tokens give the same bytes in a block of either.

    `numerics` is the digest that engines are compared by (dtypes, instruction set, build); `weights` names the weights.
    """
    parts = json.dumps([numerics, weights, block_size, block_bytes])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def checksum_of(memory: memoryview) -> int:
    """Return a checksum of bytes that any flipped bit changes.

    Rows of 64-bit words are summed, which is many times as fast as a CRC over all of them; the CRC covers the sums and
    the bytes after the last whole row. It detects faults, not attacks: it is easy to forge.
    """
    num_summed = memory.nbytes - memory.nbytes % _ROW_BYTES
    checksum = zlib.crc32(memory[num_summed:])
    if num_summed:
        rows = np.frombuffer(memory[:num_summed], np.uint64).reshape(-1, _SUMS)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum
