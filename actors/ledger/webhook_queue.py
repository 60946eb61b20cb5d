"""What the usage webhook has yet to send: the ledger's own records after a place that a file remembers.

    DATA_DIR/ledger/webhook.json     {"server", "next_number", "position"}: all of this ledger before this entry was
                                     delivered; `position` is that of the last entry in the write-ahead file

So the queue needs no room of its own, and holds as much as the ledger does. Records are taken from the database, which
has them about a second after they were written. All of it blocks; `webhook.py` calls it in a thread.

What must always hold: the place only moves forward, past records that were delivered or given up; a record that the
ledger has is taken at least once, in the order in which records were written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import attrs
import msgspec
import sqlalchemy as sa

from ..shared.private_files import PRIVATE
from .database import LedgerError
from .fields import restore
from .reading import LedgerRecord, located
from .schema import marks, records

_NAME: Final = "webhook.json"


class Place(msgspec.Struct, frozen=True):
    """The next entry of a server start's chain that may be taken."""

    server: str
    next_number: int = 0
    position: int = 0


@attrs.define
class WebhookQueue:
    _engine: sa.Engine
    _folder: Path
    """The ledger's."""
    ledger: str
    place: Place
    _running: str
    """The server that runs now."""
    _positions: dict[int, int] = attrs.field(factory=dict, init=False)
    """By number, of the records that were taken last."""

    @classmethod
    def open(cls, engine: sa.Engine, folder: Path, ledger: str, server: str) -> WebhookQueue:
        """Open the queue where it was left; for the first time, at the beginning of the running `server`'s records.

        Raises LedgerError.
        """
        path = folder / _NAME
        try:
            place = msgspec.json.decode(path.read_bytes(), type=Place)
        except FileNotFoundError:
            place = Place(server)
            try:
                _write(path, place)  # now: this start may end before anything was delivered
            except OSError as error:
                raise LedgerError(f"cannot write {path}: {error.strerror}") from None
        except (OSError, msgspec.DecodeError) as error:
            hint = "without it, events begin with this start"
            raise LedgerError(f"cannot read {path}: {error}; {hint}") from None
        return cls(engine, folder, ledger, place, server)

    def take(self, most: int) -> list[LedgerRecord]:
        """Return up to `most` records after the place, of one server start; empty if the database has no more yet.

        Moves on to the next start once all records of one were taken, or if the database will never have them: after a
        power failure, or in another database. Raises SQLAlchemyError.
        """
        with self._engine.connect() as connection:
            while True:
                later = self._next_server(connection)
                some = sa.select(records).where(
                    records.c.server == self.place.server, records.c.number >= self.place.next_number
                )
                rows = connection.execute(some.order_by(records.c.number).limit(most)).all()
                if rows or later is None:
                    self._positions = {row.number: row.position for row in rows}
                    return [located(restore(row._asdict()), row) for row in rows]
                self.place = Place(later, position=self.place.position)

    def advance(self, number: int) -> None:
        """Remember that everything up to an entry of the place's server was delivered. Raises OSError."""
        position = self._positions.get(number, self.place.position)
        self.place = Place(self.place.server, number + 1, position)
        _write(self._folder / _NAME, self.place)

    def _next_server(self, connection: sa.Connection) -> str | None:
        """Return the server start after the place's, if the database has it: then it has all of the place's too."""
        ends = [
            connection.scalar(sa.select(sa.func.max(table.c.position)).where(table.c.server == self.place.server))
            for table in (records, marks)
        ]
        known = [end for end in ends if end is not None]
        if not known and not self._is_loaded(connection):
            return None
        later = sa.select(marks.c.server).where(
            marks.c.ledger == self.ledger,
            marks.c.kind == "start",
            marks.c.position > max(known, default=self.place.position),
        )
        return connection.scalar(later.order_by(marks.c.position).limit(1))

    def _is_loaded(self, connection: sa.Connection) -> bool:
        """Whether the database has the running server's start, and so everything before it that there is."""
        of_running = sa.select(marks.c.number).where(marks.c.server == self._running, marks.c.number == 0)
        return self.place.server != self._running and connection.scalar(of_running) is not None


def _write(path: Path, place: Place) -> None:
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, PRIVATE)) as file:
        file.write(msgspec.json.encode(place))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
