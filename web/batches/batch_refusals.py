"""Why batches and files are refused: their tenant has too many open batches, or the disk or the database fails.

Used by the service and its endpoints; what takes a batch runs in a thread, one at a time. What must always hold:
requests at once do not get a tenant more open batches than allowed; a client is told that the storage failed, and
nothing of why.
"""

from __future__ import annotations

import errno
import sqlite3
from http import HTTPStatus

import structlog

from ..request.errors import APIError, not_found, unavailable
from .batch_store import BatchStore
from .batch_values import Batch, BatchLimits

log = structlog.get_logger("quipu.batches")


def check_room(store: BatchStore, limits: BatchLimits, tenant: str) -> None:
    """Raise APIError if a tenant may not have another batch."""
    num_open = store.use_of(tenant).num_open_batches
    if num_open >= limits.max_open_batches:
        message = (
            f"You have {num_open} batches that have not ended, the most that this server runs. "
            "Wait for some of them, or cancel them."
        )
        raise APIError(HTTPStatus.TOO_MANY_REQUESTS, message, "rate_limit_error", code="too_many_batches")


def add_batch(store: BatchStore, limits: BatchLimits, batch: Batch) -> None:
    """Store a batch. Raises APIError if there is no room for it, or its file was deleted meanwhile."""
    check_room(store, limits, batch.tenant)
    if not store.add_batch(batch):
        raise not_found(f"No such File object: {batch.input_file_id}", "id")


def storage_failed(error: OSError | sqlite3.Error) -> APIError:
    """Log what the disk or the database refuses, and return the error for it."""
    log.error("batch.storage_failed", error=f"{type(error).__name__}: {error}", help="a client's request failed")
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    else:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    message = "There is no room for files on this server." if is_full else "Files and batches cannot be used now."
    return unavailable(message, "storage_unavailable")
