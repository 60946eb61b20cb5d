"""The ledger across servers: opened, killed at any byte, opened again, read at any time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import attrs
import pytest
import sqlalchemy as sa
import trio

from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.database import LedgerError, load, sqlite_url
from quipu.actors.ledger.entries import Chain, EntryKind, hash_of
from quipu.actors.ledger.folder import FOLDER, LedgerFolder
from quipu.actors.ledger.loader import READ_BYTES
from quipu.actors.ledger.reading import Query, open_reader
from quipu.actors.ledger.reconciling import reconcile
from quipu.actors.ledger.recovery import recover
from quipu.actors.ledger.retries import RetryIndex
from quipu.actors.ledger.schema import HEAD
from quipu.actors.ledger.segment_files import DiskStorage, Position, scan
from quipu.actors.ledger.service import open_ledger
from quipu.actors.messages.outcomes import Fault, Outcome
from tests.actors.ledger.ledgers import SEGMENT, T0, DiskDials, FaultyStorage, entries_in, record_of, so_far_of
from tests.actors.ledger.open_ledgers import config_of, ids_in, loaded, opened, rows_in, sa_engine, write
from tests.processes import PATIENCE_S

# ---------------------------------------------------------------- starts and stops


async def test_closed_and_loaded(tmp_path: Path) -> None:
    """After a clean stop all records are in the database, the chain is complete, and nothing is open."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "a", "b", "c")
    assert rows_in(tmp_path) == 3 and sorted(ids_in(tmp_path)) == ["a", "b", "c"]
    verdict = verify(data_dir=tmp_path)
    assert not verdict.bad and not verdict.torn and not verdict.num_open and verdict.num_records == 3
    only_database = verify(url=sqlite_url(tmp_path))
    assert not only_database.bad and only_database.num_records == 3


async def test_second_server_is_refused(tmp_path: Path) -> None:
    """Two servers cannot keep one ledger, and the error says what to do. Afterwards the folder is free again."""
    async with opened(tmp_path):
        with pytest.raises(LedgerError, match=r"another server keeps its ledger in .*--data-dir"):
            async with open_ledger(config_of(tmp_path)):
                pass
        assert verify(data_dir=tmp_path).is_in_use
    async with opened(tmp_path):
        pass
    assert not verify(data_dir=tmp_path).is_in_use


async def test_recovery_closes_open_requests(tmp_path: Path) -> None:
    """A request that was never closed gets one record: failed, with what was known at its admission."""
    first, second = tmp_path / "first", tmp_path / "second"
    async with opened(first) as ledger:
        await write(ledger, "done")
        await write(ledger, "open-1", "open-2", closes=False)
        shutil.copytree(first, second)
    assert verify(data_dir=second).num_open == 2
    async with opened(second) as ledger:
        assert ledger.num_recovered == 2
        await write(ledger, "later")
    verdict = verify(data_dir=second)
    assert not verdict.bad and not verdict.num_open and verdict.num_records == 4 and verdict.num_servers == 2
    with open_reader(data_dir=second) as reader:
        found = reader.get("open-1")
        assert found is not None and found.recovered and found.record.outcome is Outcome.FAILED
        assert found.record.prompt_tokens == 100 and found.record.cached_tokens == 48
        assert found.record.fault is Fault.RECOVERED
        done = reader.get("done")
        assert done is not None and not done.recovered
    async with opened(second) as ledger:
        assert ledger.num_recovered == 0
    assert sorted(ids_in(second)) == ["done", "later", "open-1", "open-2"]


async def test_torn_at_every_byte(tmp_path: Path) -> None:
    """Wherever the last write was cut off, it is torn and not bad, is truncated, and every earlier record remains."""
    whole = tmp_path / "whole"
    async with opened(whole) as ledger:
        await write(ledger, "a", "b")
        before = ledger.journal.durable.offset
        await write(ledger, "last")
        end = ledger.journal.durable.offset
        shutil.copytree(whole, tmp_path / "copy")
    (segment,) = (tmp_path / "copy" / FOLDER).glob("*.wal")
    data = segment.read_bytes()
    for cut in [before + 1, *range(before + 64, end, 211), end - 1]:
        folder = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "copy", folder)
        (folder / FOLDER / segment.name).write_bytes(data[:cut] + bytes(len(data) - cut))
        verdict = verify(data_dir=folder)
        whole_lines = data[:cut].count(b"\n") == data[: cut + 1].count(b"\n") and data[cut - 1 : cut] == b"\n"
        assert not verdict.bad and bool(verdict.torn) != whole_lines, cut
        async with opened(folder) as ledger:
            pass
        assert not verify(data_dir=folder).torn and not verify(data_dir=folder).bad
        assert set(ids_in(folder)) - {"last"} == {"a", "b"}


def test_recovery_truncates_only_the_torn_end(tmp_path: Path) -> None:
    """The torn end is cut, every complete entry stays, and unused space is given back."""
    storage = DiskStorage(tmp_path)
    chain = Chain("srv")
    whole = chain.start(T0, {}).data + chain.close(T0, record_of("a")).data
    file = storage.create(1, SEGMENT)
    file.write_at(whole + chain.close(T0, record_of("torn")).data[:-3], 0)
    file.close()
    recovered = recover(storage, RetryIndex(60.0, 100))
    assert storage.read(1) == whole and recovered.next_segment == 2 and recovered.empty_segments == ()
    assert recovered.after is not None and recovered.after["number"] == 1
    assert recover(storage, RetryIndex(60.0, 100)) == recovered


@pytest.mark.parametrize("newer", [False, True])
async def test_entries_of_another_version(tmp_path: Path, newer: bool) -> None:
    """A record of an older version gets defaults for missing fields; a newer version's record is refused."""
    async with opened(tmp_path):
        pass
    chain = Chain("srv-other")
    line = chain.start(T0, {}).data + chain.close(T0, record_of("r")).data
    _, _, text = line.splitlines()[1].partition(b" ")
    if newer:
        changed = text.replace(b'"outcome":"finished"', b'"outcome":"postponed"')
    else:
        changed = text.replace(b'"request_id"', b'"reasoning_tokens":0,"finish_reason":null,"request_id"')
    assert changed != text
    file = DiskStorage(tmp_path / FOLDER).create(5, SEGMENT)
    file.write_at(line.splitlines(keepends=True)[0] + hash_of(changed.decode()).encode() + b" " + changed + b"\n", 0)
    file.close()
    if newer:
        with pytest.raises(LedgerError, match="a newer one wrote it"):
            async with open_ledger(config_of(tmp_path)):
                pass
        return
    assert ids_in(tmp_path) == ["r"]
    async with opened(tmp_path):
        pass
    assert rows_in(tmp_path) == 1 and not verify(url=sqlite_url(tmp_path)).bad


async def test_loader_skips_damage(tmp_path: Path) -> None:
    """Damage longer than a whole batch does not keep later entries from being loaded."""
    async with opened(tmp_path):
        pass
    chain = Chain("srv-other")
    before = chain.start(T0, {}).data + chain.close(T0, record_of("before")).data
    behind = chain.close(T0, record_of("behind")).data
    storage = DiskStorage(tmp_path / FOLDER)
    file = storage.create(5, 1 << 20)
    file.write_at(before + b"x" * (READ_BYTES + 100) + b"\n" + behind, 0)
    file.close()
    async with opened(tmp_path) as ledger:
        await write(ledger, "later")
        await loaded(ledger)
    assert rows_in(tmp_path) == 3


async def test_crash_during_recovery(tmp_path: Path) -> None:
    """After a crash during recovery, the next start does the rest; in the end each request is closed once."""
    dead = tmp_path / "dead"
    async with opened(dead / "0") as ledger:
        await write(ledger, *(f"open-{i}" for i in range(6)), closes=False)
        shutil.copytree(dead / "0", dead / "1")
    async with opened(dead / "1"):
        shutil.copytree(dead / "1", dead / "2")
    newest = max((dead / "2" / FOLDER).glob("*.wal"))
    lines = newest.read_bytes().rstrip(b"\0").splitlines(keepends=True)
    newest.write_bytes(b"".join(lines[:4])[:-7] + bytes(100))  # its start entry, two closings, and a torn one
    (dead / "2" / "ledger.sqlite3").unlink()
    for leftover in (dead / "2").glob("ledger.sqlite3-*"):
        leftover.unlink()
    async with opened(dead / "2") as ledger:
        assert ledger.num_recovered == 4
    assert sorted(ids_in(dead / "2")) == [f"open-{i}" for i in range(6)]
    verdict = verify(data_dir=dead / "2")
    assert not verdict.bad and verdict.num_records == 6 and verdict.num_servers == 3


async def test_loading_again_duplicates_nothing(tmp_path: Path) -> None:
    """A database restored from before or after a load ends with each record once."""
    first, copy = tmp_path / "first", tmp_path / "copy"
    async with opened(first) as ledger:
        await write(ledger, "a", "b")
        shutil.copytree(first, copy)
        await loaded(ledger)
        with sa_engine(first) as engine, engine.begin() as connection:
            connection.execute(sa.text("update ledger_sources set position = 0"))
        await write(ledger, "c")
    async with opened(first):
        pass
    assert rows_in(first) == 3 and verify(data_dir=first).num_records == 3 and not verify(data_dir=first).bad
    async with opened(copy):
        pass
    assert sorted(ids_in(copy)) == ["a", "b"]


async def test_same_request_closed_twice_is_one_record(tmp_path: Path) -> None:
    """After a power loss the file may lack a closing that the database has.

    Recovery closes the request again; one record remains.
    """
    folder = tmp_path / "lost"
    async with opened(tmp_path / "first") as ledger:
        await write(ledger, "r", closes=False)
        shutil.copytree(tmp_path / "first" / FOLDER, folder / FOLDER)
        ledger.journal.close(record_of("r"), partial(int))
        ledger.journal.flush()
    shutil.copy(tmp_path / "first" / "ledger.sqlite3", folder)
    async with opened(folder) as ledger:
        assert ledger.num_recovered == 1
        assert ids_in(folder) == ["r"], "before any record of this server is loaded"
        await loaded(ledger)
    with open_reader(data_dir=folder) as reader:
        (found,) = reader.records()
        assert found.record.outcome is Outcome.FINISHED
        assert reader.sums()[0].num_requests == 1
    assert not verify(data_dir=folder).bad
    assert not verify(url=sqlite_url(folder)).bad, "the chain must be complete without the file as well"
    assert verify(url=sqlite_url(folder)).num_records == 1


async def test_loaded_segments_are_deleted(tmp_path: Path) -> None:
    """Loaded segments are deleted in order, but none after a segment with an open entry."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "long", closes=False)
        await write(ledger, *(f"r{i}" for i in range(120)))
        await write(ledger, *(f"s{i}" for i in range(120)))
        await loaded(ledger)
        storage = DiskStorage(tmp_path / FOLDER)
        assert storage.numbers()[0] == 1 and ledger.journal.durable.segment > 1
        ledger.journal.close(record_of("long"), partial(int))
        ledger.journal.flush()
        await loaded(ledger)
        with trio.fail_after(PATIENCE_S):
            while storage.numbers()[0] != ledger.journal.durable.segment:
                await trio.sleep(0.005)
        assert len(ids_in(tmp_path)) == 241
    assert not verify(data_dir=tmp_path).bad and verify(data_dir=tmp_path).num_records == 241


async def test_full_disk_at_the_start(tmp_path: Path) -> None:
    """A server that cannot allocate its first segment says so and does not start."""
    storage = FaultyStorage(tmp_path / FOLDER, DiskDials(max_segments=0))
    with pytest.raises(LedgerError, match=r"cannot keep a ledger in .*No space left"):
        async with open_ledger(config_of(tmp_path), storage=storage):
            pass


# ---------------------------------------------------------------- the database


async def test_newer_schema_is_refused(tmp_path: Path) -> None:
    """A database with a newer schema is neither written nor read."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "a")
    with sa_engine(tmp_path) as engine, engine.begin() as connection:
        connection.execute(sa.text("update alembic_version set version_num = '9999'"))
    with pytest.raises(LedgerError, match=f"schema 9999, newer than this version's {HEAD}"):
        async with open_ledger(config_of(tmp_path)):
            pass
    with pytest.raises(LedgerError, match="schema 9999"), open_reader(url=sqlite_url(tmp_path)):
        pass


async def test_retention(tmp_path: Path) -> None:
    """Records older than the retention are deleted; what remains is a complete suffix of the chain and verifies."""
    now = record_of("x").closed_at + 10 * 86_400.0
    async with opened(tmp_path) as ledger:
        await write(ledger, "old-1", "old-2", closed_at=now - 5 * 86_400.0)
        await write(ledger, "new", closed_at=now - 86_400.0)
        await write(ledger, "old-3", closed_at=now - 4 * 86_400.0)
    async with open_ledger(config_of(tmp_path, retention_days=3.0), unix_time=lambda: now) as ledger:
        await loaded(ledger)
        with trio.fail_after(PATIENCE_S):
            while rows_in(tmp_path) != 2:
                await trio.sleep(0.005)
    assert sorted(ids_in(tmp_path)) == ["new", "old-3"], "the chain must have no gap"
    for number in DiskStorage(tmp_path / FOLDER).numbers()[:-1]:
        DiskStorage(tmp_path / FOLDER).delete(number)
    verdict = verify(data_dir=tmp_path)
    assert not verdict.bad, verdict.bad


# ---------------------------------------------------------------- reconcile, idempotency


async def test_reconcile(tmp_path: Path) -> None:
    """Each server's records are compared with the counters it left. A difference is named, a kill is reported."""
    counters = {"prompt_tokens_total": 200.0, "prefix_cache_hits_total": 96.0, "generation_tokens_total": 20.0}
    counters |= {"prefix_cache_queries_total": 200.0, 'cached_tokens_total{tier="device"}': 96.0}
    counters |= {'requests_total{outcome="finished"}': 2.0, "usage_disputed_total": 1.0}
    async with opened(tmp_path / "a") as ledger:
        ledger.counters = lambda: counters
        await write(ledger, "a")
        await write(ledger, "b", disputed=True)
        await write(ledger, "open", closes=False)
        shutil.copytree(tmp_path / "a", tmp_path / "killed")
        (running,) = reconcile(data_dir=tmp_path / "a")
        assert running.ended == "running" and all(line.counter is None for line in running.lines)
        ledger.journal.close(record_of("open", completion_tokens=1), partial(int))
    (account,) = reconcile(data_dir=tmp_path / "a")
    wrong = {line.name: (line.ledger, line.counter) for line in account.lines if not line.agrees}
    assert account.ended == "stopped" and account.num_disputed == 1
    assert wrong["generation_tokens_total"] == (21, 20.0) and wrong["prompt_tokens_total"] == (300, 200.0)
    async with opened(tmp_path / "killed"):
        pass
    killed, after = reconcile(data_dir=tmp_path / "killed")
    assert killed.ended == "killed" and killed.agrees and after.ended == "stopped" and after.num_recovered == 1
    by_name = {line.name: line for line in killed.lines}
    assert by_name["prompt_tokens_total"].ledger == 200 and by_name["prompt_tokens_total"].counter is None


@pytest.mark.parametrize("label", ["", '{outcome="rejected"}'], ids=["of an older server", "by outcome"])
async def test_reconcile_counts_what_has_no_record(tmp_path: Path, label: str) -> None:
    """Requests without a record are added to those of their outcome."""
    async with opened(tmp_path) as ledger:
        ledger.counters = lambda: {
            f"usage_records_suppressed_total{label}": 7.0,
            'usage_records_suppressed_total{outcome="cancelled"}': 2.0,
            'requests_total{outcome="rejected"}': 8.0,
            'requests_total{outcome="cancelled"}': 2.0,
        }
        ledger.journal.close(record_of("too long", outcome=Outcome.REJECTED, admitted_at=None), partial(int))
    (account,) = reconcile(data_dir=tmp_path)
    by_name = {line.name: (line.ledger, line.counter) for line in account.lines if "requests_total" in line.name}
    assert by_name['requests_total{outcome="rejected"}'] == (8, 8.0)
    assert by_name['requests_total{outcome="cancelled"}'] == (2, 2.0) and account.num_suppressed == 9


async def test_retries_survive_a_restart(tmp_path: Path) -> None:
    """The next server knows the first request of a digest, from the file and from the database alone."""
    same = {"idempotency_digest": "d" * 64}
    clock = record_of("x").closed_at + 60.0
    async with opened(tmp_path) as ledger:
        await write(ledger, "first", **same)
    async with open_ledger(config_of(tmp_path), unix_time=lambda: clock) as ledger:
        again = so_far_of("again", received_at=clock, **same)
        assert ledger.journal.retry_of(again) == "first"
        await loaded(ledger)
    for path in (tmp_path / FOLDER).glob("*.wal"):
        path.write_bytes(b"")
    async with open_ledger(config_of(tmp_path), unix_time=lambda: clock) as ledger:
        await loaded(ledger)
        assert ledger.journal.retry_of(again) == "first"
    async with opened(tmp_path / "open") as ledger:
        await write(ledger, "first", closes=False, **same)
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    async with open_ledger(config_of(tmp_path / "killed"), unix_time=lambda: clock) as ledger:
        assert ledger.journal.retry_of(again) == "first", "a request that its server never closed must be found"


async def test_reader_collapses_retries(tmp_path: Path) -> None:
    """Sums count every request, or each with its retries once, with the same result from file and database."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "first", tenant="acme")
        await write(ledger, "again", tenant="acme", retry_of="first")
        await write(ledger, "other", tenant="bolt", closed_at=record_of("x").closed_at + 3600)
        with open_reader(data_dir=tmp_path) as reader:
            early = reader.sums(Query(), group_by=("tenant",), bucket_s=3600, collapse_retries=True)
        await loaded(ledger)
    with open_reader(url=sqlite_url(tmp_path)) as reader:
        late = reader.sums(Query(), group_by=("tenant",), bucket_s=3600, collapse_retries=True)
        assert early == late
        assert [(s.group["tenant"], s.num_requests, s.prompt_tokens) for s in late] == [
            ("acme", 1, 100),
            ("bolt", 1, 100),
        ]
        assert late[1].bucket is not None and late[0].bucket is not None and late[1].bucket - late[0].bucket == 3600
        assert reader.sums()[0].num_requests == 3
        assert reader.sums(Query(tenants=("nobody",)))[0].num_requests == 0


@attrs.frozen
class MeanwhileQuery(Query):
    """A query that runs a callback after the file was read and before the database is queried."""

    meanwhile: Callable[[], object] = list

    def conditions(self) -> list[sa.ColumnElement[bool]]:
        self.meanwhile()
        return super().conditions()


async def test_reader_during_loading(tmp_path: Path) -> None:
    """Records that are loaded, and segments that are deleted, during a read are returned once."""
    async with opened(tmp_path / "a") as ledger:
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        await write(ledger, *(f"r{i}" for i in range(20)))
    data = [path.read_bytes() for path in (tmp_path / "a" / FOLDER).glob("*.wal")]
    (tmp_path / "b" / FOLDER / "00000001.wal").write_bytes(data[0])
    about = LedgerFolder(tmp_path / "b").about()
    assert about is not None
    found = scan(data[0], Position(1, 0))

    def load_all() -> None:
        with sa_engine(tmp_path / "b") as engine:
            load(engine, about.ledger, found)
        DiskStorage(tmp_path / "b" / FOLDER).delete(1)

    assert ids_in(tmp_path / "b") == ids_in(tmp_path / "a")
    for repeat in range(2):
        if repeat:
            (tmp_path / "b" / FOLDER / "00000001.wal").write_bytes(data[0])
            with sa_engine(tmp_path / "b") as engine, engine.begin() as connection:
                for table in ("usage_records", "ledger_marks", "ledger_sources"):
                    connection.execute(sa.text(f"delete from {table}"))
        with open_reader(data_dir=tmp_path / "b") as reader:
            query = MeanwhileQuery(meanwhile=load_all)
            if repeat:
                assert reader.sums(query)[0].num_requests == 20
            else:
                assert len(list(reader.records(query))) == 20
        assert rows_in(tmp_path / "b") == 20


async def test_start_and_stop_entries(tmp_path: Path) -> None:
    """A server's chain begins with `start` and ends with `stop`; the next `start` names its last entry."""
    async with opened(tmp_path) as ledger:
        await write(ledger, "a")
    first = entries_in(tmp_path / FOLDER)
    async with opened(tmp_path):
        pass
    entries = entries_in(tmp_path / FOLDER)
    assert [entry.kind for entry in first] == [EntryKind.START, EntryKind.ADMITTED, EntryKind.CLOSED, EntryKind.STOP]
    second = next(entry for entry in entries if entry.kind is EntryKind.START and entry.server != first[0].server)
    assert second.values["after"] == {"server": first[0].server, "number": 2, "hash": first[-1].hash}
