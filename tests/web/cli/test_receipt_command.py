"""`quipu ledger verify-receipt` on files: exit codes, what it prints, and files that are no receipts."""

from __future__ import annotations

import json
from pathlib import Path

import orjson
import pytest

from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.receipt_keys import existing_keys, key_set, signing_key
from quipu.actors.ledger.receipts import make_receipt
from quipu.web.api.admin.shown_record import shown_record
from quipu.web.cli.cli import main
from tests.actors.ledger.open_ledgers import opened, write


async def write_receipt(folder: Path) -> None:
    """Write a ledger to `data`, and beside it a receipt and the keys."""
    async with opened(folder / "data") as ledger:
        await write(ledger, "req-1")
    with open_reader(data_dir=folder / "data") as reader:
        found = reader.get("req-1")
        assert found is not None
        receipt = make_receipt(reader, found, shown_record(found, for_admin=False), signing_key(folder / "data"))
    (folder / "receipt.json").write_bytes(orjson.dumps(receipt))
    keys = key_set(key.public for key in existing_keys(folder / "data"))
    (folder / "keys.json").write_bytes(orjson.dumps(keys))


def verify(folder: Path, *arguments: str) -> int:
    return main(["ledger", "verify-receipt", str(folder / "receipt.json"), *arguments])


async def test_verdicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A receipt holds alone, with keys and beside its ledger, and each time the output says what was checked."""
    await write_receipt(tmp_path)
    assert verify(tmp_path) == 0
    shown = capsys.readouterr()
    assert "cached_tokens       48" in shown.out and "a key that only the receipt names" in shown.out
    assert "pass --keys" in shown.err
    assert verify(tmp_path, "--keys", str(tmp_path / "keys.json")) == 0
    shown = capsys.readouterr()
    assert "a key of the server" in shown.out and "the ledger" not in shown.out and not shown.err
    assert verify(tmp_path, "--data-dir", str(tmp_path / "data"), "--json") == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["problems"], verdict["is_signer_known"], verdict["is_compared"]) == ([], True, True)


async def test_changed_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exit code of a changed receipt is 1, and its numbers are not printed as if they were true."""
    await write_receipt(tmp_path)
    path = tmp_path / "receipt.json"
    path.write_text(path.read_text().replace('"completion_tokens":10', '"completion_tokens":11', 1))
    assert verify(tmp_path) == 1
    shown = capsys.readouterr().out
    assert shown == "not valid: what it shows differs from what was signed\n"


async def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing or huge file and keys that are none are errors in one line, with exit code 2."""
    assert verify(tmp_path) == 2
    await write_receipt(tmp_path)
    (tmp_path / "keys.json").write_text("[]")
    assert verify(tmp_path, "--keys", str(tmp_path / "keys.json")) == 2
    (tmp_path / "receipt.json").write_bytes(b" " * (2 << 20))
    assert verify(tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 3 and "No such file" in lines[0] and "not a JSON Web Key Set" in lines[1] and "1 MiB" in lines[2]
    )
