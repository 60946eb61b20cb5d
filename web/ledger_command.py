"""The ledger on the command line: the server's flags for it, and `quipu ledger verify|export|reconcile`.

The three read a data directory, a database, or both; with the server down, after a crash, or beside a running one.
Answers go to stdout, errors to stderr; the exit code is 1 where something is wrong with the ledger and 2 where
something is wrong with the question.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import attrs
import orjson
from sqlalchemy.exc import SQLAlchemyError

import quipu
from quipu.actors.ledger.checking import Verdict, verify
from quipu.actors.ledger.database import LedgerError, reason, redacted
from quipu.actors.ledger.exporting import ExportFormat, export
from quipu.actors.ledger.reading import Query, open_reader
from quipu.actors.ledger.reconciling import Account, parse_metrics, reconcile
from quipu.actors.ledger.service import LedgerConfig
from quipu.web.key_command import ADMIN_KEY_VARIABLE

EXIT_WRONG = 1
EXIT_USAGE = 2
URL_VARIABLE = "QUIPU_LEDGER_URL"
METRICS_S = 10.0
_AGO = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


def add_ledger_flags(add: Callable[..., Any]) -> None:
    """Of `quipu serve`."""
    add(
        "--ledger-url",
        metavar="URL",
        help=f"database of the usage ledger, postgresql+psycopg://USER@HOST/NAME; or set {URL_VARIABLE}, "
        "which no process list shows (default: SQLite in the data directory)",
    )
    add("--ledger-fsync", action="store_true", help="answer only when the record would survive a power loss")
    add(
        "--ledger-retention-days",
        type=_not_negative,
        default=0.0,
        metavar="DAYS",
        help="delete older records from the database; 0 keeps them for ever (default)",
    )
    add(
        "--ledger-segment-bytes",
        type=int,
        default=8 << 20,
        metavar="BYTES",
        help="size of a segment of the write-ahead file (default: %(default)s)",
    )
    add(
        "--idempotency-window",
        type=_not_negative,
        default=86_400.0,
        metavar="SECONDS",
        help="how long a request is known by its Idempotency-Key (default: a day)",
    )
    add(
        "--max-idempotency-keys",
        type=_whole,
        default=10_000,
        metavar="N",
        help="how many Idempotency-Keys of a tenant are known at a time; the oldest are forgotten first "
        "(default: %(default)s)",
    )


def ledger_config(arguments: argparse.Namespace, environment: MutableMapping[str, str]) -> LedgerConfig:
    """Takes the URL out of the environment: children inherit it, and it may hold a password."""
    url = environment.pop(URL_VARIABLE, None)
    return LedgerConfig(
        data_dir=Path(arguments.data_dir),
        url=arguments.ledger_url or url or None,
        fsync=arguments.ledger_fsync,
        segment_bytes=arguments.ledger_segment_bytes,
        idempotency_window_s=arguments.idempotency_window,
        max_idempotency_keys=arguments.max_idempotency_keys,
        retention_days=arguments.ledger_retention_days,
        version=quipu.__version__,
    )


def ledger_settings(config: LedgerConfig) -> dict[str, object]:
    """What a server may say of it."""
    return {
        "ledger_url": None if config.url is None else redacted(config.url),
        "ledger_fsync": config.fsync,
        "ledger_retention_days": config.retention_days,
        "idempotency_window": config.idempotency_window_s,
        "max_idempotency_keys": config.max_idempotency_keys,
    }


def add_ledger_actions(command: argparse.ArgumentParser) -> None:
    """Of `quipu ledger`."""
    actions = command.add_subparsers(dest="action", required=True)
    check = actions.add_parser("verify", help="check that nothing was changed, lost or spoilt")
    out = actions.add_parser("export", help="write the records out")
    compare = actions.add_parser("reconcile", help="compare the ledger's sums with the counters'")
    for action in (check, out, compare):
        action.add_argument("--data-dir", help="of the server (default: data, where no --ledger-url is given)")
        action.add_argument("--ledger-url", metavar="URL", help=f"of the database; or set {URL_VARIABLE}")
    for action in (check, compare):
        action.add_argument("--json", action="store_true", help="for programs")
    out.add_argument("--format", choices=[str(one) for one in ExportFormat], default="csv")
    out.add_argument("--since", type=moment, metavar="TIME", help="closed then or later: 24h, 7d, or ISO 8601")
    out.add_argument("--until", type=moment, metavar="TIME", help="closed before")
    out.add_argument("--output", type=Path, metavar="FILE", help="default: stdout")
    compare.add_argument(
        "--metrics-url",
        metavar="URL",
        help="of the running server: http://HOST:PORT/metrics; with the key in QUIPU_ADMIN_KEY",
    )


def run_ledger(arguments: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """One of the three; the exit code."""
    url = arguments.ledger_url or environment.get(URL_VARIABLE) or None
    data_dir = arguments.data_dir or (None if url else "data")
    where: dict[str, Any] = {"data_dir": None if data_dir is None else Path(data_dir), "url": url}
    try:
        match arguments.action:
            case "verify":
                return _verify(where, as_json=arguments.json)
            case "export":
                return _export(where, arguments)
            case _:
                return _reconcile(where, arguments, environment.get(ADMIN_KEY_VARIABLE))
    except LedgerError as error:
        print(f"quipu: {error}", file=sys.stderr)
        return EXIT_USAGE
    except SQLAlchemyError as error:  # it was there when we began
        print(f"quipu: cannot read the ledger's database: {reason(error)}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


# ---------------------------------------------------------------- verify


def _verify(where: dict[str, Any], *, as_json: bool) -> int:
    verdict = verify(**where)
    if as_json:
        print(orjson.dumps(attrs.asdict(verdict)).decode())
    else:
        _print_verdict(verdict)
    return EXIT_WRONG if verdict.bad else 0


def _print_verdict(verdict: Verdict) -> None:
    for line in verdict.bad:
        print(f"bad: {line}")
    under_way = "a server is writing" if verdict.is_in_use else "the next start puts that right"
    for line in verdict.torn:
        print(f"torn: {line} ({under_way})")
    if verdict.num_open:
        print(f"open: {verdict.num_open} requests were admitted and are not closed ({under_way})")
    counted = f"{verdict.num_records} records of {verdict.num_servers} server starts"
    print(f"{'not in order' if verdict.bad else 'in order'}: {counted}")


# ---------------------------------------------------------------- export


def _export(where: dict[str, Any], arguments: argparse.Namespace) -> int:
    format_ = ExportFormat(arguments.format)
    if format_ is ExportFormat.PARQUET and arguments.output is None:
        raise LedgerError("Parquet needs a file: --output FILE")
    query = Query(since=arguments.since, until=arguments.until)
    with open_reader(**where) as reader:
        if arguments.output is None:
            num_records = export(reader.records(query), format_, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            num_records = _write_file(arguments.output, lambda file: export(reader.records(query), format_, file))
    print(f"{num_records} records", file=sys.stderr)
    return 0


def _write_file(path: Path, write: Callable[[BinaryIO], int]) -> int:
    """A file appears when it is whole."""
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


# ---------------------------------------------------------------- reconcile


def _reconcile(where: dict[str, Any], arguments: argparse.Namespace, key: str | None) -> int:
    live = None if arguments.metrics_url is None else _read_metrics(arguments.metrics_url, key)
    accounts = reconcile(**where, live=live)
    if arguments.json:
        print(orjson.dumps([_account_fields(account) for account in accounts]).decode())
    else:
        for account in accounts:
            _print_account(account)
        num_wrong = sum(not account.agrees for account in accounts)
        print(f"{len(accounts)} server starts, {num_wrong} of them do not agree")
    return 0 if all(account.agrees for account in accounts) else EXIT_WRONG


def _read_metrics(url: str, key: str | None) -> dict[str, float]:
    if not url.startswith(("http://", "https://")):
        raise LedgerError("--metrics-url must begin with http:// or https://")
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - looked at above
    try:
        with urllib.request.urlopen(request, timeout=METRICS_S) as answer:  # noqa: S310 - looked at above
            return parse_metrics(answer.read().decode())
    except (OSError, urllib.error.URLError, UnicodeDecodeError) as error:
        raise LedgerError(f"cannot read {url}: {error}") from None


def _account_fields(account: Account) -> dict[str, object]:
    return {
        "server": account.server,
        "started_at": account.started_at,
        "ended": account.ended,
        "agrees": account.agrees,
        "num_recovered": account.num_recovered,
        "num_disputed": account.num_disputed,
        "num_open": account.num_open,
        "sums": [{"name": one.name, "ledger": one.ledger, "counter": one.counter} for one in account.lines],
    }


def _print_account(account: Account) -> None:
    started = datetime.fromtimestamp(account.started_at, UTC).isoformat(timespec="seconds")
    print(f"{account.server}, started {started}, {account.ended}")
    if account.ended == "killed":
        print("  it left no counters; the ledger's sums alone:")
    if account.num_open:
        print(f"  {account.num_open} accounts are open: their prompts are counted, their records are still to come")
    for line in account.lines:
        counter = "" if line.counter is None else f"{line.counter:>16,.0f}  {'' if line.agrees else 'DIFFERS'}"
        print(f"  {line.name:<40}{line.ledger:>16,.0f}{counter}".rstrip())
    if account.num_recovered:
        print(f"  {account.num_recovered} records of requests whose server had died, closed here")
    print(f"  disputed accounts: {account.num_disputed}")


def moment(text: str) -> float:
    """Unix seconds of `24h`, `7d`, `90m` or `30s` ago, of an ISO 8601 time (UTC unless it says), or of themselves."""
    if found := _AGO.fullmatch(text):
        return time.time() - float(found[1]) * _UNIT_S[found[2]]
    try:
        return float(text)
    except ValueError:
        pass
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 24h, 7d, 2026-01-31, 2026-01-31T12:00:00Z") from None
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value
