"""Chooses which record of a request and its retries counts, in reports that collapse them (`retries=collapse`).

A group is the first admitted request with an idempotency digest and its retries (`retry_of`). Used by `reading.py`.
The best record of a group counts: a finished one before one that was cut short, and that before one that the server
itself failed, which counts no tokens; among equals the first request, then the one that closed first.

    the first request finished                       it counts
    it did not, but a retry did                      the first such retry counts
    none finished                                    the first request counts, for what was done
    none finished, and the server failed the first   the first retry that was cut short by something else, if any
    the first request is still open, or forgotten    none, until it is closed

What must always hold: exactly one record of a closed group counts; SQL and memory agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import attrs
import sqlalchemy as sa

from ..messages.outcomes import Outcome
from ..messages.usage_record import UsageRecord
from .queries import is_faulted
from .schema import records


class Grade(IntEnum):
    """How a request ended, best first."""

    FINISHED = 0
    CUT_SHORT = 1
    NOTHING = 2
    """The server failed it, or never admitted it: it counts no tokens."""


@attrs.frozen
class Member:
    request_id: str
    retry_of: str | None
    grade: int
    closed_at: float

    @property
    def root(self) -> str:
        return self.retry_of or self.request_id


def member_of(record: UsageRecord) -> Member:
    grade = Grade.CUT_SHORT
    if record.outcome is Outcome.FINISHED:
        grade = Grade.FINISHED
    elif record.fault is not None or record.admitted_at is None:
        grade = Grade.NOTHING
    return Member(record.request_id, record.retry_of, grade, record.closed_at)


def counted(members: Iterable[Member]) -> set[str]:
    """Return the request ids that count. Takes whole groups."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.root, []).append(member)
    return {
        min(
            group, key=lambda member: (member.grade, member.retry_of is not None, member.closed_at, member.request_id)
        ).request_id
        for root, group in groups.items()
        if any(member.request_id == root for member in group)
    }


def is_counted() -> sa.ColumnElement[bool]:
    """Return the same as a condition on a row of `usage_records`. Whole groups must be in the table."""
    this, other, first = records, records.alias("other"), records.alias("first")
    same_digest = other.c.idempotency_digest == this.c.idempotency_digest  # the indexed column
    better_retry = sa.exists().where(same_digest, other.c.retry_of == this.c.request_id, grade(other) < grade(this))
    better_than_first = sa.exists().where(first.c.request_id == this.c.retry_of, grade(this) < grade(first))
    sooner = sa.exists().where(
        same_digest,
        other.c.retry_of == this.c.retry_of,
        sa.tuple_(grade(other), other.c.closed_at, other.c.request_id)
        < sa.tuple_(grade(this), this.c.closed_at, this.c.request_id),
    )
    is_finished = this.c.outcome == Outcome.FINISHED.value
    return sa.or_(
        sa.and_(this.c.retry_of.is_(None), sa.or_(is_finished, this.c.idempotency_digest.is_(None), ~better_retry)),
        sa.and_(this.c.retry_of.is_not(None), better_than_first, ~sooner),
    )


def grade(table: sa.FromClause) -> sa.ColumnElement[int]:
    return sa.case(
        (table.c.outcome == Outcome.FINISHED.value, sa.literal_column(str(Grade.FINISHED.value))),
        (sa.or_(is_faulted(table), table.c.admitted_at.is_(None)), sa.literal_column(str(Grade.NOTHING.value))),
        else_=sa.literal_column(str(Grade.CUT_SHORT.value)),
    )


def select_members(roots: list[str]) -> sa.Select[tuple[str, str | None, int, float]]:
    """Select the members of these groups that are in the table."""
    c = records.c
    columns = (c.request_id, c.retry_of, grade(records).label("grade"), c.closed_at)
    return sa.select(*columns).where(sa.or_(c.request_id.in_(roots), c.retry_of.in_(roots)))
