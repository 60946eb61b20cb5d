"""A Merkle tree over a power of two of leaves, hashed as in RFC 9162, section 2.1.1. Pure; used by receipts.

    leaf  SHA-256 of 0x00 and the leaf's data
    node  SHA-256 of 0x01, the left and the right child

What must always hold: a leaf and a node can never have the same hash, so no inner node can be shown as a leaf.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence


def leaf_hash(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def inclusion_path(leaves: Sequence[bytes], index: int) -> tuple[bytes, ...]:
    """Return the siblings of a leaf and of its ancestors, from the leaf up to below the root.

    `leaves` are hashes, and their number is a power of two.
    """
    path: list[bytes] = []
    level = list(leaves)
    while len(level) > 1:
        path.append(level[index ^ 1])
        level = [_node(level[at], level[at + 1]) for at in range(0, len(level), 2)]
        index >>= 1
    return tuple(path)


def root_of(leaf: bytes, index: int, path: Sequence[bytes]) -> bytes:
    """Return the root of the tree in which the leaf with that hash has that index and path."""
    top = leaf
    for sibling in path:
        top = _node(sibling, top) if index & 1 else _node(top, sibling)
        index >>= 1
    return top


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()
