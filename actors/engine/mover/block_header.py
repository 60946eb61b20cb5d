"""The header of a stored block: what it contains, by whose arithmetic, and a checksum of its bytes.

Made by `host_store.py` when a block leaves the device, from the executor's tag, and compared when it is to come back.

What must always hold: a block is only loaded if its whole header is the expected one and its bytes have the checksum
that they had when they were stored; the header contains all that the bits depend on.
"""

from __future__ import annotations

import hashlib
import json
import zlib

import attrs
import numpy as np

_SUMS = 256
"""64-bit words in a row; the rows are summed up."""
_ROW_BYTES = 8 * _SUMS


@attrs.frozen
class BlockHeader:
    """What is stored with a block."""

    key: bytes
    """Chain key: stands for all tokens up to the block's last, and for tenant, salt, model and adapter."""
    num_tokens: int
    numerics: str
    """Digest of everything else that its bits depend on, as `numerics_digest` makes it."""
    checksum: int


def numerics_digest(numerics: str, weights: str, block_size: int, block_bytes: int) -> str:
    """Return what two engines have in common if the same tokens give them the same bytes in a block.

    `numerics` is the digest that engines are compared by (dtypes, instruction set, build); `weights` names the weights.
    """
    parts = json.dumps([numerics, weights, block_size, block_bytes])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def checksum_of(memory: memoryview) -> int:
    """Return a checksum of bytes that any flipped bit changes.

    Rows of 64-bit words are added up, which is many times as fast as a CRC of them all; the sums have a CRC, and so do
    the bytes that make no whole row. Nobody is kept from forging it: it finds faults, not attacks.
    """
    num_summed = memory.nbytes - memory.nbytes % _ROW_BYTES
    checksum = zlib.crc32(memory[num_summed:])
    if num_summed:
        rows = np.frombuffer(memory[:num_summed], np.uint64).reshape(-1, _SUMS)
        checksum = zlib.crc32(np.add.reduce(rows, axis=0), checksum)
    return checksum
