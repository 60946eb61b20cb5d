"""Which record of a request and its retries is the one that reports count.

A group is the first admitted request under an idempotency digest and those that did its work again (`retry_of`). Used
by `reading.py`.

    the first one finished                      it counts
    it did not, but a retry of it did           the first such retry counts, and what was cut short does not
    nobody finished                             the first one counts, for what was done
    the first one is still open, or forgotten   nobody, until it is closed

What must always hold: exactly one record of a closed group counts; as SQL and in memory alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import sqlalchemy as sa

from quipu.actors.ledger.schema import records
from quipu.actors.messages import Outcome, UsageRecord

_FINISHED = Outcome.FINISHED.value


@attrs.frozen
class Member:
    request_id: str
    retry_of: str | None
    is_finished: bool
    closed_at: float

    @property
    def root(self) -> str:
        return self.retry_of or self.request_id


def member_of(record: UsageRecord) -> Member:
    return Member(record.request_id, record.retry_of, record.outcome is Outcome.FINISHED, record.closed_at)


def counted(members: Iterable[Member]) -> set[str]:
    """The request ids that count, of whole groups."""
    groups: dict[str, list[Member]] = {}
    for member in members:
        groups.setdefault(member.root, []).append(member)
    return {one for root, group in groups.items() if (one := _counted_of(root, group)) is not None}


def _counted_of(root: str, group: list[Member]) -> str | None:
    first = next((member for member in group if member.request_id == root), None)
    if first is None:
        return None
    finished = [member for member in group if member.is_finished]
    if first.is_finished or not finished:
        return root
    return min(finished, key=lambda member: (member.closed_at, member.request_id)).request_id


def is_counted() -> sa.ColumnElement[bool]:
    """The same, as a condition on a row of `usage_records`, where whole groups are in the table."""
    this, other, first = records.c, records.alias("other"), records.alias("first")
    same_digest = other.c.idempotency_digest == this.idempotency_digest  # that is what there is an index for
    finished_retry = sa.exists().where(same_digest, other.c.retry_of == this.request_id, other.c.outcome == _FINISHED)
    cut_short = sa.exists().where(first.c.request_id == this.retry_of, first.c.outcome != _FINISHED)
    sooner = sa.exists().where(
        same_digest,
        other.c.retry_of == this.retry_of,
        other.c.outcome == _FINISHED,
        sa.tuple_(other.c.closed_at, other.c.request_id) < sa.tuple_(this.closed_at, this.request_id),
    )
    return sa.or_(
        sa.and_(
            this.retry_of.is_(None),
            sa.or_(this.outcome == _FINISHED, this.idempotency_digest.is_(None), ~finished_retry),
        ),
        sa.and_(this.retry_of.is_not(None), this.outcome == _FINISHED, cut_short, ~sooner),
    )


def select_members(roots: list[str]) -> sa.Select[tuple[str, str | None, str, float]]:
    """Everybody of these groups that is in the table."""
    c = records.c
    columns = (c.request_id, c.retry_of, c.outcome, c.closed_at)
    return sa.select(*columns).where(sa.or_(c.request_id.in_(roots), c.retry_of.in_(roots)))
