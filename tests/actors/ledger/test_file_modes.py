"""File modes: other users cannot read any file of a ledger, whoever created it and when."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from quipu.actors.ledger.database import SQLITE_NAME, make_engine, migrate, sqlite_url
from tests.actors.ledger.test_service import loaded, opened, write

PRIVATE = 0o600


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes_in(folder: Path) -> dict[str, int]:
    """Return the mode of every file, by path."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in paths}


async def test_files_of_a_new_ledger(tmp_path: Path, umask: int) -> None:
    """Database, its write-ahead and shared files, segments, lock and description are private."""
    data_dir = tmp_path / "data"
    async with opened(data_dir) as ledger:
        await write(ledger, "a", "b")
        await loaded(ledger)
        modes = modes_in(data_dir)
    assert {SQLITE_NAME, f"{SQLITE_NAME}-wal", f"{SQLITE_NAME}-shm"} <= modes.keys()
    assert len(modes) > 4
    assert {name: oct(mode) for name, mode in modes.items() if mode != PRIVATE} == {}


async def test_files_of_an_older_ledger(tmp_path: Path) -> None:
    """Files are made private when the ledger is opened, including segments that are only read."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "a", closes=False)
    files = [tmp_path / name for name in modes_in(tmp_path)]
    files += [tmp_path / f"{SQLITE_NAME}-wal", tmp_path / f"{SQLITE_NAME}-shm"]
    for path in files:
        path.touch()
        path.chmod(0o664)
    async with opened(tmp_path) as ledger:
        await write(ledger, "b")
        await loaded(ledger)
        modes = modes_in(tmp_path)
    assert {name: oct(mode) for name, mode in modes.items() if mode != PRIVATE} == {}


def test_database_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode of a database that belongs to another user is not changed: its owner decides who may read it."""
    path = tmp_path / SQLITE_NAME
    path.touch(0o666)
    path.chmod(0o666)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    engine = make_engine(sqlite_url(tmp_path))
    migrate(engine)
    engine.dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666


def test_readers_change_no_mode(tmp_path: Path) -> None:
    """Opening a reader changes no file mode and creates no database."""
    engine = make_engine(sqlite_url(tmp_path))
    migrate(engine)
    engine.dispose()
    path = tmp_path / SQLITE_NAME
    path.chmod(0o640)
    reader = make_engine(sqlite_url(tmp_path), reads_only=True)
    with reader.connect() as connection:
        connection.exec_driver_sql("SELECT 1")
    reader.dispose()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
