"""Keys of cached blocks, and the index that finds a block by its key.

A key names a block's whole past: sha256 over the key before it and the block's token ids, starting from a root that
holds everything besides tokens that decides what the KV in a block is (and who may see it). The tokenizer makes the
keys of prompts, the scheduler those of blocks that decoding fills, the executor its own for its tags: all through here.

What must always hold: two chains share a key only if they share domain, model, layout and every token up to there.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from .native import IS_COMPILED

KEY_BYTES = 32
"""Length of a key (sha256)."""


def root_key(
    *,
    domain: str,
    model: str,
    kv_dtype: str,
    kv_layout: str,
    block_size: int,
    salt: str = "",
    adapter: str = "",
    group_id: int = 0,
) -> bytes:
    """The key that a chain starts from.

    Every field is tagged and length-prefixed, so that no value can imitate another field. `domain` is who may share
    (the tenant, never something a client names freely), and `salt` subdivides it at the client's wish; `adapter` is
    what changes the weights; `group_id` tells apart layers that keep their own tables.
    """
    digest = hashlib.sha256(b"quipu-root-1")
    for tag, value in (
        (b"domain", domain.encode()),
        (b"salt", salt.encode()),
        (b"adapter", adapter.encode()),
        (b"model", model.encode()),
        (b"kv_dtype", kv_dtype.encode()),
        (b"kv_layout", kv_layout.encode()),
        (b"block_size", str(block_size).encode()),
        (b"group_id", str(group_id).encode()),
    ):
        digest.update(b"%d:%b=%d:%b" % (len(tag), tag, len(value), value))
    return digest.digest()


def chain_keys_in_python(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of the full blocks of `token_ids`, each chained to the one before, the first to `parent`.

    Token ids enter as little-endian 32-bit integers, whatever the machine. A partial last block has no key.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    stride = block_size * packed.itemsize
    sha256 = hashlib.sha256
    whole = memoryview(packed).cast("B")[: len(packed) // block_size * stride]
    key = parent
    return [key := sha256(key + block).digest() for (block,) in struct.iter_unpack(f"{stride}s", whole)]


if IS_COMPILED:  # two and a half times as fast: setting up a hash costs more than hashing a block
    from .native._native import chain_keys as chain_keys
else:
    chain_keys = chain_keys_in_python
