"""Responses, conversations and chat completions in the database, with everything that may be asked of them.

Called by `response_store.py`, one call at a time, in a worker thread.

What must always hold: a tenant finds only its own objects; a call changes everything that it should or nothing; what is
stored stays within `max_bytes`, for which the objects that expire next are deleted, those of the tenant first that has
most.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import orjson

from ..shared.private_database import transaction
from .item_tables import ITEM_OVERHEAD_BYTES, MAX_PAGE_BYTES, ItemTables, size_of
from .store_space import OBJECT_OVERHEAD_BYTES, StoreSpace
from .stored import (
    Context,
    Ending,
    Kind,
    NewObject,
    NoSuchItem,
    ObjectPage,
    Page,
    PageQuery,
    State,
    StillOpen,
    StoredItem,
    StoredObject,
    StoreUnavailable,
)

_FOUND = "objects.id, kind, model, created_at, state, is_background, events IS NOT NULL, head, metadata"
_VISIBLE = "tenant = ? AND kind = ? AND objects.id = ? AND (expires_at > ? OR state = 'open')"


class _Gone(Exception):
    """A segment that was to be shared is gone."""


@attrs.define
class Call:
    """One call, which its caller may have stopped waiting for."""

    is_abandoned: bool = False
    has_begun: bool = False
    has_ended: bool = False


class ObjectTables:
    def __init__(
        self, connection: sqlite3.Connection, *, ttl_s: float, max_bytes: int, unix_time: Callable[[], float]
    ) -> None:
        self._connection = connection
        self._sql = connection.execute
        self._items = ItemTables(connection)
        self._ttl_s = ttl_s
        self._unix_time = unix_time
        self.space = StoreSpace(connection, self._items, max_bytes)
        self.call = Call()

    @contextmanager
    def _change(self) -> Iterator[None]:
        with transaction(self._connection):
            yield
            if self.call.is_abandoned:  # its client has been told that it failed
                raise StoreUnavailable("the response store was too slow")

    # ------------------------------------------------------------ answers

    def begin(self, new: NewObject) -> bool:
        """Store an object; return False if what it continues is gone. Raises StoreFull."""
        try:
            self._begin(new)
        except _Gone:
            return False
        return True

    def _begin(self, new: NewObject) -> None:
        with self._change():
            if not self._items.share(new.context):
                raise _Gone
            metadata = orjson.dumps(dict(new.metadata))
            num_bytes = OBJECT_OVERHEAD_BYTES + len(new.head) + len(metadata) + size_of(new.items)
            number = self._sql(
                "INSERT INTO objects(id, tenant, kind, model, created_at, expires_at, state, is_background, num_bytes,"
                " input, output, context, metadata, head) VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(new.object_id, new.tenant, new.kind, new.model, new.created_at, self._expiry()),
                    *(State.OPEN if new.is_open else State.WHOLE, new.is_background, num_bytes),
                    *(self._items.add_segment(new.items), self._items.add_segment()),
                    *(array("q", new.context).tobytes(), metadata, new.head),
                ),
            ).lastrowid
            assert number is not None
            self._label(new.tenant, number, new.metadata)
            num_evicted = self.space.make_room(number)
        self.space.note_evicted(num_evicted)

    def end(self, ending: Ending) -> bool:
        """Complete an open object; return False if it is gone. Raises StoreFull."""
        with self._change():
            found = "SELECT number, input, output FROM objects WHERE id = ? AND tenant = ? AND state = 'open'"
            row = self._sql(found, (ending.object_id, ending.tenant)).fetchone()
            if row is None:
                return False
            number, source, target = row
            self._items.extend(target, ending.items)
            more_bytes = len(ending.head) + len(ending.events or b"") + size_of(ending.items)
            self._sql(
                "UPDATE objects SET head = ?, events = ?, state = 'whole', expires_at = ?,"
                " num_bytes = num_bytes - LENGTH(head) + ? WHERE number = ?",
                (ending.head, ending.events, self._expiry(), more_bytes, number),
            )
            if ending.conversation is not None:
                self._extend_conversation(ending.tenant, ending.conversation, (source, target))
            num_evicted = self.space.make_room(number)
        self.space.note_evicted(num_evicted)
        return True

    def find(self, tenant: str, kind: Kind, object_id: str, *, with_output: bool = False) -> StoredObject | None:
        row = self._visible(f"{_FOUND}, output", tenant, kind, object_id)
        if row is None:
            return None
        output = self._items.whole(row[-1]) if with_output else ()
        return _stored(row[:-1], output)

    def events(self, tenant: str, object_id: str) -> bytes | None:
        row = self._visible("events", tenant, Kind.RESPONSE, object_id)
        return None if row is None else row[0]

    def context(self, tenant: str, kind: Kind, object_id: str, max_bytes: int, max_items: int) -> Context | None:
        """Return what a response that continues this object begins with. Raises StillOpen and ContextTooLong."""
        row = self._visible("context, input, output, state", tenant, kind, object_id)
        if row is None:
            return None
        if row[3] == State.OPEN:  # its output, which would be shared, is still to come
            raise StillOpen
        segments = (*array("q", row[0]), row[1], row[2])
        items = self._items.context(segments, max_bytes, max_items)
        return Context(segments if kind is Kind.RESPONSE else (), items)

    def page(self, tenant: str, kind: Kind, object_id: str, query: PageQuery) -> Page | None:
        """Return a page of the items that went into an object. Raises NoSuchItem."""
        row = self._visible("context, input", tenant, kind, object_id)
        return None if row is None else self._items.page((*array("q", row[0]), row[1]), query)

    def list_objects(
        self, tenant: str, kind: Kind, query: PageQuery, model: str | None, metadata: Mapping[str, str]
    ) -> ObjectPage:
        """Return a page of a tenant's objects that have this model and metadata. Raises NoSuchItem."""
        beyond, direction = (">", "ASC") if query.is_ascending else ("<", "DESC")
        now = self._unix_time()
        wanted = "tenant = ? AND kind = ? AND state = 'whole' AND expires_at > ?"
        values: list[object] = [tenant, kind, now]
        if query.after is not None:
            row = self._visible("number", tenant, kind, query.after)
            if row is None:
                raise NoSuchItem
            wanted, values = f"{wanted} AND objects.number {beyond} ?", [*values, row[0]]
        if model is not None:
            wanted, values = f"{wanted} AND model = ?", [*values, model]
        for key, value in metadata.items():
            has = "EXISTS(SELECT 1 FROM labels WHERE tenant = objects.tenant AND key = ? AND value = ?"
            wanted, values = f"{wanted} AND {has} AND object = objects.number)", [*values, key, value]
        select = f"SELECT {_FOUND} FROM objects WHERE {wanted} ORDER BY objects.number {direction} LIMIT ?"  # noqa: S608 - constants
        objects: list[StoredObject] = []
        num_bytes = 0
        for row in self._sql(select, (*values, query.limit + 1)):
            if len(objects) == query.limit or num_bytes > MAX_PAGE_BYTES:
                return ObjectPage(objects, has_more=True)
            objects.append(_stored(row))
            num_bytes += len(objects[-1].head)
        return ObjectPage(objects, has_more=False)

    # ------------------------------------------------------------ changes by clients

    def relabel(self, tenant: str, kind: Kind, object_id: str, metadata: Mapping[str, str]) -> StoredObject | None:
        """Replace an object's metadata."""
        with self._change():
            row = self._visible("number, LENGTH(metadata)", tenant, kind, object_id)
            if row is None:
                return None
            data = orjson.dumps(dict(metadata))
            self._sql("UPDATE objects SET metadata = ? WHERE number = ?", (data, row[0]))
            self.space.count(row[0], len(data) - row[1])
            self._sql("DELETE FROM labels WHERE object = ?", (row[0],))
            self._label(tenant, row[0], metadata)
        self._purge(has_traces=True)
        return self.find(tenant, kind, object_id)

    def delete(self, tenant: str, kind: Kind, object_id: str) -> bool:
        """Delete an object without a trace; return whether there was one."""
        with self._change():
            row = self._visible("number", tenant, kind, object_id)
            if row is not None:
                self.space.delete(row[0])
        self._purge(has_traces=row is not None)
        return row is not None

    def append(self, tenant: str, object_id: str, items: Sequence[StoredItem]) -> bool:
        """Append items to a conversation; return False if there is none. Raises StoreFull."""
        with self._change():
            row = self._visible("number, input", tenant, Kind.CONVERSATION, object_id)
            if row is None:
                return False
            self._items.extend(row[1], items)
            self._grow(row[0], size_of(items))
            num_evicted = self.space.make_room(row[0])
        self.space.note_evicted(num_evicted)
        return True

    def item(self, tenant: str, kind: Kind, object_id: str, item_id: str) -> bytes | None:
        """Return an item that went into an object or came out."""
        row = self._visible("input, output", tenant, kind, object_id)
        found = [self._items.find(segment, item_id) for segment in row or ()]
        return next((item[1] for item in found if item is not None), None)

    def delete_item(self, tenant: str, object_id: str, item_id: str) -> bool:
        """Delete an item of a conversation without a trace; return whether there was one."""
        with self._change():
            row = self._visible("number, input", tenant, Kind.CONVERSATION, object_id)
            found = None if row is None else self._items.find(row[1], item_id)
            if row is not None and found is not None:
                self._items.delete(found[0])
                self._grow(row[0], -len(found[1]) - ITEM_OVERHEAD_BYTES)
        self._purge(has_traces=found is not None)
        return found is not None

    # ------------------------------------------------------------ keeping house

    def expire(self) -> bool:
        """Delete some of what has expired, without a trace; return whether there may be more."""
        has_more = self.space.expire(self._unix_time())
        self.space.purge()
        return has_more

    def recover(self) -> int:
        """Mark what a dead server left open; return how many answers were lost."""
        num_lost = self.space.recover(self._expiry())
        self.space.purge()
        return num_lost

    # ------------------------------------------------------------ what these have in common

    def _expiry(self) -> float:
        return self._unix_time() + self._ttl_s

    def _visible(self, columns: str, tenant: str, kind: Kind, object_id: str) -> Any:
        """Return columns of an object, None if this tenant has none with this id."""
        select = f"SELECT {columns} FROM objects WHERE {_VISIBLE}"  # noqa: S608 - constants
        return self._sql(select, (tenant, kind, object_id, self._unix_time())).fetchone()

    def _label(self, tenant: str, number: int, metadata: Mapping[str, str]) -> None:
        rows = [(tenant, key, value, number) for key, value in metadata.items()]
        self._connection.executemany("INSERT INTO labels(tenant, key, value, object) VALUES(?, ?, ?, ?)", rows)

    def _grow(self, number: int, num_bytes: int) -> None:
        """Count more of a conversation, which expires after its last change."""
        self.space.count(number, num_bytes)
        self._sql("UPDATE objects SET expires_at = ? WHERE number = ?", (self._expiry(), number))

    def _extend_conversation(self, tenant: str, object_id: str, segments: Sequence[int]) -> None:
        """Append copies of what these segments have, unless the conversation was deleted meanwhile."""
        row = self._visible("number, input", tenant, Kind.CONVERSATION, object_id)
        if row is None:
            return
        for segment in segments:
            self._items.copy(segment, row[1])
            self._grow(row[0], self._items.num_bytes(segment))

    def _purge(self, *, has_traces: bool) -> None:
        if has_traces:
            self.space.note_traces()
        self.space.purge()


def _stored(row: Any, output: Sequence[StoredItem] = ()) -> StoredObject:
    object_id, kind, model, created_at, state, is_background, has_events, head, metadata = row
    return StoredObject(
        object_id=object_id,
        kind=Kind(kind),
        model=model,
        created_at=created_at,
        state=State(state),
        is_background=bool(is_background),
        has_events=bool(has_events),
        head=head,
        metadata=metadata,
        output=output,
    )
