"""Repeats what the disk or the ledger refuses for a while. Used by the service."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeVar

import structlog
import trio

from ..request.errors import APIError

T = TypeVar("T")

FindRecorded = Callable[[Sequence[str]], Awaitable[Collection[str]]]
"""Returns which of these requests have a usage record, and were not failed by the server itself. Raises APIError if the
ledger cannot be read now."""

log = structlog.get_logger("quipu.batches")


async def insist(attempt: Callable[[], Awaitable[T]], pause_s: float) -> T:
    """Return what an attempt returns, made again and again while the disk or a lack of memory refuses it."""
    has_failed = False
    while True:
        try:
            return await attempt()
        except (OSError, sqlite3.Error, MemoryError) as error:
            if not has_failed:
                log.error("batch.store_failed", error=f"{type(error).__name__}: {error}", help="it is tried again")
            has_failed = True
        await trio.sleep(pause_s)


async def insist_on_ledger(find: FindRecorded, request_ids: Sequence[str], pause_s: float) -> Collection[str]:
    """Return which of these requests have a usage record, asked again and again while the ledger cannot be read."""
    while True:
        try:
            return await find(request_ids)
        except APIError as error:
            log.error("batch.ledger_away", error=error.message, help="it is tried again")
        await trio.sleep(pause_s)
