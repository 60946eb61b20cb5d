"""Receipts: a usage record, signed, with a proof that it stands in the ledger. Made for reports, in their process.

A receipt proves to a customer, offline, what the ledger says of one request, and pins the ledger around it. The entries
of a server start are taken in pages of PAGE numbers. Each entry's hash (`entries.py`), which covers all entries before
it, is a leaf of its page's Merkle tree, behind a salt; the receipt has its own leaf and the path to the root.

    receipt   {"object": "usage.receipt", **statement, "jws": the statement, signed (RFC 7515, compact)}
    leaf      salt (32 bytes), entry's hash (64 hexadecimal digits)

What must always hold: a receipt says what the record says to its tenant, and nothing of other entries, not even how
many there are: salts and the order of leaves are derived from a secret and the request id, pages are filled up with
leaves that stand for no entry, and the entry's number is not in it; the same ledger and key make the same receipt.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol

import attrs
import orjson

from ..messages.usage_record import UsageRecord
from .merkle_tree import inclusion_path, leaf_hash, root_of
from .reading import LedgerRecord, Query
from .receipt_keys import SigningKey, to_base64url

PAGE: Final = 1024
MAX_EARLIER: Final = 100
"""Earlier requests with the same idempotency key that a receipt names, the newest ones."""
OBJECT: Final = "usage.receipt"
TYPE: Final = "usage-receipt+jws"
_NO_ENTRY: Final = "0" * 64


class Pages(Protocol):
    """What receipts are made from: a `LedgerReader`."""

    @property
    def data_dir(self) -> Path | None: ...

    def hashes(self, server: str, first: int, end: int) -> dict[int, str]: ...

    def records(self, query: Query | None = None, *, newest_first: bool = False) -> Iterator[LedgerRecord]: ...


@attrs.frozen
class Arrangement:
    """How the tree of one receipt arranges its page: the order of the leaves and their salts."""

    order: tuple[int, ...]
    """The number of an entry by the index of its leaf."""
    salts: Mapping[int, bytes]
    """By number."""

    def leaves(self, hashes: Mapping[int, str]) -> list[bytes]:
        """Return the leaves, of hashes of those entries that exist, by number."""
        return [leaf_hash(self.salts[at] + hashes.get(at, _NO_ENTRY).encode()) for at in self.order]


def page_of(number: int) -> range:
    """Return the numbers of the entries that share a tree with an entry."""
    first = number - number % PAGE
    return range(first, first + PAGE)


def arrangement(secret: bytes, request_id: str, number: int) -> Arrangement:
    """Derive the arrangement of a receipt from the key's secret."""

    def derived(purpose: str, at: int) -> bytes:
        return hmac.digest(secret, f"{purpose}\0{request_id}\0{at}".encode(), "sha256")

    page = page_of(number)
    order = sorted(page, key=lambda at: derived("order", at))
    return Arrangement(tuple(order), {at: derived("salt", at) for at in page})


def make_receipt(reader: Pages, found: LedgerRecord, shown: Mapping[str, Any], key: SigningKey) -> dict[str, Any]:
    """Return the receipt of a record, whose values are `shown` to its tenant."""
    page = page_of(found.number)
    hashes = reader.hashes(found.server, page.start, page.stop) | {found.number: found.hash}
    arranged = arrangement(key.salt_secret, found.record.request_id, found.number)
    leaves, index = arranged.leaves(hashes), arranged.order.index(found.number)
    path = inclusion_path(leaves, index)
    statement = {
        "record": dict(shown),
        "earlier": _earlier(reader, found.record),
        "chain": {"server": found.server, "hash": found.hash},
        "proof": {
            "algorithm": "sha256",
            "salt": arranged.salts[found.number].hex(),
            "index": index,
            "path": [sibling.hex() for sibling in path],
            "root": root_of(leaves[index], index, path).hex(),
        },
    }
    return {"object": OBJECT, **statement, "jws": _signed(statement, key)}


def _earlier(reader: Pages, record: UsageRecord) -> list[str]:
    """Return the ids of the requests that a retry repeats, oldest first."""
    if record.retry_of is None or record.idempotency_digest is None:
        return []
    same = Query(tenants=(record.tenant,), idempotency_digests=(record.idempotency_digest,), until=record.closed_at)
    newest = islice(reader.records(same, newest_first=True), MAX_EARLIER)
    return [other.record.request_id for other in newest][::-1]


def _signed(statement: Mapping[str, Any], key: SigningKey) -> str:
    header = {"alg": "EdDSA", "kid": key.public.key_id, "jwk": key.public.jwk, "typ": TYPE}
    parts = [to_base64url(orjson.dumps(part, option=orjson.OPT_SORT_KEYS)) for part in (header, statement)]
    signed = ".".join(parts)
    return f"{signed}.{to_base64url(key.sign(signed.encode()))}"
