"""Repeats what the disk refuses for a while. Used by the service."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import trio

T = TypeVar("T")

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
