"""The lines of batches that have not ended, in the database.

Every method blocks; the service calls them in threads, one at a time. What must always hold: a line has at most one
result, which replaces no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .batch_values import Batch, Line, LineResult, LineState, ResultKind, StoredFile
from .store_database import OutputRow, StoreDatabase, decode_usage, encode


class LineStore(StoreDatabase):
    def begin(self, batch: Batch, lines: Iterable[Line]) -> None:
        """Store the lines of a batch that is valid, and its new state."""
        with self._transaction():
            self._db.execute("delete from lines where batch_id = ?", (batch.id,))
            self._db.executemany(
                "insert into lines (batch_id, number, custom_id, start, length, state) values (?, ?, ?, ?, ?, ?)",
                (
                    (batch.id, line.number, line.custom_id, line.start, line.length, int(LineState.PENDING))
                    for line in lines
                ),
            )
            self._save(batch)

    def pending(self, batch_id: str, after: int, limit: int) -> list[Line]:
        """Return the next lines without a result, after the one with the number `after`."""
        rows = self._rows(
            "select number, custom_id, start, length from lines where batch_id = ? and state = ? and number > ? "
            "order by number limit ?",
            (batch_id, int(LineState.PENDING), after, limit),
        )
        return [Line(batch_id, *row) for row in rows]

    def commit(self, kept: Sequence[LineResult], done: Sequence[tuple[str, int]], batches: Sequence[Batch]) -> None:
        """Store results, mark lines as done, and save the batches with their new counts, all or nothing."""
        with self._transaction():
            self._db.executemany(
                "update lines set state = ?, kind = ?, payload = ?, request_id = ?, usage = ? "
                "where batch_id = ? and number = ? and state = ?",
                [
                    (
                        int(LineState.KEPT),
                        result.kind,
                        result.payload,
                        result.request_id,
                        encode(result.usage),
                        result.batch_id,
                        result.number,
                        int(LineState.PENDING),
                    )
                    for result in kept
                ],
            )
            self._db.executemany(
                "update lines set state = ? where batch_id = ? and number = ?",
                [(int(LineState.DONE), batch_id, number) for batch_id, number in done],
            )
            for batch in batches:
                self._save(batch)

    def kept(self, batch_id: str) -> list[LineResult]:
        """Return the results of which it is not known whether they count, without what they say."""
        rows = self._rows(
            "select number, kind, request_id, usage from lines where batch_id = ? and state = ?",
            (batch_id, int(LineState.KEPT)),
        )
        return [
            LineResult(batch_id, number, ResultKind(kind), b"", request_id, decode_usage(usage))
            for number, kind, request_id, usage in rows
        ]

    def take_back(self, batch: Batch, numbers: Sequence[int]) -> None:
        """Forget results that do not count: their lines are to be run again. `batch` has the counts without them."""
        with self._transaction():
            self._save(batch)
            self._db.executemany(
                "update lines set state = ?, kind = null, payload = null, request_id = null, usage = null "
                "where batch_id = ? and number = ?",
                [(int(LineState.PENDING), batch.id, number) for number in numbers],
            )

    def outputs(self, batch_id: str, after: int, limit: int) -> list[OutputRow]:
        """Return the next lines with their results, after the one with the number `after`."""
        rows = self._rows(
            "select number, custom_id, kind, payload from lines where batch_id = ? and number > ? "
            "order by number limit ?",
            (batch_id, after, limit),
        )
        return [
            OutputRow(number, custom_id, None if kind is None else ResultKind(kind), payload or b"")
            for number, custom_id, kind, payload in rows
        ]

    def end(self, batch: Batch, files: Sequence[StoredFile]) -> None:
        """Store the end of a batch, with the files of its results, whose contents are in the folder."""
        with self._transaction():
            for file in files:
                self._insert_file(file)
            self._save(batch)

    def delete_lines(self, batch_id: str, limit: int) -> bool:
        """Delete some lines of a batch that has ended; return whether there may be more."""
        with self._transaction():
            deleted = self._db.execute(
                "delete from lines where rowid in (select rowid from lines where batch_id = ? limit ?)",
                (batch_id, limit),
            ).rowcount
        return deleted == limit
