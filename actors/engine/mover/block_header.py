"""The header of a stored block: the key of its contents, a digest of the numerics, and a checksum of its bytes.

Made by `host_store.py` from the executor's tag when a block leaves the device, and compared before it is loaded.

What must always hold: a block is loaded only if its whole header is the expected one and its bytes have the checksum
from when they were stored; the header contains everything that the bits depend on.
"""

from __future__ import annotations

import hashlib
import json

import attrs
import xxhash


@attrs.frozen
class BlockHeader:
    """Metadata stored with a block."""

    key: bytes
    """Chain key: identifies all tokens up to the block's last, and tenant, salt, model and adapter."""
    num_tokens: int
    numerics: str
    """Digest of everything else that its bits depend on, as `numerics_digest` makes it."""
    checksum: int
    """As `checksum_of` makes it: in 64 bits."""


def numerics_digest(numerics: str, weights: str, block_size: int, block_bytes: int) -> str:
    """Return a digest that two engines share if the same tokens give the same bytes in a block of either.

    `numerics` is the digest that engines are compared by (dtypes, instruction set, build); `weights` names the weights.
    """
    parts = json.dumps([numerics, weights, block_size, block_bytes])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def checksum_of(memory: memoryview) -> int:
    """Return a checksum in 64 bits of bytes and their order. Releases the GIL for a block of usual size.

    XXH3 reads memory as fast as a sum does. It detects faults, not attacks: it is easy to forge.
    """
    return xxhash.xxh3_64_intdigest(memory)
