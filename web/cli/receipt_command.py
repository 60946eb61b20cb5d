"""`quipu ledger verify-receipt FILE`: check a receipt, offline.

It needs nothing but the file and the server's public keys (`GET /v1/usage/keys`, saved). With `--data-dir` or
`--ledger-url` it compares with the ledger itself. The exit code is 1 if the receipt proves nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from quipu.actors.ledger.database import LedgerError
from quipu.actors.ledger.reading import LedgerRecord, open_reader
from quipu.actors.ledger.receipt_checking import MAX_RECEIPT_BYTES, ReceiptVerdict, check_receipt
from quipu.actors.ledger.receipt_keys import PublicKey, read_key_set

from ..api.admin.shown_record import shown_record
from .command_output import EXIT_FAILED
from .ledger_flags import ledger_place
from .one_line_parser import add_command

_SHOWN = ("request_id", "tenant", "model", "outcome", "fault", "prompt_tokens", "cached_tokens", "completion_tokens")


def add_receipt_action(actions: Any) -> argparse.ArgumentParser:
    action: argparse.ArgumentParser = add_command(
        actions, "verify-receipt", "check a receipt: its signature, its proof and, with the ledger, its record"
    )
    action.add_argument(
        "file", metavar="FILE", help="the receipt, as GET /v1/usage/{request_id}/receipt returned it; - for stdin"
    )
    keys = "the server's public keys, as GET /v1/usage/keys returned them (default: those in --data-dir)"
    action.add_argument("--keys", type=Path, metavar="FILE", help=keys)
    return action


def verify_receipt(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `quipu ledger verify-receipt`; return the exit code. Raises LedgerError."""
    data = _read(arguments.file)
    keys = None if arguments.keys is None else _keys(arguments.keys)
    if arguments.data_dir or arguments.ledger_url:
        with open_reader(**ledger_place(arguments, environment)) as reader:
            verdict = check_receipt(data, keys, reader, _shown)
    else:
        verdict = check_receipt(data, keys)
    if arguments.json:
        print(orjson.dumps(attrs.asdict(verdict)).decode())
    else:
        _print(verdict)
    return EXIT_FAILED if verdict.problems else 0


def _shown(found: LedgerRecord) -> dict[str, Any]:
    return shown_record(found, for_admin=False)


def _print(verdict: ReceiptVerdict) -> None:
    for problem in verdict.problems:
        print(f"not valid: {problem}")
    if verdict.problems:
        return
    for name in _SHOWN:
        value = None if verdict.record is None else verdict.record.get(name)
        if value is not None:
            print(f"  {name:<20}{value}")
    signer = "a key of the server" if verdict.is_signer_known else "a key that only the receipt names"
    print(f"valid: signed with {verdict.key_id}, {signer}")
    if verdict.is_compared:
        print("the ledger says the same")
    if not verdict.is_signer_known:
        print(
            "whose key that is was not checked: pass --keys, as the server's /v1/usage/keys has them", file=sys.stderr
        )


def _read(name: str) -> bytes:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(MAX_RECEIPT_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(MAX_RECEIPT_BYTES + 1)
    except OSError as error:
        raise LedgerError(f"cannot read {name}: {error.strerror}") from None
    if len(data) > MAX_RECEIPT_BYTES:
        raise LedgerError(f"{name} is larger than a receipt can be ({MAX_RECEIPT_BYTES >> 20} MiB)")
    return data


def _keys(path: Path) -> list[PublicKey]:
    data = _read(str(path))
    try:
        return read_key_set(data)
    except ValueError as error:
        raise LedgerError(f"cannot read the keys in {path}: {error}") from None
