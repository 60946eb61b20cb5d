"""Receipts hold offline, say what the ledger says and nothing of others, and are void once anything was changed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import sqlalchemy as sa

from quipu.actors.ledger.database import LedgerError
from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.merkle_tree import inclusion_path, leaf_hash, root_of
from quipu.actors.ledger.reading import LedgerRecord, open_reader
from quipu.actors.ledger.receipt_checking import ReceiptVerdict, check_receipt
from quipu.actors.ledger.receipt_keys import (
    KEY_NAME,
    existing_keys,
    from_base64url,
    key_set,
    read_key_set,
    signing_key,
    to_base64url,
)
from quipu.actors.ledger.receipts import PAGE, make_receipt, page_of
from quipu.web.api.admin.shown_record import shown_record
from tests.actors.ledger.open_ledgers import opened, sa_engine, write

Change = Callable[[dict[str, Any]], object]


def shown(found: LedgerRecord) -> dict[str, Any]:
    return shown_record(found, for_admin=False)


def receipt_of(folder: Path, request_id: str) -> dict[str, Any]:
    with open_reader(data_dir=folder) as reader:
        found = reader.get(request_id)
        assert found is not None
        made: dict[str, Any] = orjson.loads(
            orjson.dumps(make_receipt(reader, found, shown(found), signing_key(folder)))
        )
        return made


def checked(folder: Path, receipt: dict[str, Any]) -> ReceiptVerdict:
    """Check a receipt against its ledger."""
    with open_reader(data_dir=folder) as reader:
        return check_receipt(orjson.dumps(receipt), None, reader, shown)


@pytest.mark.parametrize("num_leaves", [1, 2, 8, 64])
def test_every_leaf_is_in_its_tree(num_leaves: int) -> None:
    """Each leaf's path leads to the same root, and no other leaf, index or path does."""
    leaves = [leaf_hash(bytes([at])) for at in range(num_leaves)]
    paths = [inclusion_path(leaves, at) for at in range(num_leaves)]
    roots = {root_of(leaf, at, path) for at, (leaf, path) in enumerate(zip(leaves, paths, strict=True))}
    assert len(roots) == 1
    for at in range(1, num_leaves):
        assert root_of(leaves[0], at, paths[0]) not in roots
        assert root_of(leaves[at], 0, paths[0]) not in roots
    assert root_of(leaf_hash(b"other"), 0, paths[0]) not in roots


async def test_receipt_repeats_the_record(tmp_path: Path) -> None:
    """A receipt has the record as its tenant sees it, from the file as from the database, always the same."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", "req-2")
        first = receipt_of(tmp_path, "req-1")
        assert first["record"] | {"request_id": "req-1", "cached_tokens": 48} == first["record"]
        with open_reader(data_dir=tmp_path) as reader:
            found = reader.get("req-1")
            assert found is not None and first["record"] == json.loads(json.dumps(shown(found)))
            assert first["chain"] == {"server": found.server, "hash": found.hash}
        assert receipt_of(tmp_path, "req-1") == first
    for path in (tmp_path / FOLDER).glob("*.wal"):
        path.write_bytes(b"")
    later = receipt_of(tmp_path, "req-1")
    assert later["record"] == first["record"] and later["chain"] == first["chain"]


async def test_checks_offline_and_with_the_ledger(tmp_path: Path) -> None:
    """A receipt holds with the server's keys alone, and beside the ledger after others and restarts followed it."""
    async with opened(tmp_path) as ledger:
        await write(ledger, *(f"req-{i}" for i in range(5)))
        receipt = receipt_of(tmp_path, "req-2")
        await write(ledger, *(f"later-{i}" for i in range(5)))
    async with opened(tmp_path):
        pass
    keys = read_key_set(orjson.dumps(key_set(key.public for key in existing_keys(tmp_path))))
    alone = check_receipt(orjson.dumps(receipt), keys)
    assert (alone.problems, alone.is_signer_known, alone.is_compared) == ([], True, False)
    assert alone.record == receipt["record"]
    beside = checked(tmp_path, receipt)
    assert (beside.problems, beside.is_signer_known, beside.is_compared) == ([], True, True)
    nobody = check_receipt(orjson.dumps(receipt))
    assert (nobody.problems, nobody.is_signer_known) == ([], False)


def resigned(receipt: dict[str, Any], change: Change, folder: Path) -> dict[str, Any]:
    """Change what a receipt states and sign it with the server's key."""
    header, payload, _ = receipt["jws"].split(".")
    statement = orjson.loads(from_base64url(payload))
    change(statement)
    signed = f"{header}.{to_base64url(orjson.dumps(statement))}"
    signature = to_base64url(signing_key(folder).sign(signed.encode()))
    return {"object": receipt["object"], **statement, "jws": f"{signed}.{signature}"}


def without_signature(receipt: dict[str, Any], _: Path) -> dict[str, Any]:
    return {name: value for name, value in receipt.items() if name != "jws"}


def in_plain(receipt: dict[str, Any], _: Path) -> dict[str, Any]:
    return {**receipt, "record": {**receipt["record"], "completion_tokens": 1}}


def in_payload(receipt: dict[str, Any], _: Path) -> dict[str, Any]:
    header, payload, signature = receipt["jws"].split(".")
    statement = orjson.loads(from_base64url(payload))
    statement["record"]["completion_tokens"] = 1
    return {
        "object": receipt["object"],
        **statement,
        "jws": f"{header}.{to_base64url(orjson.dumps(statement))}.{signature}",
    }


def by_a_forger(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Sign the same statement with a key of one's own, which the header names."""
    forger = folder / "forger"
    forger.mkdir()
    key = signing_key(forger)
    header, payload, _ = receipt["jws"].split(".")
    own = orjson.loads(from_base64url(header)) | {"jwk": key.public.jwk, "kid": key.public.key_id}
    signed = f"{to_base64url(orjson.dumps(own))}.{payload}"
    return {**receipt, "jws": f"{signed}.{to_base64url(key.sign(signed.encode()))}"}


def other_leaf(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    return resigned(receipt, lambda statement: statement["proof"].update(index=statement["proof"]["index"] ^ 1), folder)


def other_hash(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    return resigned(receipt, lambda statement: statement["chain"].update(hash="ab" * 32), folder)


def malformed_path(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    return resigned(receipt, lambda statement: statement["proof"].update(path=["zz"] * 100), folder)


def without_record(receipt: dict[str, Any], folder: Path) -> dict[str, Any]:
    return resigned(receipt, lambda statement: statement.pop("record"), folder)


def unsigned_algorithm(receipt: dict[str, Any], _: Path) -> dict[str, Any]:
    header, payload, _signature = receipt["jws"].split(".")
    none = orjson.loads(from_base64url(header)) | {"alg": "none"}
    return {**receipt, "jws": f"{to_base64url(orjson.dumps(none))}.{payload}."}


@pytest.mark.parametrize(
    ("forge", "complaint"),
    [
        (without_signature, "not a receipt"),
        (in_plain, "differs from what was signed"),
        (in_payload, "changed, or is forged"),
        (by_a_forger, "not one of those given"),
        (other_leaf, "not in the tree"),
        (other_hash, "not in the tree"),
        (malformed_path, "malformed"),
        (without_record, "cannot be read"),
        (unsigned_algorithm, "not signed as a receipt"),
    ],
)
async def test_changed_receipt_is_void(
    tmp_path: Path, forge: Callable[[dict[str, Any], Path], dict[str, Any]], complaint: str
) -> None:
    """A receipt that was changed anywhere, or is signed by somebody else, does not hold, and the reason is given."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", "req-2")
    forged = forge(receipt_of(tmp_path, "req-1"), tmp_path)
    keys = [key.public for key in existing_keys(tmp_path)]
    (problem,) = check_receipt(orjson.dumps(forged), keys).problems
    assert complaint in problem


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b'{"object": "usage.receipt", "jws": "a.b.c"}', b"\xff", b"1" * 99]
)
def test_anything_else_is_no_receipt(data: bytes) -> None:
    """Any other file is reported as such, not with a traceback."""
    assert len(check_receipt(data).problems) == 1


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            "update usage_records set completion_tokens = 11 where request_id = 'req-2'",
            "completion_tokens is 11 in the ledger",
        ),
        ("update usage_records set hash = '00' where request_id = 'req-2'", "another entry"),
        ("delete from usage_records where request_id = 'req-2'", "no record"),
        (f"update usage_records set hash = '{'00' * 32}' where request_id = 'req-3'", "entries around this one"),
        ("delete from usage_records where request_id = 'req-1'", "entries around this one"),
    ],
)
async def test_changed_ledger_contradicts_receipts(tmp_path: Path, change: str, complaint: str) -> None:
    """A receipt shows a later change of its record in the ledger, and of the entries around it."""
    async with opened(tmp_path) as ledger:
        await write(ledger, *(f"req-{i}" for i in range(5)))
    for path in (tmp_path / FOLDER).glob("*.wal"):
        path.write_bytes(b"")
    receipt = receipt_of(tmp_path, "req-2")
    assert not checked(tmp_path, receipt).problems
    with sa_engine(tmp_path) as engine, engine.begin() as connection:
        connection.execute(sa.text(change))
    (problem,) = checked(tmp_path, receipt).problems
    assert complaint in problem
    assert not check_receipt(orjson.dumps(receipt), [key.public for key in existing_keys(tmp_path)]).problems


async def test_nothing_of_others(tmp_path: Path) -> None:
    """A receipt has no value of another tenant's record, and does not show how many records there are."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-own", tenant="acme")
        alone = receipt_of(tmp_path, "req-own")
        await write(ledger, *(f"req-other-{i}" for i in range(40)), tenant="rival-co", model="secret-model")
        among = receipt_of(tmp_path, "req-own")
        with open_reader(data_dir=tmp_path) as reader:
            others = [found.hash for found in reader.records() if found.record.tenant != "acme"]
    text = json.dumps(among) + "".join(str(from_base64url(part)) for part in among["jws"].split(".")[:2])
    assert len(others) == 40 and not any(value in text for value in ["rival", "secret-model", "req-other", *others])
    assert "number" not in among["chain"] and among["proof"]["index"] == alone["proof"]["index"]
    assert len(among["proof"]["path"]) == len(alone["proof"]["path"]) == 10 and PAGE == 2**10
    assert among["proof"]["root"] != alone["proof"]["root"]
    # leaves of neighbours are salted: their hashes, which an auditor of the ledger has, are not in the path either
    assert not {leaf_hash(value.encode()).hex() for value in others} & set(among["proof"]["path"])


async def test_two_receipts_cannot_be_linked(tmp_path: Path) -> None:
    """Receipts of the same page have neither root nor path in common, so that they do not show how close they are."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", "req-2")
    one, other = (receipt_of(tmp_path, name)["proof"] for name in ("req-1", "req-2"))
    assert one["root"] != other["root"] and not set(one["path"]) & set(other["path"])


async def test_retry_names_earlier_attempts(tmp_path: Path) -> None:
    """The receipt of a retry names the requests before it with its key, those of other tenants excepted."""
    async with opened(tmp_path) as ledger:
        same = {"idempotency_digest": "d", "idempotency_key": "k"}
        await write(ledger, "first", closed_at=1.0, **same)
        await write(ledger, "second", closed_at=2.0, retry_of="first", **same)
        await write(ledger, "third", closed_at=3.0, retry_of="first", **same)
        await write(ledger, "alien", closed_at=1.5, retry_of="first", tenant="b", **same)
    assert [receipt_of(tmp_path, name)["earlier"] for name in ("first", "second", "third")] == [
        [],
        ["first"],
        ["first", "second"],
    ]


async def test_recovered_record(tmp_path: Path) -> None:
    """A request whose server died has a receipt with its fault, of the entry that closed it."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1", closes=False)
    async with opened(tmp_path):
        receipt = receipt_of(tmp_path, "req-1")
    assert (receipt["record"]["fault"], receipt["record"]["recovered"]) == ("recovered", True)
    assert not checked(tmp_path, receipt).problems


async def test_second_page(tmp_path: Path) -> None:
    """Entries of later pages have receipts with the same shape, and neighbours of their own page only."""
    async with opened(tmp_path) as ledger:
        await write(ledger, *(f"req-{i}" for i in range(PAGE + 3)))
    with open_reader(data_dir=tmp_path) as reader:
        found = reader.get(f"req-{PAGE + 1}")
        assert found is not None and page_of(found.number).start == PAGE
        hashes = reader.hashes(found.server, PAGE, 2 * PAGE)
    assert sorted(hashes) == list(range(PAGE, PAGE + 5))
    receipt = receipt_of(tmp_path, f"req-{PAGE + 1}")
    assert len(receipt["proof"]["path"]) == 10 and not checked(tmp_path, receipt).problems


async def test_keys(tmp_path: Path) -> None:
    """The key is private and made once; a renamed one is still published; a broken one is an error that names it."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "req-1")
    receipt = receipt_of(tmp_path, "req-1")
    path = tmp_path / KEY_NAME
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert signing_key(tmp_path).public == signing_key(tmp_path).public
    first = signing_key(tmp_path).public
    path.rename(tmp_path / "receipt_key.2025.pem")
    second = signing_key(tmp_path).public
    assert second != first and [key.public for key in existing_keys(tmp_path)] == [second, first]
    assert not checked(tmp_path, receipt).problems
    path.write_text("nothing")
    with pytest.raises(LedgerError, match=r"receipt_key\.pem is not a private key"):
        signing_key(tmp_path)
    for data in (b"[]", b"{", b'{"keys": [{"kty": "RSA"}]}', b'{"kty": "OKP", "crv": "Ed25519", "x": "AA"}'):
        with pytest.raises(ValueError, match=r"key|JSON"):
            read_key_set(data)
