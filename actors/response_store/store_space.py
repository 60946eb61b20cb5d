"""How much is stored, and what is deleted: when it expires, when there is no room, or because a client says so.

Called by `object_tables.py`, in a worker thread; nothing here begins a transaction except where it says so.

What must always hold: an object whose answer is being generated is not deleted for room; `num_bytes` of a tenant is the
sum over its objects.
"""

from __future__ import annotations

import sqlite3
from array import array

from ..shared.private_database import transaction
from .item_tables import ItemTables
from .store_file import purge, used_bytes
from .stored import StoreFull

OBJECT_OVERHEAD_BYTES = 512
"""Of an object beside its head, about."""
ROOM_AFTER = 0.95
"""How full a store is after it was full: to delete many objects at once costs less than to delete each by itself."""
DELETED_AT_ONCE = 64
_DELETABLE = "state != 'open' AND number != ?"
_BY_SIZE = "SELECT tenant FROM objects GROUP BY tenant ORDER BY SUM(num_bytes) DESC"


class StoreSpace:
    def __init__(self, connection: sqlite3.Connection, items: ItemTables, max_bytes: int) -> None:
        self._connection = connection
        self._sql = connection.execute
        self._items = items
        self._max_bytes = max_bytes
        self._has_traces = False
        self.num_evicted = self.num_expired = 0

    @property
    def used_bytes(self) -> int:
        return used_bytes(self._connection)

    def count(self, number: int, num_bytes: int) -> None:
        """Note that an object grew by so many bytes."""
        self._sql("UPDATE objects SET num_bytes = num_bytes + ? WHERE number = ?", (num_bytes, number))

    def make_room(self, new: int) -> int:
        """Delete what expires next until there is room for what was written; return how much. Raises StoreFull.

        `new`: the object that is not deleted for it.
        """
        num_deleted = 0
        if self.used_bytes <= self._max_bytes:
            return num_deleted
        while self.used_bytes > ROOM_AFTER * self._max_bytes:
            oldest = self._oldest_of_largest(new)
            if not oldest:
                break
            for number in oldest:
                self.delete(number)
                num_deleted += 1
                if self.used_bytes <= ROOM_AFTER * self._max_bytes:
                    break
        if self.used_bytes > self._max_bytes:
            raise StoreFull("the response store is full (--response-store-bytes)")
        return num_deleted

    def _oldest_of_largest(self, new: int) -> list[int]:
        for (tenant,) in self._sql(_BY_SIZE).fetchall():
            oldest = f"SELECT number FROM objects WHERE tenant = ? AND {_DELETABLE} ORDER BY expires_at LIMIT ?"  # noqa: S608
            numbers = [row[0] for row in self._sql(oldest, (tenant, new, DELETED_AT_ONCE))]
            if numbers:
                return numbers
        return []

    def delete(self, number: int) -> None:
        row = self._sql("SELECT context, input, output FROM objects WHERE number = ?", (number,)).fetchone()
        self._sql("DELETE FROM labels WHERE object = ?", (number,))
        self._sql("DELETE FROM objects WHERE number = ?", (number,))
        self._items.release((*array("q", row[0]), row[1], row[2]))

    def note_traces(self) -> None:
        """Note that something was deleted or overwritten, and may be in the log."""
        self._has_traces = True

    def purge(self) -> None:
        """Remove all traces, if there are any. Raises sqlite3.Error and StoreUnavailable."""
        if self._has_traces:
            purge(self._connection)
            self._has_traces = False

    def note_evicted(self, num_deleted: int) -> None:
        if num_deleted:
            self.num_evicted += num_deleted
            self.note_traces()

    def expire(self, now: float) -> bool:
        """Delete some objects that have expired, in a transaction of its own; return whether there may be more."""
        with transaction(self._connection):
            due = "SELECT number FROM objects WHERE expires_at <= ? AND state != 'open' LIMIT ?"
            numbers = [row[0] for row in self._sql(due, (now, DELETED_AT_ONCE))]
            for number in numbers:
                self.delete(number)
        if numbers:
            self.num_expired += len(numbers)
            self.note_traces()
        return len(numbers) == DELETED_AT_ONCE

    def recover(self, expires_at: float) -> int:
        """Mark what a dead server left open, in a transaction of its own; return how many answers were lost.

        Of those that were not in the background nobody knows: their clients had to wait for them.
        """
        with transaction(self._connection):
            for (number,) in self._sql(
                "SELECT number FROM objects WHERE state = 'open' AND NOT is_background"
            ).fetchall():
                self.delete(number)
            lost = "UPDATE objects SET state = 'lost', expires_at = ? WHERE state = 'open'"
            num_lost = self._sql(lost, (expires_at,)).rowcount
        self.note_traces()
        return num_lost
