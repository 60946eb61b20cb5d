"""Checks a receipt, offline: `quipu ledger verify-receipt`. What a receipt is: `receipts.py`.

Everything that is checked comes from the signed statement; what stands beside it, for people to read, must equal it.
With a reader of the ledger, its record and the entries around it are compared as well. A receipt comes from outside: it
may be anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import attrs
import msgspec
import orjson

from .merkle_tree import inclusion_path, leaf_hash, root_of
from .reading import LedgerReader, LedgerRecord
from .receipt_keys import PublicKey, SigningKey, existing_keys, from_base64url
from .receipts import OBJECT, TYPE, arrangement, page_of

MAX_RECEIPT_BYTES: Final = 1 << 20
_HASH_BYTES: Final = 32
_MAX_PATH: Final = 64
_NUM_PARTS: Final = 3


Shown = Callable[[LedgerRecord], Mapping[str, Any]]
"""Returns the values of a record that its tenant sees."""


class Proof(msgspec.Struct, frozen=True):
    algorithm: str
    salt: str
    index: int
    path: list[str]
    root: str


class Place(msgspec.Struct, frozen=True):
    server: str
    hash: str


class Statement(msgspec.Struct, frozen=True):
    """What is signed."""

    record: dict[str, Any]
    earlier: list[str]
    chain: Place
    proof: Proof


@attrs.define
class ReceiptVerdict:
    problems: list[str] = attrs.field(factory=list)
    """Why the receipt proves nothing; empty if it holds."""
    key_id: str | None = None
    is_signer_known: bool = False
    """Whether the key that signed is one of those that were given, and not only the one in the receipt."""
    is_compared: bool = False
    """Whether the ledger itself was read."""
    record: dict[str, Any] | None = None


class _Invalid(Exception):
    """The receipt does not hold. The message says why."""


def check_receipt(
    data: bytes,
    keys: Sequence[PublicKey] | None = None,
    ledger: LedgerReader | None = None,
    shown: Shown | None = None,
) -> ReceiptVerdict:
    """Check a receipt's bytes.

    `keys` are those that may have signed it; without them, those of the ledger's data directory, and without a ledger,
    the one in the receipt. `shown` is needed to compare with the ledger. Raises LedgerError if that cannot
    be read.
    """
    verdict = ReceiptVerdict()
    data_dir = None if ledger is None else ledger.data_dir
    if keys is None and data_dir is not None:
        keys = [key.public for key in existing_keys(data_dir)]
    try:
        statement = _signed_statement(data, keys, verdict)
        verdict.record = statement.record
        _check_inclusion(statement)
        if ledger is not None and shown is not None:
            _compare(statement, ledger, shown, verdict)
    except _Invalid as error:
        verdict.problems.append(str(error))
    return verdict


def _signed_statement(data: bytes, keys: Sequence[PublicKey] | None, verdict: ReceiptVerdict) -> Statement:
    try:
        receipt = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _Invalid(f"it is not JSON: {error}") from None
    if not isinstance(receipt, dict) or receipt.get("object") != OBJECT or not isinstance(receipt.get("jws"), str):
        raise _Invalid("it is not a receipt")
    parts = receipt["jws"].split(".")
    if len(parts) != _NUM_PARTS:
        raise _Invalid("its signature is not a JWS")
    try:
        header, payload = (orjson.loads(from_base64url(part)) for part in parts[:2])
        signature = from_base64url(parts[2])
        key = _key_of(header, keys, verdict)
        statement = msgspec.convert(payload, Statement)
    except (ValueError, msgspec.ValidationError) as error:
        raise _Invalid(f"its signature cannot be read: {error}") from None
    if not key.signed(signature, f"{parts[0]}.{parts[1]}".encode()):
        raise _Invalid("its signature is not that of its key: the receipt was changed, or is forged")
    if {name: value for name, value in receipt.items() if name not in ("object", "jws")} != payload:
        raise _Invalid("what it shows differs from what was signed")
    return statement


def _key_of(header: Any, keys: Sequence[PublicKey] | None, verdict: ReceiptVerdict) -> PublicKey:
    if not isinstance(header, dict) or header.get("alg") != "EdDSA" or header.get("typ") != TYPE:
        raise ValueError("it is not signed as a receipt")
    own = PublicKey.from_jwk(header.get("jwk"))
    verdict.key_id = own.key_id
    if keys is None:
        return own
    if own not in keys:
        raise _Invalid(f"it is signed with the key {own.key_id}, which is not one of those given")
    verdict.is_signer_known = True
    return own


def _check_inclusion(statement: Statement) -> None:
    proof = statement.proof
    path = [_digest(sibling) for sibling in proof.path[: _MAX_PATH + 1]]
    if proof.algorithm != "sha256" or len(path) > _MAX_PATH or not 0 <= proof.index < 1 << len(path):
        raise _Invalid("its proof of inclusion is malformed")
    leaf = leaf_hash(_digest(proof.salt) + statement.chain.hash.encode())
    if root_of(leaf, proof.index, path) != _digest(proof.root):
        raise _Invalid("its entry is not in the tree that it names")


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != _HASH_BYTES:
        raise _Invalid("its proof of inclusion is malformed")
    return digest


def _compare(statement: Statement, ledger: LedgerReader, shown: Shown, verdict: ReceiptVerdict) -> None:
    """Compare with the ledger. Raises _Invalid."""
    request_id = statement.record.get("request_id")
    found = ledger.get(request_id) if isinstance(request_id, str) and request_id.isprintable() else None
    verdict.is_compared = True
    if found is None:
        raise _Invalid("the ledger has no record of this request")
    if (found.server, found.hash) != (statement.chain.server, statement.chain.hash):
        raise _Invalid("the ledger has another entry for this request")
    values = orjson.loads(orjson.dumps(shown(found)))
    for name in values.keys() | statement.record.keys():
        if values.get(name) != statement.record.get(name):
            raise _Invalid(f"{name} is {values.get(name)!r} in the ledger, {statement.record.get(name)!r} here")
    if ledger.data_dir is None:
        return
    for key in existing_keys(ledger.data_dir):
        if key.public.key_id == verdict.key_id and not _is_pinned(statement, found, ledger, key):
            raise _Invalid("the ledger's entries around this one are not those of when the receipt was made")


def _is_pinned(statement: Statement, found: LedgerRecord, ledger: LedgerReader, key: SigningKey) -> bool:
    """Return whether the page of the entry once had this root: with all its entries, or without the newest ones.

    If retention has deleted the page's first entries, nobody can tell any more.
    """
    page = page_of(found.number)
    hashes = ledger.hashes(found.server, page.start, page.stop)
    if page.start not in hashes:
        return True
    arranged = arrangement(key.salt_secret, found.record.request_id, found.number)
    own = arranged.order.index(found.number)
    while found.number in hashes:
        leaves = arranged.leaves(hashes)
        if root_of(leaves[own], own, inclusion_path(leaves, own)).hex() == statement.proof.root:
            return True
        del hashes[max(hashes)]
    return False
