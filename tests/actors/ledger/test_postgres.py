"""The ledger in a real PostgreSQL: the same numbers as in SQLite, and nothing lost while it is down."""

from __future__ import annotations

import random
import threading
from functools import partial
from pathlib import Path

import pytest
import sqlalchemy as sa
import trio

from quipu.actors.ledger.checking import verify
from quipu.actors.ledger.database import LedgerError, make_engine, migrate
from quipu.actors.ledger.fields import TIERS
from quipu.actors.ledger.folder import FOLDER
from quipu.actors.ledger.reading import LedgerReader, LedgerRecord, Query, open_reader
from quipu.actors.ledger.segment_files import DiskStorage
from quipu.actors.ledger.service import Ledger, LedgerConfig, open_ledger
from quipu.actors.messages.counts import UNKNOWN, Estimate, Known
from quipu.actors.messages.outcomes import Fault, Outcome
from quipu.actors.messages.usage_record import ServiceTier, UsageRecord
from quipu.kernels.step_types import SequenceKind
from tests.actors.ledger.ledgers import SEGMENT, T0, record_of, so_far_of
from tests.postgres import PASSWORD, Postgres


def config_of(folder: Path, url: str | None, **changes: object) -> LedgerConfig:
    return LedgerConfig(**{"data_dir": folder, "url": url, "segment_bytes": SEGMENT, **changes})


def write(ledger: Ledger, *names: str, released: list[str] | None = None) -> None:
    callbacks: list[str] = [] if released is None else released
    for name in names:
        assert ledger.journal.admit(so_far_of(name))
    ledger.journal.flush()
    for name in names:
        ledger.journal.close(record_of(name), partial(callbacks.append, name))
    ledger.journal.flush()


async def loaded(ledger: Ledger) -> None:
    with trio.fail_after(60):
        while ledger.loader.position is None or ledger.loader.position < ledger.journal.durable:
            await trio.sleep(0.01)


def random_record(chooser: random.Random, name: str) -> UsageRecord:
    prompt = chooser.randrange(1, 5000)
    counts = [Known(chooser.randrange(prompt)), Estimate(chooser.randrange(prompt)), UNKNOWN]
    cached = chooser.choice(counts)
    number = cached.n if isinstance(cached, Known) else 0
    cuts = [0, *sorted(chooser.randrange(number + 1) for _ in TIERS[1:]), number]
    by_tier = {tier: end - start for tier, start, end in zip(TIERS, cuts, cuts[1:], strict=False)}
    return record_of(
        name,
        tenant=chooser.choice(["acme", "bolt"]),
        key_id=chooser.choice(["key-1", None]),
        model=chooser.choice(["demo", "ünïcode"]),
        outcome=chooser.choice(list(Outcome)),
        admitted_at=chooser.choice([T0, None]),
        closed_at=T0 + chooser.choice([0.0, 59.999999, 60.0, chooser.uniform(0, 10_000)]),
        prompt=chooser.choice([Known(prompt), UNKNOWN, Known(2**62)]),
        cached=cached,
        cached_by_tier=by_tier if isinstance(cached, Known) else None,
        cache_write=chooser.choice(counts),
        disputed=chooser.random() < 0.1,
        retry_of=chooser.choice([None, None, "somebody", "request-0003", "request-0004"]),
        idempotency_digest=chooser.choice([None, "d" * 64]),
        fault=chooser.choice([None, None, *Fault]),
        kind=chooser.choice(list(SequenceKind)),
        batch_id=chooser.choice([None, "batch_1"]),
    )


def everything(reader: LedgerReader) -> tuple[list[LedgerRecord], list[object]]:
    some = Query(since=T0 + 30, until=T0 + 5000, tenants=("acme",))
    vectors = Query(kinds=("embed", "score"), service_tiers=(ServiceTier.BATCH,))
    sums: list[object] = [
        reader.sums(group_by=("tenant", "model"), bucket_s=60),
        reader.sums(some, group_by=("key_id", "outcome"), collapse_retries=True),
        reader.sums(some),
        reader.sums(collapse_retries=True),
        reader.sums(vectors, group_by=("kind", "service_tier"), bucket_s=3600, collapse_retries=True),
        [found.record for found in reader.records(some, newest_first=True)],
        [found.record for found in reader.records(vectors)],
    ]
    return list(reader.records()), sums


async def test_same_numbers_as_sqlite(postgres: Postgres, tmp_path: Path) -> None:
    """Records, order, filters, groups and buckets are the same from the file, SQLite and PostgreSQL."""
    chooser = random.Random(7)
    records = [random_record(chooser, f"request-{i:04}") for i in range(1500)]
    answers = []
    for name, url in (("sqlite", None), ("postgres", postgres.new_database())):
        async with open_ledger(config_of(tmp_path / name, url, segment_bytes=8 << 20)) as ledger:
            for record in records:
                ledger.journal.close(record, partial(int))
            ledger.journal.flush()
            await loaded(ledger)
        # the write-ahead file still exists, and must not be counted in addition to the database
        with open_reader(data_dir=tmp_path / name, url=url) as reader:
            answers.append(everything(reader))
    in_memory = sorted(records, key=lambda record: (record.closed_at, record.request_id))
    records_read = [found.record for found in answers[0][0]]
    assert [record.request_id for record in records_read] == [record.request_id for record in in_memory]
    assert [found.record for found in answers[1][0]] == records_read
    assert answers[0][1] == answers[1][1]
    for number in DiskStorage(tmp_path / "sqlite" / FOLDER).numbers():
        DiskStorage(tmp_path / "sqlite" / FOLDER).delete(number)
    (tmp_path / "sqlite" / "ledger.sqlite3").rename(tmp_path / "moved.sqlite3")
    with open_reader(url=f"sqlite:///{tmp_path / 'moved.sqlite3'}") as reader:
        assert everything(reader)[1] == answers[1][1]


async def test_stopped_and_started_under_load(postgres: Postgres, tmp_path: Path) -> None:
    """The database goes down and comes back: no client waits for it, and in the end each record is there once."""
    url = postgres.new_database()
    released: list[str] = []
    names = [f"request-{i}" for i in range(900)]
    async with open_ledger(config_of(tmp_path, url)) as ledger:
        for at, name in enumerate(names):
            if at == 300:
                await trio.to_thread.run_sync(postgres.stop)
            if at == 600:
                await trio.to_thread.run_sync(postgres.start)
            write(ledger, name, released=released)
            assert released[-1] == name, "a client must be released at once, with or without the database"
            if at % 20 == 0:
                await trio.sleep(0.01)
            if at == 599:
                with trio.fail_after(60):
                    while ledger.loader.trouble is None:
                        await trio.sleep(0.01)
        await loaded(ledger)
        assert ledger.loader.trouble is None and released == names
    with open_reader(url=url) as reader:
        assert sorted(found.record.request_id for found in reader.records()) == sorted(names)
    verdict = verify(data_dir=tmp_path, url=url)
    assert not verdict.bad and verdict.num_records == 900
    assert len(DiskStorage(tmp_path / FOLDER).numbers()) <= 2, "loaded segments must be deleted"


async def test_server_runs_without_its_database(postgres: Postgres, tmp_path: Path) -> None:
    """A server starts, serves and stops without its database; the next one loads what it wrote."""
    url = postgres.new_database()
    postgres.stop()
    async with open_ledger(config_of(tmp_path, url)) as ledger:
        write(ledger, "a", "b")
    postgres.start()
    async with open_ledger(config_of(tmp_path, url)) as ledger:
        write(ledger, "c")
        await loaded(ledger)
    with open_reader(url=url) as reader:
        assert sorted(found.record.request_id for found in reader.records()) == ["a", "b", "c"]


async def test_two_servers_one_database(postgres: Postgres, tmp_path: Path) -> None:
    """Servers with separate folders share a database and start together: both chains are complete."""
    url = postgres.new_database()
    engine = make_engine(url)
    threads = [threading.Thread(target=migrate, args=(engine,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine.dispose()
    async with open_ledger(config_of(tmp_path / "1", url)) as one, open_ledger(config_of(tmp_path / "2", url)) as two:
        for i in range(20):
            write(one, f"one-{i}")
            write(two, f"two-{i}")
        await loaded(one)
        await loaded(two)
        with open_reader(data_dir=tmp_path / "1", url=url) as reader:
            assert reader.sums()[0].num_requests == 40
    verdict = verify(url=url)
    assert not verdict.bad and verdict.num_records == 40 and verdict.num_servers == 2


async def test_changed_row_is_named(postgres: Postgres, tmp_path: Path) -> None:
    """Verify detects a changed number in PostgreSQL as in SQLite."""
    url = postgres.new_database()
    async with open_ledger(config_of(tmp_path, url)) as ledger:
        write(ledger, "a", "b", "c")
        await loaded(ledger)
    engine = make_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("update usage_records set prompt_tokens = 1 where request_id = 'b'"))
    engine.dispose()
    (bad,) = verify(url=url).bad
    assert "request b" in bad and "prompt_tokens is 1 in the database, and was written as 100" in bad


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_data_directory_knows_its_database(postgres: Postgres, tmp_path: Path) -> None:
    """A reader that is given only the folder gets an error that names the database, without its password."""
    url = postgres.new_database()
    async with open_ledger(config_of(tmp_path, url)) as ledger:
        write(ledger, "a")
        await loaded(ledger)
    with pytest.raises(LedgerError, match=r"are loaded into postgresql\+psycopg://quipu:\*\*\*@") as caught:
        with open_reader(data_dir=tmp_path):
            pass
    assert PASSWORD not in str(caught.value)
    assert not [path for path in files_of(tmp_path) if PASSWORD.encode() in path.read_bytes()]
    with pytest.raises(LedgerError) as wrong, open_reader(url=url.replace("/ledger_", "/no_")):
        pass
    assert PASSWORD not in str(wrong.value) and "does not exist" in str(wrong.value)
