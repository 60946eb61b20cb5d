"""Items and the segments that they are in. Called by `object_tables.py`, within its transactions, in a worker thread.

A segment is a list of items that grows at its end; objects that share it are counted.

What must always hold: the items of a segment that no object has any more are deleted; no more items are read than are
asked for.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from .stored import ContextTooLong, NoSuchItem, Page, PageQuery, StoredItem

ITEM_OVERHEAD_BYTES = 64
"""Of an item beside its data, about."""
MAX_PAGE_BYTES = 8 << 20
"""A page with more ends early; the next one has the rest."""


class ItemTables:
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection.execute
        self._each = connection.executemany

    # ------------------------------------------------------------ segments

    def add_segment(self, items: Iterable[StoredItem] = ()) -> int:
        """Make a segment that one object has."""
        number = self._sql("INSERT INTO segments(num_refs) VALUES(1)").lastrowid
        assert number is not None
        self.extend(number, items)
        return number

    def extend(self, segment: int, items: Iterable[StoredItem]) -> None:
        rows = ((segment, item.item_id, item.data, item.logprobs) for item in items)
        self._each("INSERT INTO items(segment, id, data, logprobs) VALUES(?, ?, ?, ?)", rows)

    def copy(self, source: int, target: int) -> None:
        """Append the items of one segment to another, without their logprobs."""
        copied = "SELECT ?, id, data FROM items WHERE segment = ? ORDER BY number"
        self._sql(f"INSERT INTO items(segment, id, data) {copied}", (target, source))

    def share(self, segments: Sequence[int]) -> bool:
        """Count one more object for each; return False if one of them is gone."""
        for segment in segments:
            updated = self._sql("UPDATE segments SET num_refs = num_refs + 1 WHERE number = ?", (segment,))
            if updated.rowcount != 1:
                return False
        return True

    def release(self, segments: Iterable[int]) -> None:
        """Count one object less for each, and delete those that no object has."""
        for segment in segments:
            self._sql("UPDATE segments SET num_refs = num_refs - 1 WHERE number = ?", (segment,))
            if self._sql("DELETE FROM segments WHERE number = ? AND num_refs <= 0", (segment,)).rowcount:
                self._sql("DELETE FROM items WHERE segment = ?", (segment,))

    # ------------------------------------------------------------ items

    def whole(self, segment: int) -> Sequence[StoredItem]:
        """Return the items of a segment with their logprobs."""
        every = "SELECT id, data, logprobs FROM items WHERE segment = ? ORDER BY number"
        return [StoredItem(*row) for row in self._sql(every, (segment,))]

    def all_data(self, segment: int) -> Iterator[bytes]:
        for (data,) in self._sql("SELECT data FROM items WHERE segment = ? ORDER BY number", (segment,)):
            yield data

    def num_bytes(self, segment: int) -> int:
        sizes = "SELECT COALESCE(SUM(LENGTH(data)), 0) FROM items WHERE segment = ?"
        return int(self._sql(sizes, (segment,)).fetchone()[0])

    def find(self, segment: int, item_id: str) -> tuple[int, bytes] | None:
        """Return the number and the data of the last item with an id."""
        found = "SELECT number, data FROM items WHERE segment = ? AND id = ? ORDER BY number DESC LIMIT 1"
        row: tuple[int, bytes] | None = self._sql(found, (segment, item_id)).fetchone()
        return row

    def delete(self, number: int) -> None:
        self._sql("DELETE FROM items WHERE number = ?", (number,))

    def context(self, segments: Sequence[int], max_bytes: int, max_items: int) -> Sequence[bytes]:
        """Return the data of all items in these segments. Raises ContextTooLong before any is read."""
        num_bytes = num_items = 0
        for segment in segments:
            sizes = "SELECT COALESCE(SUM(LENGTH(data)), 0), COUNT(*) FROM items WHERE segment = ?"
            more_bytes, more_items = self._sql(sizes, (segment,)).fetchone()
            num_bytes, num_items = num_bytes + more_bytes, num_items + more_items
        if num_bytes > max_bytes or num_items > max_items:
            raise ContextTooLong(num_bytes, num_items)
        return [data for segment in segments for data in self.all_data(segment)]

    def page(self, segments: Sequence[int], query: PageQuery) -> Page:
        """Return a page of the items in these segments, taken as one list. Raises NoSuchItem."""
        ordered = list(segments) if query.is_ascending else list(reversed(segments))
        at, after = 0, None
        if query.after is not None:
            at, after = self._locate(ordered, query.after)
        ids: list[str] = []
        data: list[bytes] = []
        num_bytes = 0
        for row in self._rows(ordered[at:], after, is_ascending=query.is_ascending):
            if len(ids) == query.limit or num_bytes > MAX_PAGE_BYTES:
                return Page(ids, data, has_more=True)
            ids.append(row[0])
            data.append(row[1])
            num_bytes += len(row[1])
        return Page(ids, data, has_more=False)

    def _locate(self, segments: Sequence[int], item_id: str) -> tuple[int, int]:
        """Return the index of the last segment with this item, and the item's number."""
        for at in reversed(range(len(segments))):
            row = self._sql(
                "SELECT number FROM items WHERE segment = ? AND id = ? ORDER BY number DESC LIMIT 1",
                (segments[at], item_id),
            ).fetchone()
            if row is not None:
                return at, row[0]
        raise NoSuchItem

    def _rows(self, segments: Sequence[int], after: int | None, *, is_ascending: bool) -> Iterator[tuple[str, bytes]]:
        beyond, direction = (">", "ASC") if is_ascending else ("<", "DESC")
        every = f"SELECT id, data FROM items WHERE segment = ? ORDER BY number {direction}"  # noqa: S608 - constants
        rest = f"SELECT id, data FROM items WHERE segment = ? AND number {beyond} ? ORDER BY number {direction}"  # noqa: S608
        for segment in segments:
            yield from self._sql(every, (segment,)) if after is None else self._sql(rest, (segment, after))
            after = None


def size_of(items: Sequence[StoredItem]) -> int:
    return sum(item.num_bytes + ITEM_OVERHEAD_BYTES for item in items)
