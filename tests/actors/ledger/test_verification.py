"""`verify` finds whatever was changed in a ledger's database or files, and names it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa

from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.folder import FOLDER
from tests.actors.ledger.open_ledgers import ids_in, opened, sa_engine, write


async def ledger_of_ten(folder: Path, *, num_restarts: int = 0) -> None:
    """Make a ledger of ten records, in the database alone."""
    async with opened(folder) as ledger:
        for i in range(10):
            await write(ledger, f"request-{i}")
    for _ in range(num_restarts):
        async with opened(folder):
            pass
    for path in (folder / FOLDER).glob("*.wal"):
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("update usage_records set completion_tokens = 11 where request_id = 'request-4'", "completion_tokens is 11"),
        ("update usage_records set tenant = 'other' where request_id = 'request-4'", "tenant is 'other'"),
        ("update usage_records set entry = replace(entry, '100', '101') where request_id = 'request-4'", "its hash"),
        ("delete from usage_records where request_id = 'request-3'", "1 entries before it are missing"),
        ("update usage_records set hash = '0' where request_id = 'request-4'", "does not match its hash"),
    ],
)
async def test_first_bad_record_is_named(tmp_path: Path, change: str, complaint: str) -> None:
    """Whatever was changed in the database, verify names the first record that differs from what was written."""
    await ledger_of_ten(tmp_path)
    assert not verify(data_dir=tmp_path).bad
    with sa_engine(tmp_path) as engine, engine.begin() as connection:
        connection.execute(sa.text(change))
    (bad,) = verify(data_dir=tmp_path).bad
    assert "entry 5, request request-4" in bad and complaint in bad


async def test_missing_end_is_detected(tmp_path: Path) -> None:
    """A server's last records cannot be removed unnoticed once another server has started after it."""
    await ledger_of_ten(tmp_path, num_restarts=1)
    with sa_engine(tmp_path) as engine, engine.begin() as connection:
        connection.execute(sa.text("delete from usage_records where request_id = 'request-9'"))
        connection.execute(sa.text("delete from ledger_marks where kind = 'stop' and number = 11"))
    (bad,) = verify(data_dir=tmp_path).bad
    assert "entry 9, request request-8: 2 entries after it are missing" in bad


async def test_changed_last_entry_is_bad(tmp_path: Path) -> None:
    """A complete last line with a wrong byte was changed, since a kill loses the newline first.

    One with a hole (a power loss may write the end before the middle) is torn.
    """
    async with opened(tmp_path / "a") as ledger:
        await write(ledger, "a", "last")
        shutil.copytree(tmp_path / "a", tmp_path / "changed")
        shutil.copytree(tmp_path / "a", tmp_path / "hole")
    for name, spoil in (("changed", b"8"), ("hole", b"\0")):
        (segment,) = (tmp_path / name / FOLDER).glob("*.wal")
        data = segment.read_bytes()
        at = data.rindex(b'"completion_tokens":') + len(b'"completion_tokens":')
        assert data[at : at + 1] != spoil
        segment.write_bytes(data[:at] + spoil + data[at + 1 :])
    assert verify(data_dir=tmp_path / "hole").torn and not verify(data_dir=tmp_path / "hole").bad
    verdict = verify(data_dir=tmp_path / "changed")
    assert not verdict.torn and "are not an entry" in verdict.bad[0]


async def test_damage_in_the_middle_is_bad(tmp_path: Path) -> None:
    """A damaged byte followed by readable entries is not a torn end, and recovery truncates nothing after it."""
    async with opened(tmp_path / "a") as ledger:
        await write(ledger, "a", "b", "c")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
    (segment,) = (tmp_path / "b" / FOLDER).glob("*.wal")
    data = segment.read_bytes()
    at = data.index(b'"closed"')
    segment.write_bytes(data[:at] + b"X" + data[at + 1 :])
    for leftover in (tmp_path / "b").glob("ledger.sqlite3*"):
        leftover.unlink()
    verdict = verify(data_dir=tmp_path / "b")
    assert verdict.bad and not verdict.torn and "are not an entry" in verdict.bad[0]
    async with opened(tmp_path / "b"):
        pass
    assert sorted(ids_in(tmp_path / "b")) == ["a", "b", "c"]
    assert verify(data_dir=tmp_path / "b").bad
