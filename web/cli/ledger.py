"""The ledger on the command line: `quipu ledger verify|verify-receipt|export|reconcile`.

They read a data directory, a database, or both: with the server down, after a crash, or beside a running one. Results
go to stdout, errors to stderr. The exit code is 1 if something is wrong with the ledger, and 2 if something is wrong
with the command.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import orjson
from sqlalchemy.exc import SQLAlchemyError

from quipu.actors.ledger.checking import Verdict, verify
from quipu.actors.ledger.database import LedgerError, reason
from quipu.actors.ledger.exporting import ExportFormat, export
from quipu.actors.ledger.reading import Query, open_reader
from quipu.actors.ledger.reconciling import ServerAccount, parse_metrics, reconcile

from .command_output import EXIT_FAILED, complain, silence
from .command_progress import command_progress, counted
from .ledger_flags import add_place_flags, ledger_place
from .one_line_parser import OneLineParser, add_command
from .receipt_command import add_receipt_action, verify_receipt
from .server_flags import ADMIN_KEY_VARIABLE

METRICS_S = 10.0
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` is without `ledger`. Returns the exit code."""
    return run_ledger(make_parser().parse_args(argv), os.environ)


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="quipu ledger", description="Verify, export or reconcile the usage ledger.")
    actions = parser.add_subparsers(dest="action", required=True)
    check = add_command(actions, "verify", "check that no record was changed, lost or damaged")
    out = add_command(actions, "export", "export the records as CSV, JSON lines or Parquet")
    compare = add_command(actions, "reconcile", "compare the ledger's sums with the server's counters")
    receipt = add_receipt_action(actions)
    for action in (check, receipt, out, compare):
        add_place_flags(action.add_argument)
    for action in (check, receipt, compare):
        action.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument("--format", choices=[str(one) for one in ExportFormat], default="csv", help="of the output")
    since = "records closed at this time or later: 24h, 7d, or ISO 8601"
    out.add_argument("--since", type=moment, metavar="TIME", help=since)
    out.add_argument("--until", type=moment, metavar="TIME", help="records closed before this time")
    out.add_argument("--output", type=Path, metavar="FILE", help="where it is written (default: standard output)")
    metrics = f"metrics of the running server: http://HOST:PORT/metrics; with the key in {ADMIN_KEY_VARIABLE}"
    compare.add_argument("--metrics-url", metavar="URL", help=metrics)
    return parser


def run_ledger(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run `quipu ledger`; return the exit code."""
    where = ledger_place(arguments, environment)
    try:
        match arguments.action:
            case "verify":
                return _verify(where, as_json=arguments.json)
            case "verify-receipt":
                return verify_receipt(arguments, environment)
            case "export":
                return _export(where, arguments)
            case _:
                return _reconcile(where, arguments, environment.get(ADMIN_KEY_VARIABLE))
    except LedgerError as error:
        return complain(error)
    except SQLAlchemyError as error:  # the database has become unavailable meanwhile
        return complain(f"cannot read the ledger's database: {reason(error)}")
    except BrokenPipeError:  # the reader of the output has closed it
        silence(sys.stdout)
        return 0


def _verify(where: dict[str, Any], *, as_json: bool) -> int:
    with command_progress("verifying", is_off=as_json):
        verdict = verify(**where)
    if as_json:
        print(orjson.dumps(attrs.asdict(verdict)).decode())
    else:
        _print_verdict(verdict)
    return EXIT_FAILED if verdict.bad else 0


def _print_verdict(verdict: Verdict) -> None:
    for line in verdict.bad:
        print(f"bad: {line}")
    under_way = "a server is writing" if verdict.is_in_use else "the next start repairs that"
    for line in verdict.torn:
        print(f"torn: {line} ({under_way})")
    if verdict.num_open:
        print(f"open: {verdict.num_open} requests were admitted and are not closed ({under_way})")
    counted = f"{verdict.num_records} records of {verdict.num_servers} server starts"
    print(f"{'not in order' if verdict.bad else 'in order'}: {counted}")


def _export(where: dict[str, Any], arguments: argparse.Namespace) -> int:
    format_ = ExportFormat(arguments.format)
    if format_ is ExportFormat.PARQUET and arguments.output is None:
        raise LedgerError("Parquet needs a file: --output FILE")
    query = Query(since=arguments.since, until=arguments.until)
    with open_reader(**where) as reader, command_progress("exporting", unit="records") as count:
        records = counted(reader.records(query), count)
        if arguments.output is None:
            num_records = export(records, format_, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            num_records = _write_file(arguments.output, lambda file: export(records, format_, file))
    print(f"{num_records} records", file=sys.stderr)
    return 0


def _write_file(path: Path, write: Callable[[BinaryIO], int]) -> int:
    """Write a file that appears only when it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            num_records = write(file)
        part.replace(path)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return num_records


def _reconcile(where: dict[str, Any], arguments: argparse.Namespace, key: str | None) -> int:
    live = None if arguments.metrics_url is None else _read_metrics(arguments.metrics_url, key)
    with command_progress("adding up", is_off=arguments.json):
        accounts = reconcile(**where, live=live)
    if arguments.json:
        print(orjson.dumps([_account_fields(account) for account in accounts]).decode())
    else:
        for account in accounts:
            _print_account(account)
        num_wrong = sum(not account.agrees for account in accounts)
        print(f"{len(accounts)} server starts, {num_wrong} of them do not agree")
    return 0 if all(account.agrees for account in accounts) else EXIT_FAILED


def _read_metrics(url: str, key: str | None) -> dict[str, float]:
    if not url.startswith(("http://", "https://")):
        raise LedgerError("--metrics-url must begin with http:// or https://")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=METRICS_S) as answer:  # noqa: S310 - checked above
            return parse_metrics(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise LedgerError(f"cannot read {url}: {error}{_key_hint(error.code, has_key=key is not None)}") from None
    except (OSError, urllib.error.URLError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read {url}: {error}") from None


def _key_hint(status: int, *, has_key: bool) -> str:
    """Return the words of an error that say which key the server wants; empty if it refused for another reason."""
    if status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ""
    wanted = "the key in it is not an admin key of this server" if has_key else "it is not set"
    return f"; the server wants an admin key in the variable {ADMIN_KEY_VARIABLE}: {wanted}"


def _account_fields(account: ServerAccount) -> dict[str, object]:
    fields = attrs.asdict(account)
    return {**fields, "agrees": account.agrees, "sums": fields.pop("lines")}


def _print_account(account: ServerAccount) -> None:
    started = datetime.fromtimestamp(account.started_at, UTC).isoformat(timespec="seconds")
    print(f"{account.server}, started {started}, {account.ended}")
    if account.ended == "killed":
        print("  it left no counters; the ledger's sums alone:")
    elif account.ended == "running" and all(line.counter is None for line in account.lines):
        print("  --metrics-url compares with its counters; the ledger's sums alone:")
    if account.num_open:
        print(f"  {account.num_open} accounts are open: their prompts are counted, their records are still to come")
    for line in account.lines:
        counter = "" if line.counter is None else f"{line.counter:>16,.0f}  {'' if line.agrees else 'DIFFERS'}"
        print(f"  {line.name:<40}{line.ledger:>16,.0f}{counter}".rstrip())
    if account.num_suppressed:
        print(f"  {account.num_suppressed} requests that were never admitted were counted, and not written")
    if account.num_recovered:
        print(f"  {account.num_recovered} records of requests whose server had died, closed here")
    print(f"  disputed accounts: {account.num_disputed}")


def moment(text: str) -> float:
    """Parse `24h`, `7d`, `90m` or `30s` ago, an ISO 8601 time (UTC by default), or Unix seconds, into Unix seconds."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _UNIT_S[found[2]]
    try:
        return float(text)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid time {text!r} (for example 24h, 7d, 2026-01-31T12:00:00Z)") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
