"""The format of objects: what opens, and what does not."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quipu.actors.engine.mover.remote_keys import RemoteKeys
from quipu.actors.engine.mover.remote_object import OVERHEAD_BYTES, Forged, ObjectFormat

SECRET, ENCRYPTION, OTHER = (hashlib.sha256(word).digest() for word in (b"secret", b"encryption", b"other"))
PLAIN = ObjectFormat(RemoteKeys.derive(SECRET, None))
ENCRYPTED = ObjectFormat(RemoteKeys.derive(SECRET, ENCRYPTION))
FORMATS = pytest.mark.parametrize("format_", [PLAIN, ENCRYPTED], ids=["authenticated", "encrypted"])
DIGEST = hashlib.sha256(b"block").digest()
BLOCK = random.Random(1).randbytes(5000)


def seal(format_: ObjectFormat, block: bytes = BLOCK) -> bytes:
    return format_.seal(DIGEST, 16, 2**64 - 3, memoryview(block))


@FORMATS
@given(st.binary(max_size=300), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_what_was_sealed_opens(format_: ObjectFormat, block: bytes, num_tokens: int, checksum: int) -> None:
    """An object gives back its block, number of tokens and checksum, and has a length that is known beforehand."""
    sealed = format_.seal(DIGEST, num_tokens, checksum, memoryview(block))
    opened = format_.open(DIGEST, sealed)
    assert (opened.num_tokens, opened.checksum, bytes(opened.block)) == (num_tokens, checksum, block)
    assert len(sealed) == len(block) + OVERHEAD_BYTES


@FORMATS
def test_every_flipped_bit_is_noticed(format_: ObjectFormat) -> None:
    """No object opens in which any bit differs, of the head, the block or the tag."""
    sealed = seal(format_, BLOCK[:40])
    for bit in range(8 * len(sealed)):
        changed = bytearray(sealed)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Forged):
            format_.open(DIGEST, bytes(changed))


@FORMATS
def test_no_shortened_or_extended_object_opens(format_: ObjectFormat) -> None:
    """An object that was cut off anywhere, or has more bytes, does not open."""
    sealed = seal(format_, BLOCK[:40])
    for end in range(len(sealed)):
        with pytest.raises(Forged):
            format_.open(DIGEST, sealed[:end])
    with pytest.raises(Forged):
        format_.open(DIGEST, sealed + b"\0")


@FORMATS
def test_an_object_opens_only_as_the_block_it_was_sealed_for(format_: ObjectFormat) -> None:
    """An object under another block's name does not open, nor does it if its head is made to fit."""
    other = hashlib.sha256(b"another block").digest()
    sealed = seal(format_)
    with pytest.raises(Forged, match="another block's"):
        format_.open(other, sealed)
    with pytest.raises(Forged, match="tag"):
        format_.open(other, sealed.replace(DIGEST, other))


@pytest.mark.parametrize("sealing", [PLAIN, ENCRYPTED])
@pytest.mark.parametrize(
    "keys",
    [
        RemoteKeys.derive(OTHER, None),
        RemoteKeys.derive(OTHER, ENCRYPTION),
        RemoteKeys.derive(SECRET, OTHER),
        RemoteKeys.derive(None, ENCRYPTION),
    ],
)
def test_other_keys_do_not_open_it(sealing: ObjectFormat, keys: RemoteKeys) -> None:
    """Whoever lacks one of the secrets opens nothing."""
    with pytest.raises(Forged):
        ObjectFormat(keys).open(DIGEST, seal(sealing))


def test_kinds_do_not_open_each_other() -> None:
    """An authenticated object is not taken for an encrypted one, or the other way round, even with one key for both."""
    keys = RemoteKeys.derive(SECRET, ENCRYPTION)
    plain = ObjectFormat(RemoteKeys(keys.names, keys.objects, is_encrypted=False))
    encrypted = ObjectFormat(keys)
    for sealing, opening in ((plain, encrypted), (encrypted, plain)):
        sealed = seal(sealing)
        for forged in (sealed, sealed[:5] + bytes([1 - sealed[5]]) + sealed[6:]):
            with pytest.raises(Forged):
                opening.open(DIGEST, forged)


def test_an_encrypted_object_shows_nothing_of_its_contents() -> None:
    """Neither block nor checksum can be read, and sealing the same block twice gives different bytes throughout."""
    one, two = (seal(ENCRYPTED, bytes(4096)) for _ in range(2))
    assert (2**64 - 3).to_bytes(8, "little") not in one
    assert bytes(8) not in one[64:]
    assert sum(a == b for a, b in zip(one[64:], two[64:], strict=True)) < 100
    assert BLOCK[:16] not in seal(ENCRYPTED)
    assert BLOCK in seal(PLAIN)
