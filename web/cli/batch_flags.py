"""The flags of files and batches, and what is made of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

from hypercorn.typing import ASGIFramework

from quipu.actors.config.declarations import Bounds

from ..api.admin.reports import RecordedRequests, ids_in
from ..api.admin.usage_source import UsageSource
from ..batches.batch_service import BatchService
from ..batches.batch_store import BatchStore
from ..batches.batch_values import DAY_S, BatchLimits
from .setting_flags import integer, number, parse_size

FOLDER: Final = "batches"
"""Within the data directory."""
_LIMITS: Final = BatchLimits()
_DAYS: Final = Bounds(above=0, maximum=36_500)
_PARTY: Final = ("", True)
"""As whom the server asks its own ledger."""


def add_batch_flags(add: Callable[..., Any]) -> None:
    add(
        "--batches",
        choices=("on", "off"),
        default="on",
        help="serve /v1/files, /v1/batches and /v1/messages/batches, and keep uploaded files in the data directory "
        "(default: on; docs/use/batches.md)",
    )
    count, size = partial(add, type=integer(Bounds(minimum=1))), partial(add, type=parse_size, metavar="SIZE")
    running = "maximum number of lines that run at once, below every other request (default: %(default)s)"
    count("--batch-concurrency", default=_LIMITS.concurrency, metavar="N", help=running)
    size("--max-batch-file-bytes", default=_LIMITS.max_file_bytes, help="maximum size of a file (default: 200MiB)")
    count(
        "--max-batch-lines",
        default=_LIMITS.max_lines,
        metavar="N",
        help="maximum number of lines of a batch (default: %(default)s)",
    )
    storage = "maximum size of one tenant's files and results together (default: 10GiB)"
    size("--max-batch-storage", default=_LIMITS.max_tenant_bytes, help=storage)
    waiting = "maximum number of batches of one tenant that have not ended (default: %(default)s)"
    count("--max-open-batches", default=_LIMITS.max_open_batches, metavar="N", help=waiting)
    ttl = "days after which files, and batches that have ended, are deleted (default: 30)"
    add("--file-ttl", type=number(_DAYS), default=_LIMITS.file_ttl_s / DAY_S, metavar="DAYS", help=ttl)


def batch_limits(arguments: argparse.Namespace) -> BatchLimits:
    return BatchLimits(
        concurrency=arguments.batch_concurrency,
        max_file_bytes=arguments.max_batch_file_bytes,
        max_lines=arguments.max_batch_lines,
        max_line_bytes=arguments.max_body_bytes,
        max_tenant_bytes=arguments.max_batch_storage,
        max_open_batches=arguments.max_open_batches,
        file_ttl_s=max(1, int(arguments.file_ttl * DAY_S)),
    )


def batch_settings(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the settings that `/server_info` may show."""
    names = (
        "batches",
        "batch_concurrency",
        "max_batch_file_bytes",
        "max_batch_lines",
        "max_batch_storage",
        "max_open_batches",
        "file_ttl",
    )
    return {name: vars(arguments)[name] for name in names}


def make_batches(arguments: argparse.Namespace, usage: UsageSource) -> BatchService | None:
    """Return the service of files and batches, or None if there is none. Raises BatchStoreError."""
    if arguments.batches == "off":
        return None
    store = BatchStore(Path(arguments.data_dir) / FOLDER)
    return BatchService(store, batch_limits(arguments), partial(find_recorded, usage))


def running_batches(batches: BatchService | None, app: ASGIFramework) -> AbstractAsyncContextManager[None]:
    """Run batches with an application until the block is left. Raises BatchStoreError."""
    return nullcontext() if batches is None else batches.serving(app)


async def find_recorded(usage: UsageSource, request_ids: Sequence[str]) -> Collection[str]:
    """Return which requests have a usage record that counts. Raises APIError."""
    return ids_in(b"".join(await usage.report(RecordedRequests(tuple(request_ids)), _PARTY)))
