"""The database of files and batches: its tables, and transactions over them.

    files     one row each; its contents are in the folder, under its id
    batches   one row each
    lines     one row for each line of a batch that has not ended, with its result once it has one

`line_store.py` and `batch_store.py` add the methods. What must always hold: a later version can read what this one has
written.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import attrs
import msgspec

from quipu.actors.shared.private_database import (
    forget_journal,
    make_private_folder,
    make_tables,
    open_private_database,
    transaction,
)

from .batch_values import Batch, ResultKind, StoredFile, Usage
from .file_folder import FileFolder

DATABASE_NAME: Final = "batches.sqlite3"
_TABLES: Final = (
    """create table files (
        id text primary key, tenant text not null, purpose text not null, expires_at integer,
        num_bytes integer not null,
        is_hidden integer not null, number integer not null, value blob not null)""",
    "create index files_of_tenant on files (tenant, number)",
    """create table batches (
        id text primary key, tenant text not null, api text not null, has_ended integer not null,
        ended_at integer, number integer not null, value blob not null)""",
    "create index batches_of_tenant on batches (tenant, api, number)",
    """create table lines (
        batch_id text not null, number integer not null, custom_id text not null, start integer not null,
        length integer not null, state integer not null, kind text, payload blob, request_id text, usage blob,
        primary key (batch_id, number))""",
    "create index lines_by_state on lines (batch_id, state, number)",
)
encode: Final = msgspec.json.Encoder().encode
decode_file: Final = msgspec.json.Decoder(StoredFile).decode
decode_batch: Final = msgspec.json.Decoder(Batch).decode
decode_usage: Final = msgspec.json.Decoder(Usage).decode


class BatchStoreError(Exception):
    """The stored files and batches cannot be used. The message is for the operator."""


@attrs.frozen
class OutputRow:
    """A line of a batch that has ended."""

    number: int
    custom_id: str
    kind: ResultKind | None
    """None: it was not run."""
    payload: bytes


@attrs.frozen
class TenantUse:
    """What a tenant has stored."""

    num_files: int
    num_bytes: int
    num_open_batches: int


class StoreDatabase:
    def __init__(self, path: Path) -> None:
        """Open the store in a folder, or create it. Raises BatchStoreError."""
        try:
            make_private_folder(path)
            self._db = open_private_database(path / DATABASE_NAME, synchronous="FULL")
        except (OSError, sqlite3.Error) as error:
            raise _unusable(path, error) from None
        try:
            self.folder = FileFolder(path / "files")
            if not make_tables(self._db, [_TABLES]):
                raise BatchStoreError(f"the batches in {path} were written by a newer version of quipu")
        except (OSError, sqlite3.Error) as error:
            self._db.close()
            raise _unusable(path, error) from None
        except BatchStoreError:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def forget(self) -> None:
        """Leave no trace of what was deleted."""
        forget_journal(self._db)

    # ------------------------------------------------------------

    def _insert_file(self, file: StoredFile) -> None:
        self._db.execute(
            "insert into files select ?, ?, ?, ?, ?, ?, coalesce(max(number), 0) + 1, ? from files",
            (file.id, file.tenant, file.purpose, file.expires_at, file.num_bytes, file.is_hidden, encode(file)),
        )

    def _save(self, batch: Batch) -> None:
        self._db.execute(
            "update batches set value = ?, has_ended = ?, ended_at = ? where id = ?",
            (encode(batch), batch.has_ended, batch.ended_at, batch.id),
        )

    def _rows(self, query: str, values: Sequence[Any]) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def _transaction(self) -> AbstractContextManager[None]:
        return transaction(self._db)


def _unusable(path: Path, error: Exception) -> BatchStoreError:
    return BatchStoreError(f"cannot keep batches in {path}: {error}")
