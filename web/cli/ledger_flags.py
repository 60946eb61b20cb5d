"""The ledger flags of `quipu serve` with the config made from them, and those of the commands that read a ledger."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import quipu
from quipu.actors.config.declarations import Bounds
from quipu.actors.ledger.database import redacted
from quipu.actors.ledger.service import LedgerConfig

from .setting_flags import integer, number

URL_VARIABLE = "QUIPU_LEDGER_URL"


def add_ledger_flags(add: Callable[..., Any]) -> None:
    add(
        "--ledger-url",
        metavar="URL",
        help=f"database of the usage ledger, postgresql+psycopg://USER@HOST/NAME; or set {URL_VARIABLE}, "
        "which no process list shows (default: SQLite in the data directory)",
    )
    amount, count = partial(add, type=number(Bounds(minimum=0))), partial(add, type=integer(Bounds(minimum=0)))
    add("--ledger-fsync", action="store_true", help="respond only when the record would survive a power loss")
    retention = "delete older records from the database; 0 keeps them for ever (default)"
    amount("--ledger-retention-days", default=0.0, metavar="DAYS", help=retention)
    segments = "size of a segment of the write-ahead file"
    add("--ledger-segment-bytes", type=int, default=8 << 20, metavar="BYTES", help=segments)
    window = "how long an Idempotency-Key is remembered (default: a day)"
    amount("--idempotency-window", default=86_400.0, metavar="SECONDS", help=window)
    keys = "how many Idempotency-Keys of a tenant are remembered; the oldest are forgotten first"
    count("--max-idempotency-keys", default=10_000, metavar="N", help=keys)
    refusals = "records of refused requests that are written per tenant and hour; the rest are only counted"
    count("--max-refusal-records", default=500, metavar="N", help=refusals)


def add_place_flags(add: Callable[..., Any]) -> None:
    """Add the flags that say where a ledger is."""
    add("--data-dir", help="the server's data directory (default: data, unless --ledger-url is given)")
    add("--ledger-url", metavar="URL", help=f"URL of the database; or set {URL_VARIABLE}")


def ledger_place(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return where the ledger is, as `open_reader` takes it."""
    url = arguments.ledger_url or environment.get(URL_VARIABLE) or None
    data_dir = arguments.data_dir or (None if url else "data")
    return {"data_dir": None if data_dir is None else Path(data_dir), "url": url}


def ledger_config(arguments: argparse.Namespace, environment: MutableMapping[str, str]) -> LedgerConfig:
    """Return the config. Removes the URL, which may hold a password, from the environment, which children inherit."""
    url = environment.pop(URL_VARIABLE, None)
    return LedgerConfig(
        data_dir=Path(arguments.data_dir),
        url=arguments.ledger_url or url or None,
        fsync=arguments.ledger_fsync,
        segment_bytes=arguments.ledger_segment_bytes,
        idempotency_window_s=arguments.idempotency_window,
        max_idempotency_keys=arguments.max_idempotency_keys,
        max_refusal_records=arguments.max_refusal_records,
        retention_days=arguments.ledger_retention_days,
        version=quipu.__version__,
    )


def ledger_settings(config: LedgerConfig) -> dict[str, object]:
    """Return the settings that `/server_info` may show."""
    return {
        "ledger_url": None if config.url is None else redacted(config.url),
        "ledger_fsync": config.fsync,
        "ledger_retention_days": config.retention_days,
        "idempotency_window": config.idempotency_window_s,
        "max_idempotency_keys": config.max_idempotency_keys,
        "max_refusal_records": config.max_refusal_records,
    }
