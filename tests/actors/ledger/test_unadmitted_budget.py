"""The budget of records for requests that were never admitted, per tenant and hour; others always get a record."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from quipu.actors.ledger import unadmitted
from quipu.actors.ledger.unadmitted import LOG_EVERY_S, PERIOD_S, UnadmittedBudget
from quipu.actors.messages.outcomes import Outcome
from tests.actors.ledger.ledgers import T0
from tests.actors.ledger.test_durable_journal import open_desk

REJECTED, CANCELLED = Outcome.REJECTED, Outcome.CANCELLED
REFUSED = {"outcome": REJECTED, "admitted_at": None}


def num_taken(budget: UnadmittedBudget, num: int, now: float, tenant: str = "acme") -> int:
    return sum(budget.take(tenant, REJECTED, now) for _ in range(num))


def test_burst_then_hourly_rate() -> None:
    """A tenant gets a burst of records, then an hourly rate; unused budget never exceeds a burst."""
    budget = UnadmittedBudget(100)
    assert num_taken(budget, 1000, T0) == 100 and budget.num_suppressed == {REJECTED: 900}
    assert num_taken(budget, 1000, T0 + PERIOD_S / 4) == 25
    assert num_taken(budget, 1000, T0 + PERIOD_S * 50) == 100
    assert budget.num_suppressed == {REJECTED: 900 + 975 + 900}


def test_sustained_rejections() -> None:
    """At 784 rejections a second, three hours bring a burst of records and an hour's budget for each hour."""
    budget = UnadmittedBudget(50)
    taken = sum(budget.take("acme", REJECTED, T0 + number / 784) for number in range(0, 784 * 3600 * 3, 97))
    assert 50 + 3 * 50 - 1 <= taken <= 50 + 3 * 50


def test_budgets_are_per_tenant() -> None:
    """A tenant cannot use another's budget."""
    budget = UnadmittedBudget(10)
    assert num_taken(budget, 1000, T0) == 10
    assert num_taken(budget, 5, T0, "bolt") == 5


def test_clock_set_back() -> None:
    """Setting the clock back neither adds to nor takes from the budget, which continues from there."""
    budget = UnadmittedBudget(10)
    assert num_taken(budget, 4, T0) == 4
    assert num_taken(budget, 20, T0 - 10 * PERIOD_S) == 6
    assert num_taken(budget, 20, T0 - 9 * PERIOD_S) == 10


def test_budget_of_zero() -> None:
    """With a budget of 0 no rejected request gets a record."""
    assert num_taken(UnadmittedBudget(0), 10, T0 + PERIOD_S) == 0


def test_tenants_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound, the tenant whose last such request is the oldest starts with a full budget."""
    monkeypatch.setattr(unadmitted, "MAX_TENANTS", 3)
    budget = UnadmittedBudget(1)
    for tenant in ("a", "b", "c", "a", "d"):
        budget.take(tenant, REJECTED, T0)
    assert len(budget) == 3
    assert [budget.take(tenant, REJECTED, T0) for tenant in ("a", "c", "d", "b")] == [False, False, False, True]


def test_suppression_is_logged_periodically() -> None:
    """The log names the tenant and the number since the last line, once every ten minutes."""
    budget = UnadmittedBudget(0)
    with capture_logs() as lines:
        for second in range(int(LOG_EVERY_S * 2) + 1):
            budget.take("acme", REJECTED, T0 + second)
        budget.take("bolt", REJECTED, T0)
    suppressed = [
        (line["tenant"], line["num_records"]) for line in lines if line["event"] == "ledger.records_suppressed"
    ]
    assert suppressed == [("acme", 1), ("acme", LOG_EVERY_S), ("acme", LOG_EVERY_S), ("bolt", 1)]


def test_requests_without_record_are_answered(tmp_path: Path) -> None:
    """The client is released at once; the chain continues without a gap; other requests get their records."""
    desk = open_desk(tmp_path)
    for number in range(150):
        desk.close(f"r{number}", **REFUSED)
    assert desk.released == [f"r{number}" for number in range(100, 150)], (
        "clients without a record must not wait for the flush"
    )
    desk.journal.flush()
    assert sorted(desk.released) == sorted(f"r{number}" for number in range(150))
    assert desk.written == [f"r{number}" for number in range(100)] and desk.journal.num_suppressed == {REJECTED: 50}
    assert desk.admit("served") and desk.admit("left amid its answer")
    desk.close("served")
    desk.close("left amid its answer", outcome=CANCELLED)
    desk.close("left the queue", outcome=CANCELLED, admitted_at=None)
    assert desk.released[-1] == "left the queue" and desk.journal.num_suppressed == {REJECTED: 50, CANCELLED: 1}
    desk.close("could not be tokenised", outcome=Outcome.FAILED, admitted_at=None)
    desk.close("of another tenant", tenant="bolt", **REFUSED)
    desk.journal.flush()
    assert desk.written[100:] == ["served", "left amid its answer", "could not be tokenised", "of another tenant"]


def test_held_back_records_are_within_the_budget(tmp_path: Path) -> None:
    """No tenant can fill the list of records that wait for room."""
    desk = open_desk(tmp_path, max_segments=1)
    names: list[str] = []
    while desk.admit(f"r{len(names)}"):
        names.append(f"r{len(names)}")
    for number in range(500):
        desk.close(f"refused-{number}", **REFUSED)
    assert desk.journal.num_held_back == 100 and len(desk.released) == 500
