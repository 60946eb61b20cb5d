"""The retry index: the first request with a key, within the window, for a bounded number of keys per tenant."""

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
    """Make a request with a key, received `at` seconds after T0."""
    times = {"received_at": T0 + at, "admitted_at": T0 + at, "closed_at": T0 + at}
    return so_far_of(name, idempotency_digest=digest, tenant=tenant, **{**times, **fields})


def test_keys_are_bounded() -> None:
    """A tenant's oldest keys are forgotten first, and retries of a forgotten key are not recognized."""
    index = RetryIndex(WINDOW_S, 100)
    for number in range(5000):
        index.admit(request(f"r{number}", f"d{number}", number / 10))
        assert len(index) <= 100
    later = partial(request, "later", at=500.0)
    assert [index.first_of(later(f"d{number}")) for number in (0, 4899, 4900, 4999)] == [None, None, "r4900", "r4999"]
    index.admit(later("d0"))
    assert index.first_of(request("last", "d0", 501.0)) == "later", "a forgotten key starts again"


def test_tenants_do_not_evict_each_other() -> None:
    """However many keys one tenant sends, those of other tenants stay."""
    index = RetryIndex(WINDOW_S, 10)
    for tenant in ("acme", "bolt"):
        index.admit(request(f"first of {tenant}", "same", tenant=tenant))
    for number in range(1000):
        index.admit(request(f"r{number}", f"d{number}", 1.0, tenant="bolt"))
    assert index.first_of(request("again", "same", 2.0)) == "first of acme"
    assert index.first_of(request("again", "same", 2.0, tenant="bolt")) is None
    assert len(index) == 11


def test_old_keys_are_forgotten() -> None:
    """The index holds one window, both for tenants that continue and for those that stopped."""
    index = RetryIndex(10.0, 1000)
    for tenant in range(50):
        index.admit(request("r", "d", tenant=f"gone-{tenant}"))
    for number in range(1000):
        index.admit(request(f"r{number}", f"d{number}", number))
    assert len(index) <= 12


def test_zero_keys() -> None:
    """With a bound of 0 no retry is recognized."""
    index = RetryIndex(WINDOW_S, 0)
    index.admit(request("first", "d"))
    assert len(index) == 0 and index.first_of(request("again", "d", 1.0)) is None


def keys_of(*firsts: FirstRequest) -> TenantKeys:
    keys = TenantKeys()
    for first in firsts:
        keys.put(f"d-{first.request_id}", first, WINDOW_S)
    return keys


def test_keys_from_the_database() -> None:
    """The earlier of two first requests is found, from either source; both together respect the bound."""
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
class Servers:
    """Opens one server after another on the same folder."""

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

    def check_newest(self, ledger: Ledger) -> None:
        assert self.known(ledger, "acme", 20) == [15, 16, 17, 18, 19]
        assert self.known(ledger, "bolt", 3) == [0, 1, 2]


async def three_servers(servers: Servers) -> None:
    """Check that the next server knows the newest keys of each tenant, within the bound, wherever they are stored."""
    async with servers.open() as ledger:
        await servers.write(ledger, "acme", 20)
        await servers.write(ledger, "bolt", 3)
        servers.check_newest(ledger)
    async with servers.open() as ledger:
        servers.check_newest(ledger)
        await loaded(ledger)
        servers.check_newest(ledger)
    for path in (servers.folder / FOLDER).glob("*.wal"):
        path.write_bytes(b"")
    async with servers.open() as ledger:
        await loaded(ledger)
        servers.check_newest(ledger)


async def test_bounded_after_a_start(tmp_path: Path) -> None:
    """The bound holds with keys from the write-ahead file, from both sources, and from the database alone."""
    await three_servers(Servers(tmp_path))


async def test_bounded_after_a_start_with_postgres(tmp_path: Path, postgres: Postgres) -> None:
    """The same with PostgreSQL."""
    await three_servers(Servers(tmp_path, postgres.new_database()))


@pytest.mark.parametrize("order", [1, -1], ids=["in order", "backwards"])
def test_admissions_in_any_order(order: int) -> None:
    """Recovery also adds requests by their closings; the earliest admission is found anyway."""
    index = RetryIndex(WINDOW_S, 100)
    for number in range(10)[::order]:
        index.admit(request(f"r{number}", "d", number))
    assert index.first_of(request("again", "d", 20.0)) == "r0"
