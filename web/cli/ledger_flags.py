"""The ledger flags of `quipu serve` with the config made from them, and those of the commands that read a ledger."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import quipu
from quipu.actors.config.declarations import Bounds
from quipu.actors.ledger.database import redacted
from quipu.actors.ledger.service import LedgerConfig
from quipu.actors.ledger.webhook import WebhookConfig

from .one_line_parser import folder
from .setting_flags import integer, number

URL_VARIABLE = "QUIPU_LEDGER_URL"
WEBHOOK_KEY_VARIABLE = "QUIPU_USAGE_WEBHOOK_KEY"


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
    add("--ledger-segment-bytes", type=integer(Bounds(minimum=1)), default=8 << 20, metavar="BYTES", help=segments)
    window = "how long an Idempotency-Key is remembered (default: a day)"
    amount("--idempotency-window", default=86_400.0, metavar="SECONDS", help=window)
    keys = "how many Idempotency-Keys of a tenant are remembered; the oldest are forgotten first"
    count("--max-idempotency-keys", default=10_000, metavar="N", help=keys)
    refusals = "records of requests that are never admitted, per tenant and hour; the rest are only counted"
    webhook = f"send each usage record to this URL as a CloudEvent; with the key in {WEBHOOK_KEY_VARIABLE}, if set"
    add("--usage-webhook", type=webhook_url, metavar="URL", help=webhook)
    count("--max-refusal-records", default=500, metavar="N", help=refusals)


def add_place_flags(add: Callable[..., Any]) -> None:
    """Add the flags that say where a ledger is."""
    data_help = "the server's data directory (default: data, unless --ledger-url is given)"
    add("--data-dir", type=folder, metavar="FOLDER", help=data_help)
    add("--ledger-url", metavar="URL", help=f"URL of the database; or set {URL_VARIABLE}")


def ledger_place(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return where the ledger is, as `open_reader` takes it."""
    url = arguments.ledger_url or environment.get(URL_VARIABLE) or None
    data_dir = arguments.data_dir or (None if url else "data")
    return {"data_dir": None if data_dir is None else Path(data_dir), "url": url}


def webhook_url(text: str) -> str:
    """Check the URL of a webhook. A key in it would be shown in process lists."""
    try:
        parts = urlsplit(text)
        has_place = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        has_place = None
    if not has_place or not text.isascii() or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"invalid URL {text!r} (for example https://meter.example/api/v1/events)")
    if parts.username is not None or parts.password is not None:
        raise argparse.ArgumentTypeError(f"the URL must not contain a password: set {WEBHOOK_KEY_VARIABLE}")
    return text


def ledger_config(arguments: argparse.Namespace, environment: MutableMapping[str, str]) -> LedgerConfig:
    """Return the config. Removes the URL, which may hold a password, and the webhook's key from the environment, which
    children inherit.
    """
    url, key = environment.pop(URL_VARIABLE, None), environment.pop(WEBHOOK_KEY_VARIABLE, None)
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
        webhook=None if arguments.usage_webhook is None else WebhookConfig(arguments.usage_webhook, key or None),
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
        "usage_webhook": None if config.webhook is None else urlsplit(config.webhook.url).hostname,
    }
