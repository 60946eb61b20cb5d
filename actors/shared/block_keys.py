"""Keys of cached blocks.

A key identifies a block together with everything before it: SHA-256 over the previous key and the block's token ids,
starting from a root key for everything besides tokens that determines the KV in a block (and who may read it). The
tokenizer computes the keys of prompts, the scheduler those of blocks that decoding fills, and the executor its own for
its tags; all of them use this module.

What must always hold: two chains share a key only if they share domain, model, layout and every token and image up to
there.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence

from ..messages.images import PromptImage
from .native import IS_COMPILED

KEY_BYTES = 32
KEY_PREFIX_BYTES = 8
"""How much of a key is reported to the web side: enough for an estimate of what an engine has cached."""


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
    """Return the key that a chain starts from.

    Every field is tagged and length-prefixed, so that no value can imitate another field. `domain` is who may share
    blocks (the tenant, never a name that clients choose), and `salt` subdivides it at the client's request; `adapter`
    is what changes the weights; `group_id` distinguishes layers with block tables of their own.
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
    """Return the keys of the full blocks of `token_ids`, each chained to the previous one, the first to `parent`.

    Token ids are hashed as little-endian 32-bit integers on every machine. A partial last block has no key.
    """
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    stride = block_size * packed.itemsize
    sha256 = hashlib.sha256
    whole = memoryview(packed).cast("B")[: len(packed) // block_size * stride]
    key = parent
    return [key := sha256(key + block).digest() for (block,) in struct.iter_unpack(f"{stride}s", whole)]


def pack_tokens_in_python(token_ids: list[int], start: int, end: int) -> bytes:
    """Return a run of token ids as 32-bit integers in the machine's byte order."""
    return array("I", token_ids[start:end]).tobytes()


def key_prefixes_in_python(keys: list[bytes]) -> bytes:
    """Return the first KEY_PREFIX_BYTES of each key, one after the other."""
    # eight bytes of each key at once: key by key takes four times as long
    return memoryview(b"".join(keys)).cast("Q")[:: KEY_BYTES // KEY_PREFIX_BYTES].tobytes()


if IS_COMPILED:  # chain_keys is 2.5 times as fast: setting up a hash costs more than hashing a block
    from .native._native import chain_keys as chain_keys
    from .native._native import key_prefixes as key_prefixes
    from .native._native import pack_tokens as pack_tokens
else:
    chain_keys, pack_tokens, key_prefixes = chain_keys_in_python, pack_tokens_in_python, key_prefixes_in_python


def chain_image_keys(
    parent: bytes, token_ids: Sequence[int], block_size: int, images: Sequence[PromptImage], start: int
) -> list[bytes]:
    """Return the keys of blocks of a prompt with images, in order, as `chain_keys` returns those of text.

    `start` is the position of the first token, a multiple of the block size. Placeholders are the same in all images:
    what the first block of an image is chained to is therefore a hash of the previous key, the image and its place, and
    likewise for every further block that holds placeholders. All other blocks have the keys of text.
    """
    keys: list[bytes] = []
    end = len(token_ids) // block_size * block_size
    at = 0
    while at < end:
        block = start + at
        held = [image for image in images if image.start < block + block_size and image.end > block]
        parent = keys[-1] if keys else parent
        if held:
            digest = hashlib.sha256(b"quipu-images-1" + parent)
            for image in held:
                digest.update(image.digest + struct.pack("<q", image.start - block))
            keys += chain_keys(digest.digest(), token_ids[at : at + block_size], block_size)
            at += block_size
        else:
            next_image = min((image.start for image in images if image.start >= block), default=start + end)
            until = min(end, max(at + block_size, (next_image // block_size * block_size) - start))
            keys += chain_keys(parent, token_ids[at:until], block_size)
            at = until
    return keys
