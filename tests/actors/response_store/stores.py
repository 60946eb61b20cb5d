"""Stores for tests: on a file of the test's own, with a clock that the test sets."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from quipu.actors.response_store.object_tables import ObjectTables
from quipu.actors.response_store.store_file import NAME, open_file
from quipu.actors.response_store.stored import Ending, Kind, NewObject, StoredItem, StoredObject

TTL_S = 100.0


@attrs.define
class Clock:
    now: float = 1_000.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Store:
    """The tables of one file, and short names for what tests do with them."""

    tables: ObjectTables
    connection: sqlite3.Connection
    clock: Clock
    path: Path

    def respond(
        self, name: str, *texts: str, after: str | None = None, tenant: str = "t", said: str = "", **changes: Any
    ) -> bool:
        """Store a whole response with these items, which continues `after`."""
        context: Sequence[int] = ()
        if after is not None:
            found = self.tables.context(tenant, Kind.RESPONSE, after, 1 << 30, 1 << 30)
            assert found is not None
            context = found.segments
        items = [StoredItem(f"{name}-{number}", text.encode()) for number, text in enumerate(texts)]
        new = {"kind": Kind.RESPONSE, "created_at": int(self.clock.now), "head": b"{}", "is_open": True, **changes}
        assert self.tables.begin(NewObject(object_id=name, tenant=tenant, items=items, context=context, **new))
        return self.end(name, said, tenant=tenant)

    def end(self, name: str, said: str = "", *, tenant: str = "t", **changes: Any) -> bool:
        items = [StoredItem(f"{name}-out", said.encode())] if said else []
        ending = {"head": f'{{"is":"{name}"}}'.encode(), "items": items, **changes}
        return self.tables.end(Ending(object_id=name, tenant=tenant, **ending))

    def create(self, kind: Kind, name: str, *texts: str, tenant: str = "t", **changes: Any) -> None:
        """Store a whole object that is no response."""
        items = [StoredItem(f"{name}-{number}", text.encode()) for number, text in enumerate(texts)]
        new = {"created_at": int(self.clock.now), "head": b"{}", **changes}
        assert self.tables.begin(NewObject(object_id=name, tenant=tenant, kind=kind, items=items, **new))

    def find(self, name: str, *, tenant: str = "t", kind: Kind = Kind.RESPONSE) -> StoredObject | None:
        return self.tables.find(tenant, kind, name, with_output=True)

    def context_of(self, name: str, *, kind: Kind = Kind.RESPONSE) -> list[bytes]:
        found = self.tables.context("t", kind, name, 1 << 30, 1 << 30)
        assert found is not None
        return list(found.items)

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        tables = ("objects", "segments", "items", "labels")
        return {name: self.connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()[0] for name in tables}


def open_tables(folder: Path, *, max_bytes: int = 1 << 30, ttl_s: float = TTL_S) -> Store:
    clock, path = Clock(), folder / NAME
    connection = open_file(path)
    tables = ObjectTables(connection, ttl_s=ttl_s, max_bytes=max_bytes, unix_time=clock)
    return Store(tables, connection, clock, path)


def bytes_on_disk(folder: Path) -> bytes:
    """Return everything in the files of a store."""
    return b"".join(path.read_bytes() for path in sorted(folder.glob(f"{NAME}*")))
