"""Deletes records older than the configured retention, in batches. Called by the loader, in a worker thread.

The machine's clock may be wrong, and what is deleted is gone. So retention has a clock of its own, kept in the
database: it runs with the monotonic clock while a server runs, and is advanced to the machine's clock by at most a day
at each start. (After a stop of a week it is six days late, until other starts.)

What must always hold: its clock is never ahead of the machine's; what remains of each server's chain is a suffix
without gaps, so that it can still be verified; the database says from when on its records are complete.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

from .schema import marks, records, sources

BATCH_ROWS: Final = 1000
MAX_STEP_S: Final = 86_400.0


class RetentionClock:
    def __init__(self, known_s: float, monotonic_s: float) -> None:
        """`known_s`: until when time has passed for certain, at the monotonic time `monotonic_s`."""
        self._anchor_s = known_s - monotonic_s

    def now(self, unix_s: float, monotonic_s: float) -> float:
        """Return the time (Unix seconds), by the machine's two clocks."""
        return min(unix_s, self._anchor_s + monotonic_s + MAX_STEP_S)


def read_clock(engine: sa.Engine, ledger: str) -> float | None:
    """Return the time (Unix seconds) that was kept, or else that of the newest record; None if there is neither."""
    kept = sa.select(sources.c.retention_clock).where(sources.c.ledger == ledger)
    newest = sa.select(sa.func.max(records.c.closed_at)).where(records.c.ledger == ledger)
    with engine.connect() as connection:
        known = connection.scalar(kept)
        known = connection.scalar(newest) if known is None else known
    return None if known is None else float(known)


def keep_clock(engine: sa.Engine, ledger: str, now: float) -> None:
    """Keep the time for the next start, unless a later one was kept."""
    c = sources.c
    is_later = sa.or_(c.retention_clock.is_(None), c.retention_clock < now)
    with engine.begin() as connection:
        connection.execute(sa.update(sources).where(c.ledger == ledger, is_later).values(retention_clock=now))


def count_old(engine: sa.Engine, ledger: str, before: float) -> int:
    """Return how many of this ledger's records were closed before `before` (Unix seconds)."""
    old = sa.select(sa.func.count()).where(records.c.ledger == ledger, records.c.closed_at < before)
    with engine.connect() as connection:
        return connection.scalar(old) or 0


def delete_old(engine: sa.Engine, ledger: str, before: float) -> int:
    """Delete this ledger's records closed before `before` (Unix seconds) and return how many there were."""
    c = records.c
    with engine.begin() as connection:
        oldest = connection.scalar(sa.select(sa.func.min(c.closed_at)).where(c.ledger == ledger))
        if oldest is None or oldest >= before:
            return 0
        connection.execute(sa.update(sources).where(sources.c.ledger == ledger).values(retained_since=before))
        # cut before the first young record of each chain: clocks may have been set back
        young = sa.func.min(sa.case((c.closed_at >= before, c.number)))
        first_kept = sa.func.coalesce(young, sa.func.max(c.number) + 1).label("first_kept")
        chains = sa.select(c.server, first_kept).where(c.ledger == ledger).group_by(c.server)
        cuts = {row.server: row.first_kept for row in connection.execute(chains)}
    num_deleted = 0
    for server, number in cuts.items():
        num_deleted += _delete_in_batches(engine, sa.and_(c.server == server, c.number < number))
        with engine.begin() as connection:
            connection.execute(sa.delete(marks).where(marks.c.server == server, marks.c.number < number))
    with engine.begin() as connection:
        connection.execute(_delete_lone_marks(ledger, before))
    return num_deleted


def _delete_lone_marks(ledger: str, before: float) -> sa.Delete:
    """Delete old marks of chains that have no records, all but the last of each, which the next chain may name.

    An older version deleted all records of such a chain and left its marks, with a gap between them.
    """
    later = marks.alias("later")
    is_last = ~sa.exists().where(later.c.server == marks.c.server, later.c.number > marks.c.number)
    has_records = sa.exists().where(records.c.server == marks.c.server)
    return sa.delete(marks).where(marks.c.ledger == ledger, marks.c.at < before, ~has_records, ~is_last)


def _delete_in_batches(engine: sa.Engine, which: sa.ColumnElement[bool]) -> int:
    total = 0
    while True:
        some = sa.select(records.c.request_id).where(which).order_by(records.c.number).limit(BATCH_ROWS)
        with engine.begin() as connection:
            num_rows = connection.execute(sa.delete(records).where(records.c.request_id.in_(some))).rowcount
        total += num_rows
        if num_rows < BATCH_ROWS:
            return total
