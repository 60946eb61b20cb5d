"""Apps with every route that a server can have, with and without keys."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from quipu.web.app import QuipuApp, make_app
from quipu.web.auth.key_file import KeyEntry, hash_key
from quipu.web.auth.keys import KeyStore
from quipu.web.batches.batch_service import BatchService
from quipu.web.batches.batch_store import BatchStore
from quipu.web.batches.batch_values import BatchLimits
from tests.web.api.admin.usage_books import BookSource
from tests.web.fakes import FakeDesk

TENANT, ADMIN = "sk-of-acme", "sk-of-ops"


def full_app(
    keys: KeyStore | None = None,
    desk: Any = None,
    options: Any = None,
    data_dir: Path | None = None,
    store: Any = None,
    batches: BatchService | None = None,
) -> QuipuApp:
    usage, batches = BookSource(data_dir=data_dir), batches or idle_batches()
    return make_app(desk or FakeDesk(), options, keys, usage=usage, store=store or mock.Mock(), batches=batches)


def idle_batches() -> BatchService:
    """Return a service that has no batch and no file, and runs none until it serves. Its folder is removed with it."""
    folder = TemporaryDirectory()

    async def find_recorded(_: Sequence[str]) -> Collection[str]:
        return ()

    service = BatchService(BatchStore(Path(folder.name)), BatchLimits(), find_recorded)
    weakref.finalize(service, folder.cleanup)
    return service


def keyed() -> KeyStore:
    """Return the key of a tenant and one of an admin."""
    return KeyStore(
        [
            KeyEntry(id=key, name=key, tenant=tenant, sha256=hash_key(key), admin=tenant == "ops")
            for tenant, key in (("acme", TENANT), ("ops", ADMIN))
        ]
    )
