"""Files on their way to the store: what tenants may still store, and the file that an upload is written to.

What must always hold: a tenant's files, results and running uploads together stay within its bounds, but for what
running lines add; of an upload that fails nothing is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

import attrs
import trio

from quipu.actors.threads import run_in_thread

from ..request.errors import APIError
from .batch_refusals import storage_failed
from .batch_service import BatchService
from .batch_values import StoredFile, new_id
from .store_database import TenantUse


@attrs.frozen
class UploadKind:
    """What an upload is to its client, for errors."""

    name: str
    plural: str
    param: str | None = None


FILE: Final = UploadKind("file", "files", "file")
MESSAGE_BATCH: Final = UploadKind("batch", "batches")


class Upload:
    """One file that is being written."""

    def __init__(
        self, service: BatchService, path: Path, counts: Counter[str], tenant: str, num_free: int, kind: UploadKind
    ) -> None:
        self._service = service
        self._kind = kind
        self._counts = counts
        self._tenant = tenant
        self._num_free = num_free
        """What was left for the tenant when it began, without uploads."""
        self.path = path
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        """Write more of the file. Raises APIError if it or its tenant has too much, or the disk is full."""
        limits = self._service.limits
        self.num_bytes += len(data)
        self._counts[self._tenant] += len(data)
        if self.num_bytes > limits.max_file_bytes:
            raise _too_large(self._kind, limits.max_file_bytes)
        if self._counts[self._tenant] > self._num_free:
            raise _storage_full(self._kind, limits.max_tenant_bytes)
        try:
            await run_in_thread(self._service.store.folder.append, self.path, data)
        except OSError as error:
            raise storage_failed(error) from None

    async def keep(self, file: StoredFile) -> StoredFile:
        """Keep it as a file. Raises APIError."""
        return await self._service.call(self._add, file)

    def _add(self, file: StoredFile) -> StoredFile:
        """Add it to the store, if uploads that were kept since it began have left room. Runs in a thread."""
        limits, store = self._service.limits, self._service.store
        use = store.use_of(self._tenant)
        if use.num_files >= limits.max_files:
            raise _too_many(self._kind, use.num_files)
        if use.num_bytes + self.num_bytes > limits.max_tenant_bytes:
            raise _storage_full(self._kind, limits.max_tenant_bytes)
        return store.add_file(file, self.path)


class Uploads:
    def __init__(self, service: BatchService) -> None:
        self._service = service
        self._counts: Counter[str] = Counter()
        """Bytes of running uploads, by tenant."""

    @asynccontextmanager
    async def begin(self, tenant: str, kind: UploadKind) -> AsyncIterator[Upload]:
        """Make room for an upload. Raises APIError if its tenant has too many files, or the disk is full."""
        service, limits = self._service, self._service.limits
        use: TenantUse = await service.call(service.store.use_of, tenant)
        if use.num_files >= limits.max_files:
            raise _too_many(kind, use.num_files)
        try:
            path = await run_in_thread(service.store.folder.new)
        except OSError as error:
            raise storage_failed(error) from None
        upload = Upload(service, path, self._counts, tenant, limits.max_tenant_bytes - use.num_bytes, kind)
        try:
            yield upload
        finally:
            self._counts[tenant] -= upload.num_bytes
            if not self._counts[tenant]:
                del self._counts[tenant]
            with trio.CancelScope(shield=True):
                # it has another name by now, or is not needed
                await run_in_thread(service.store.folder.erase_path, path)


def new_file(tenant: str, filename: str, purpose: str, now: int, ttl_s: int, *, is_hidden: bool = False) -> StoredFile:
    return StoredFile(
        id=new_id("file-"),
        tenant=tenant,
        filename=filename,
        purpose=purpose,
        num_bytes=0,
        created_at=now,
        expires_at=now + ttl_s,
        is_hidden=is_hidden,
    )


def _too_large(kind: UploadKind, max_bytes: int) -> APIError:
    message = f"The {kind.name} is too large: this server takes up to {max_bytes:,} bytes (--max-batch-file-bytes)."
    return APIError(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, "invalid_request_error", param=kind.param, code="file_too_large"
    )


def _too_many(kind: UploadKind, num_files: int) -> APIError:
    message = (
        f"You have {num_files} files, with those of batches the most that this server stores. Delete some "
        f"{kind.plural} first."
    )
    return APIError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", code="too_many_files")


def _storage_full(kind: UploadKind, max_bytes: int) -> APIError:
    message = f"Your {kind.plural} and results may have {max_bytes:,} bytes together. Delete some {kind.plural} first."
    return APIError(HTTPStatus.BAD_REQUEST, message, "invalid_request_error", param=kind.param, code="storage_full")
