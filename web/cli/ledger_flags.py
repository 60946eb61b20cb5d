"""The ledger flags of `quipu serve`, and the config made from them. Used by `serve_flags.py` and `serve.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import quipu
from quipu.actors.config.declarations import Bounds
from quipu.actors.ledger.database import redacted
from quipu.actors.ledger.service import LedgerConfig

from .setting_flags import integer, number

URL_VARIABLE = "QUIPU_LEDGER_URL"


def add_ledger_flags(add: Callable[..., Any]) -> None:
    """Add the flags with `add`, a parser's `add_argument`."""
    add(
        "--ledger-url",
        metavar="URL",
        help=f"database of the usage ledger, postgresql+psycopg://USER@HOST/NAME; or set {URL_VARIABLE}, "
        "which no process list shows (default: SQLite in the data directory)",
    )
    add("--ledger-fsync", action="store_true", help="respond only when the record would survive a power loss")
    add(
        "--ledger-retention-days",
        type=number(Bounds(minimum=0)),
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
        type=number(Bounds(minimum=0)),
        default=86_400.0,
        metavar="SECONDS",
        help="how long an Idempotency-Key is remembered (default: a day)",
    )
    add(
        "--max-idempotency-keys",
        type=integer(Bounds(minimum=0)),
        default=10_000,
        metavar="N",
        help="how many Idempotency-Keys of a tenant are remembered; the oldest are forgotten first "
        "(default: %(default)s)",
    )
    add(
        "--max-refusal-records",
        type=integer(Bounds(minimum=0)),
        default=500,
        metavar="N",
        help="records of refused requests that are written per tenant and hour; the rest are only counted "
        "(default: %(default)s)",
    )


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
