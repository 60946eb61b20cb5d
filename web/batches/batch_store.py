"""What is stored of files and batches: a database beside the folder of files' contents.

Every method blocks; the service calls them in threads, one at a time. What must always hold: nothing of what was
deleted is left in a byte of database, journal or folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .batch_values import Api, Batch, StoredFile
from .line_store import LineStore
from .store_database import TenantUse, decode_batch, decode_file, encode


class BatchStore(LineStore):
    def add_file(self, file: StoredFile, path: Path) -> StoredFile:
        """Add a file whose contents are complete. If that fails, nothing is left of them."""
        try:
            file.num_bytes = self.folder.keep(path, file.id)
            with self._transaction():
                self._insert_file(file)
        except BaseException:
            self.folder.erase(file.id)
            raise
        return file

    def file(self, tenant: str, file_id: str) -> StoredFile | None:
        row = self._db.execute("select value from files where id = ? and tenant = ?", (file_id, tenant)).fetchone()
        return None if row is None else decode_file(row[0])

    def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """Return the files that a tenant sees, of one purpose or all, after the one that `after` names."""
        condition, order = ("<", "desc") if newest_first else (">", "asc")
        found = self._rows(
            "select value from files where tenant = ? and not is_hidden and (? is null or purpose = ?) and "  # noqa: S608
            f"(? is null or number {condition} (select number from files where id = ? and tenant = ?)) "
            f"order by number {order} limit ?",
            (tenant, purpose, purpose, after, after, tenant, limit),
        )
        return [decode_file(row[0]) for row in found]

    def delete_files(self, ids: Sequence[str]) -> None:
        """Delete files for good."""
        for file_id in ids:
            self.folder.erase(file_id)
        with self._transaction():
            self._db.executemany("delete from files where id = ?", [(file_id,) for file_id in ids])
        self.forget()

    def delete_unless_needed(self, file_id: str, tenant: str) -> bool:
        """Delete a file for good; return False if a batch that has not ended reads it."""
        open_batches = self._rows("select value from batches where tenant = ? and not has_ended", (tenant,))
        if any(decode_batch(row[0]).input_file_id == file_id for row in open_batches):
            return False
        self.delete_files([file_id])
        return True

    def expired_files(self, now: int) -> list[StoredFile]:
        rows = self._rows("select value from files where expires_at <= ?", (now,))
        return [decode_file(row[0]) for row in rows]

    def use_of(self, tenant: str) -> TenantUse:
        files = self._db.execute("select count(*), sum(num_bytes) from files where tenant = ?", (tenant,)).fetchone()
        results = self._db.execute(
            "select sum(length(payload)) from lines where batch_id in (select id from batches where tenant = ?)",
            (tenant,),
        ).fetchone()
        batches = self._db.execute(
            "select count(*) from batches where tenant = ? and not has_ended", (tenant,)
        ).fetchone()
        return TenantUse(files[0], (files[1] or 0) + (results[0] or 0), batches[0])

    # ------------------------------------------------------------ batches

    def add_batch(self, batch: Batch) -> bool:
        """Add a batch; return False if its input file is gone."""
        if self.file(batch.tenant, batch.input_file_id) is None:
            return False
        with self._transaction():
            self._db.execute(
                "insert into batches select ?, ?, ?, 0, null, coalesce(max(number), 0) + 1, ? from batches",
                (batch.id, batch.tenant, batch.api, encode(batch)),
            )
        return True

    def save(self, batch: Batch) -> None:
        with self._transaction():
            self._save(batch)

    def batch(self, tenant: str, api: Api, batch_id: str) -> Batch | None:
        row = self._db.execute(
            "select value from batches where id = ? and tenant = ? and api = ?", (batch_id, tenant, api)
        ).fetchone()
        return None if row is None else decode_batch(row[0])

    def batches(self, tenant: str, api: Api, after: str | None, before: str | None, limit: int) -> list[Batch]:
        """Return a tenant's batches, newest first: those after one of them, or the last ones before another."""
        cursor, condition, order = (before, ">", "asc") if before is not None else (after, "<", "desc")
        rows = self._rows(
            f"select value from batches where tenant = ? and api = ? and (? is null or number {condition} "  # noqa: S608
            f"(select number from batches where id = ? and tenant = ?)) order by number {order} limit ?",
            (tenant, api, cursor, cursor, tenant, limit),
        )
        found = [decode_batch(row[0]) for row in rows]
        return found[::-1] if before is not None else found

    def open_batches(self) -> list[Batch]:
        """Return all batches that have not ended, oldest first."""
        rows = self._rows("select value from batches where not has_ended order by number", ())
        return [decode_batch(row[0]) for row in rows]

    def ended_before(self, moment: int) -> list[Batch]:
        rows = self._rows("select value from batches where has_ended and ended_at <= ?", (moment,))
        return [decode_batch(row[0]) for row in rows]

    def delete_batch(self, batch: Batch) -> None:
        """Delete a batch that has ended, with the files that only it has."""
        with self._transaction():
            self._db.execute("delete from lines where batch_id = ?", (batch.id,))
            self._db.execute("delete from batches where id = ?", (batch.id,))
        hidden = self._rows(
            "select id from files where is_hidden and id in (?, ?, ?)",
            (batch.input_file_id, batch.output_file_id, batch.error_file_id),
        )
        self.delete_files([row[0] for row in hidden])

    def clean_up(self) -> None:
        """Remove what a server that was killed has left half done."""
        with self._transaction():
            self._db.execute("delete from lines where batch_id not in (select id from batches where not has_ended)")
        names = {row[0] for row in self._rows("select id from files", ())}
        self.folder.erase_others(names)
        lost = [name for name in names if not self.folder.has(name)]
        if lost:
            self.delete_files(lost)
        self.forget()
