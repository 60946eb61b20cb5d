"""Which request was the first under a key: within the window, for a bounded number of keys, each tenant for itself."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest

from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.retries import FirstRequest, RetryIndex, TenantKeys
from quipu.actors.ledger.service import Ledger, LedgerConfig, open_ledger
from quipu.actors.messages.usage_record import UsageRecord
from tests.actors.ledger.ledgers import SEGMENT, T0, record_of, so_far_of
from tests.actors.ledger.test_service import loaded
from tests.postgres import Postgres

WINDOW_S = 3600.0


def request(name: str, digest: str, at: float = 0.0, tenant: str = "acme", **fields: Any) -> UsageRecord:
    """One under a key, so long after T0."""
    times = {"received_at": T0 + at, "admitted_at": T0 + at, "closed_at": T0 + at}
    return so_far_of(name, idempotency_digest=digest, tenant=tenant, **{**times, **fields})


def test_a_tenant_keeps_so_many() -> None:
    """Its oldest keys are forgotten first, and a key that was forgotten links nothing."""
    index = RetryIndex(WINDOW_S, 100)
    for number in range(5000):
        index.admit(request(f"r{number}", f"d{number}", number / 10))
        assert len(index) <= 100
    later = partial(request, "later", at=500.0)
    assert [index.first_of(later(f"d{number}")) for number in (0, 4899, 4900, 4999)] == [None, None, "r4900", "r4999"]
    index.admit(later("d0"))
    assert index.first_of(request("last", "d0", 501.0)) == "later", "a forgotten key begins anew"


def test_a_tenant_pushes_out_nobody_elses() -> None:
    """Another one's keys are there as before, however many a tenant sends."""
    index = RetryIndex(WINDOW_S, 10)
    for tenant in ("acme", "bolt"):
        index.admit(request(f"first of {tenant}", "same", tenant=tenant))
    for number in range(1000):
        index.admit(request(f"r{number}", f"d{number}", 1.0, tenant="bolt"))
    assert index.first_of(request("again", "same", 2.0)) == "first of acme"
    assert index.first_of(request("again", "same", 2.0, tenant="bolt")) is None
    assert len(index) == 11


def test_the_window_forgets() -> None:
    """The index holds a window, not a lifetime: of tenants that go on, and of those that have left."""
    index = RetryIndex(10.0, 1000)
    for tenant in range(50):
        index.admit(request("r", "d", tenant=f"gone-{tenant}"))
    for number in range(1000):
        index.admit(request(f"r{number}", f"d{number}", number))
    assert len(index) <= 12


def test_no_keys_at_all() -> None:
    """An operator who wants none links nothing."""
    index = RetryIndex(WINDOW_S, 0)
    index.admit(request("first", "d"))
    assert len(index) == 0 and index.first_of(request("again", "d", 1.0)) is None


def keys_of(*firsts: FirstRequest) -> TenantKeys:
    keys = TenantKeys()
    for first in firsts:
        keys.put(f"d-{first.request_id}", first, WINDOW_S)
    return keys


def test_what_the_database_knows() -> None:
    """The earlier of two first requests wins, wherever it is known from; both together are no more than the bound."""
    index = RetryIndex(WINDOW_S, 10)
    index.admit(request("new", "d-old", 100.0))
    for number in range(7):
        index.admit(request(f"r{number}", f"d{number}", 200.0 + number))
    assert index.first_of(request("again", "d-old", 300.0)) == "new"
    index.adopt("acme", keys_of(*(FirstRequest(name, T0 + at) for at, name in enumerate(["a", "b", "c", "old", "e"]))))
    assert len(index) == 10
    assert index.first_of(request("again", "d-old", 300.0)) == "old"
    assert [index.first_of(request("again", f"d-{name}", 300.0)) for name in "abce"] == [None, None, None, "e"]
    for number in range(20):
        index.admit(request(f"s{number}", f"e{number}", 400.0 + number))
    assert len(index) == 10 and index.first_of(request("again", "d-old", 500.0)) is None
    index.adopt("bolt", keys_of(FirstRequest("its", T0)))
    assert index.first_of(request("again", "d-its", 1.0, tenant="bolt")) == "its"
    assert index.first_of(request("again", "d-its", 1.0)) is None


@attrs.frozen
class Lives:
    """Of servers on one folder."""

    folder: Path
    url: str | None = None

    def open(self) -> Any:
        config = LedgerConfig(self.folder, self.url, segment_bytes=SEGMENT, max_idempotency_keys=5)
        return open_ledger(config, unix_time=lambda: T0 + 100.0)

    async def write(self, ledger: Ledger, tenant: str, num: int) -> None:
        for number in range(num):
            fields: dict[str, Any] = {"tenant": tenant, "idempotency_digest": f"{tenant}-{number}"}
            fields["admitted_at"] = T0 + number
            assert ledger.journal.admit(so_far_of(f"{tenant}-{number}", **fields))
            ledger.journal.close(record_of(f"{tenant}-{number}", **fields), lambda: None)
            ledger.journal.flush()
        await loaded(ledger)

    def known(self, ledger: Ledger, tenant: str, num: int) -> list[int]:
        again = partial(so_far_of, "again", tenant=tenant, received_at=T0 + 100.0)
        digests = ((number, f"{tenant}-{number}") for number in range(num))
        return [number for number, d in digests if ledger.journal.retry_of(again(idempotency_digest=d)) is not None]


async def three_lives(lives: Lives) -> None:
    """The newest keys of each tenant are known to the next server, no more than the bound, wherever they stand."""
    async with lives.open() as ledger:
        await lives.write(ledger, "acme", 20)
        await lives.write(ledger, "bolt", 3)
        assert lives.known(ledger, "acme", 20) == [15, 16, 17, 18, 19] and lives.known(ledger, "bolt", 3) == [0, 1, 2]
    async with lives.open() as ledger:
        assert lives.known(ledger, "acme", 20) == [15, 16, 17, 18, 19] and lives.known(ledger, "bolt", 3) == [0, 1, 2]
        await loaded(ledger)
        assert lives.known(ledger, "acme", 20) == [15, 16, 17, 18, 19] and lives.known(ledger, "bolt", 3) == [0, 1, 2]
    for path in (lives.folder / FOLDER).glob("*.wal"):
        path.write_bytes(b"")
    async with lives.open() as ledger:
        await loaded(ledger)
        assert lives.known(ledger, "acme", 20) == [15, 16, 17, 18, 19] and lives.known(ledger, "bolt", 3) == [0, 1, 2]


async def test_bounded_after_a_start(tmp_path: Path) -> None:
    """From the write-ahead file, from both, and from the database alone."""
    await three_lives(Lives(tmp_path))


async def test_bounded_after_a_start_with_postgres(tmp_path: Path, postgres: Postgres) -> None:
    """The same with PostgreSQL."""
    await three_lives(Lives(tmp_path, postgres.new_database()))


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
def test_any_order(order: int) -> None:
    """Recovery tells of requests by their ends too: the earliest admission wins all the same."""
    index = RetryIndex(WINDOW_S, 100)
    for number in range(10)[::order]:
        index.admit(request(f"r{number}", "d", number))
    assert index.first_of(request("again", "d", 20.0)) == "r0"
