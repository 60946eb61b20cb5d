"""What readers and `verify` say while a server loads, after retention, and about another version's database."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
import trio

from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.database import LedgerError, load, loaded_position, make_engine, sqlite_url
from quipu.actors.ledger.folder import FOLDER, LedgerFolder
from quipu.actors.ledger.reading import open_reader
from quipu.actors.ledger.reconciling import reconcile
from quipu.actors.ledger.retention import delete_old
from quipu.actors.ledger.segment_files import DiskStorage, Position, scan
from tests.actors.ledger.ledgers import SEGMENT, record_of
from tests.actors.ledger.open_ledgers import ids_in, loaded, opened, rows_in, write

DAY_S = 86_400.0


async def test_segment_is_loaded_and_deleted_amid_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that goes between a look at the database and one at the file takes no record with it."""
    folder, names = tmp_path / FOLDER, [f"r{number}" for number in range(3 * SEGMENT // 2048)]
    async with opened(tmp_path) as ledger:
        await write(ledger, *names[:1])
        await loaded(ledger)
        shutil.copytree(tmp_path, tmp_path / "early")
        for name in names[1:]:
            await write(ledger, name)
        shutil.rmtree(tmp_path / "early" / FOLDER)
        shutil.copytree(folder, tmp_path / "early" / FOLDER)
        about = LedgerFolder(tmp_path).about()
    assert about is not None
    storage = DiskStorage(tmp_path / "early" / FOLDER)
    first, second = storage.numbers()[:2]
    look = loaded_position

    def look_and_load(connection: sa.Connection, ledger: str) -> Position:
        """Return the position, and then load and delete a segment, as a server does it meanwhile."""
        position = look(connection, ledger)
        if first in storage.numbers():
            engine = make_engine(sqlite_url(tmp_path / "early"))
            load(engine, ledger, scan(storage.read(first), Position(first, 0)))
            engine.dispose()
            storage.delete(first)
        return position

    monkeypatch.setattr("quipu.actors.ledger.reading.loaded_position", look_and_load)
    with open_reader(data_dir=tmp_path / "early") as reader:
        found = [one.record.request_id for one in reader.records()]
    assert storage.numbers()[0] == second and sorted(found) == sorted(names)


async def test_another_versions_database_is_not_passed_over(tmp_path: Path) -> None:
    """A database that this version cannot read is an error beside its data directory, too: its records would lack."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "a")
        await loaded(ledger)
    engine = make_engine(sqlite_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text("update alembic_version set version_num = '0012'"))
    engine.dispose()
    with pytest.raises(LedgerError, match="has schema 0012, this version reads"), open_reader(data_dir=tmp_path):
        pass


@pytest.mark.parametrize("was_left", [False, True])
async def test_retention_of_whole_chains(tmp_path: Path, was_left: bool) -> None:
    """Servers all of whose records were deleted, by this version or an earlier one, leave nothing that looks changed,
    and nothing that differs from their counters; so does one that goes on."""
    now = record_of("x").closed_at + 10 * DAY_S
    for name in ("first", "second"):
        async with opened(tmp_path) as ledger:
            ledger.counters = lambda: {"generation_tokens_total": 20.0, 'requests_total{outcome="finished"}': 2.0}
            await write(ledger, f"{name}-1", f"{name}-2", closed_at=now - 5 * DAY_S)
            await loaded(ledger)
    async with opened(tmp_path):
        pass
    engine = make_engine(sqlite_url(tmp_path))
    async with opened(tmp_path) as ledger:
        await write(ledger, "old", closed_at=now - 5 * DAY_S)
        await loaded(ledger)
        about = LedgerFolder(tmp_path).about()
        assert about is not None
        if was_left:
            with engine.begin() as connection:
                connection.execute(sa.text("delete from usage_records where request_id like 'first%'"))
                connection.execute(sa.text(f"update ledger_marks set at = {now - 5 * DAY_S}"))
        assert delete_old(engine, about.ledger, now - 3 * DAY_S) == (3 if was_left else 5)
        await write(ledger, "new", closed_at=now)
        await loaded(ledger)
    engine.dispose()
    with trio.fail_after(10):
        while rows_in(tmp_path) != 1:
            await trio.sleep(0.01)
    for number in DiskStorage(tmp_path / FOLDER).numbers()[:-1]:
        DiskStorage(tmp_path / FOLDER).delete(number)
    verdict = verify(data_dir=tmp_path)
    assert not verdict.bad, verdict.bad
    assert ids_in(tmp_path) == ["new"]
    assert all(account.agrees for account in reconcile(data_dir=tmp_path))
