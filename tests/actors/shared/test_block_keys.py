"""Block keys: the exact bytes that they are computed from."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quipu.actors.shared.block_keys import (
    KEY_BYTES,
    chain_keys,
    chain_keys_in_python,
    key_prefixes,
    key_prefixes_in_python,
    pack_tokens,
    pack_tokens_in_python,
    root_key,
)

Chain = Callable[[bytes, Sequence[int], int], list[bytes]]
CHAINS = [chain_keys_in_python, chain_keys]
"""In Python, and in C if it was built."""

FIELDS = {"domain": "tenant", "model": "demo", "kv_dtype": "bfloat16", "kv_layout": "paged", "block_size": 16}
NAMES = ("domain", "model", "kv_dtype", "kv_layout")


def test_root_key_hashes_tagged_fields() -> None:
    """Each field is preceded by the lengths of its name and value, including group 0."""
    written = (
        b"quipu-root-1"
        b"6:domain=6:tenant"
        b"4:salt=0:"
        b"7:adapter=0:"
        b"5:model=4:demo"
        b"8:kv_dtype=8:bfloat16"
        b"9:kv_layout=5:paged"
        b"10:block_size=2:16"
        b"8:group_id=1:0"
    )
    assert root_key(**FIELDS) == hashlib.sha256(written).digest()
    assert root_key(**FIELDS).hex() == "db7858534816020bba93527db62cb38ef36a5ffa3d7290a4db5db4e52486a4ab"


@pytest.mark.parametrize("chain_keys", CHAINS)
def test_block_key_hashes_parent_and_ids(chain_keys: Chain) -> None:
    """Ids are four bytes, little-endian; each key is the parent of the next; a partial block has none."""
    root = root_key(**FIELDS)
    first = hashlib.sha256(root + bytes([1, 0, 0, 0, 0, 1, 0, 0])).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 70_000, 2**32 - 1)).digest()
    assert chain_keys(root, [1, 256, 70_000, 2**32 - 1, 5], 2) == [first, second]
    assert len(first) == KEY_BYTES


@pytest.mark.parametrize("chain_keys", CHAINS)
def test_partial_block_has_no_key(chain_keys: Chain) -> None:
    """Only full blocks have keys."""
    assert chain_keys(b"root", [], 4) == []
    assert chain_keys(b"root", [1, 2, 3], 4) == []


@given(st.binary(max_size=200), st.lists(st.integers(0, 2**32 - 1), max_size=120), st.integers(1, 40))
def test_python_and_c_agree(parent: bytes, tokens: list[int], size: int) -> None:
    """Python and C agree for all lengths, so every way of padding the last chunk of the hash occurs."""
    assert chain_keys(parent, tokens, size) == chain_keys_in_python(parent, tokens, size)
    assert chain_keys(parent, tuple(tokens), size) == chain_keys_in_python(parent, tokens, size)


def test_every_padding_length() -> None:
    """The last chunk of the hash may or may not have room for the length of the message: all cases are tested twice."""
    for length in range(140):
        assert chain_keys(bytes(length), [7, 8], 1) == chain_keys_in_python(bytes(length), [7, 8], 1)


@pytest.mark.parametrize("chain_keys", CHAINS)
@pytest.mark.parametrize(
    ("token_ids", "error"), [([1, -1], OverflowError), ([2**32], OverflowError), ([0.5, 1], TypeError)]
)
def test_invalid_token_ids_raise(chain_keys: Chain, token_ids: list[int], error: type[Exception]) -> None:
    """Nothing is truncated, not even in a partial block."""
    with pytest.raises(error):
        chain_keys(b"root", token_ids, 4)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 7), st.integers(0, 6))
def test_chain_can_be_continued(tokens: list[int], size: int, cut: int) -> None:
    """Prompt keys computed at once equal keys computed block by block while decoding."""
    whole = chain_keys(b"root", tokens, size)
    cut = min(cut, len(whole))
    front = chain_keys(b"root", tokens[: cut * size], size)
    back = chain_keys(front[-1] if front else b"root", tokens[cut * size :], size)
    assert front + back == whole
    assert len(whole) == len(tokens) // size


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3))
def test_key_covers_all_previous_tokens(left: list[int], right: list[int], size: int) -> None:
    """A key identifies all tokens up to the end of the block, not only the block's own."""
    for index, (a, b) in enumerate(zip(chain_keys(b"r", left, size), chain_keys(b"r", right, size), strict=False)):
        end = (index + 1) * size
        assert (a == b) == (left[:end] == right[:end])


@given(*[st.fixed_dictionaries({name: st.text(alphabet="ab=:5\x00", max_size=6) for name in NAMES})] * 2)
def test_no_field_can_imitate_another(left: dict[str, str], right: dict[str, str]) -> None:
    """Different fields give different roots, whatever separators their values contain."""
    assume(left != right)
    assert root_key(**left, block_size=16) != root_key(**right, block_size=16)


def test_fields_are_delimited() -> None:
    """Text moved across a field boundary, a value that spells the next field, and other sizes and groups differ."""
    roots = [
        root_key(**{**FIELDS, **change})
        for change in (
            {},
            {"domain": "tenan", "model": "tdemo"},
            {"domain": "tenant5:model=4:demo"},
            {"domain": "demo", "model": "tenant"},
            {"domain": ""},
            {"domain": "tënant"},
            {"block_size": 1, "group_id": 60},
            {"block_size": 160},
            {"group_id": 1},
        )
    ]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("pack", [pack_tokens_in_python, pack_tokens])
def test_packed_tokens(pack: Callable[[list[int], int, int], bytes]) -> None:
    """Each token of a run is four bytes, and a run ends where the list ends; an invalid token id is an error."""
    tokens = [1, 256, 70_000, 2**32 - 1, 5]
    assert list(array("I", pack(tokens, 1, 4))) == tokens[1:4]
    assert list(array("I", pack(tokens, 3, 9))) == tokens[3:]
    assert pack(tokens, 2, 2) == pack(tokens, 7, 9) == b""
    for wrong in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            pack(wrong, 0, 1)
    with pytest.raises(TypeError):
        pack(["a"], 0, 1)


@pytest.mark.parametrize("prefixes", [key_prefixes_in_python, key_prefixes])
def test_key_prefixes(prefixes: Callable[[list[bytes]], bytes]) -> None:
    """The prefixes are the first eight bytes of each key, concatenated."""
    keys = [bytes([number]) * 8 + bytes(24) for number in range(3)]
    assert prefixes(keys) == b"".join(key[:8] for key in keys)
    assert prefixes([]) == b""
