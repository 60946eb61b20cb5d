"""The schema as the code declares it, and as the migrations make it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from quipu.actors.ledger import database
from quipu.actors.ledger.database import LedgerError, make_engine, migrate, redacted, sqlite_url
from quipu.actors.ledger.schema import HEAD, metadata
from tests.postgres import Postgres


def differences(url: str) -> list[object]:
    engine = make_engine(url)
    migrate(engine)
    migrate(engine)  # a second time, which changes nothing
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        found = compare_metadata(context, metadata)
    engine.dispose()
    return list(found)


def test_migrations_make_the_schema_in_sqlite(tmp_path: Path) -> None:
    """Migrations make the tables that the code reads and writes."""
    assert differences(sqlite_url(tmp_path)) == []


def test_migrations_make_the_schema_in_postgres(postgres: Postgres) -> None:
    """The same in PostgreSQL."""
    assert differences(postgres.new_database()) == []


def test_head_is_the_last_migration() -> None:
    """HEAD is the last migration: one after it would never run."""
    config = Config()
    config.set_main_option("script_location", "quipu.actors.ledger:migrations")
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_failed_migration_is_rolled_back(tmp_path: Path) -> None:
    """A migration is one transaction: after a failure the next start begins again."""
    engine = make_engine(sqlite_url(tmp_path))
    with engine.begin() as connection:
        connection.execute(sa.text("create table ledger_sources (ledger text)"))  # makes the last step fail
    with pytest.raises(sa.exc.OperationalError):
        migrate(engine)
    with engine.begin() as connection:
        assert sa.inspect(connection).get_table_names() == ["ledger_sources"]
        connection.execute(sa.text("drop table ledger_sources"))
    migrate(engine)
    engine.dispose()
    assert differences(sqlite_url(tmp_path)) == []


def test_databases_migrated_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that migrate databases of their own use Alembic one after the other: it works on globals."""
    both_here, here, inside = threading.Event(), set[int](), list[int]()

    def come() -> None:
        here.add(threading.get_ident())
        if len(here) == 2:
            both_here.set()

    class WatchedLock:
        lock = threading.Lock()

        def __enter__(self) -> None:
            come()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def upgrade(config: Config, revision: str) -> None:
        inside.append(threading.get_ident())
        come()
        assert both_here.wait(60)
        assert inside == [threading.get_ident()], "another thread migrates"
        real(config, revision)
        inside.clear()

    def migrate_one(name: str) -> list[object]:
        (tmp_path / name).mkdir()
        return differences(sqlite_url(tmp_path / name))

    real = command.upgrade
    monkeypatch.setattr(command, "upgrade", upgrade)
    monkeypatch.setattr(database, "_alembic_lock", WatchedLock())
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(migrate_one, ("one", "two"))) == [[], []]


@pytest.mark.parametrize("url", ["nonsense", "mysql://user:s3cret@host/db", "postgresql+asyncpg://u:s3cret@h/d"])
def test_bad_url(url: str) -> None:
    """A URL of an unsupported database is refused, and its password is not quoted."""
    with pytest.raises(LedgerError, match="--ledger-url") as caught:
        make_engine(url)
    assert "s3cret" not in str(caught.value)


def test_password_is_never_shown() -> None:
    """A URL that is logged or shown has no password."""
    assert redacted("postgresql://user:s3cret@host/db") == "postgresql+psycopg://user:***@host/db"
    in_query = "postgresql://host/db?password=s3cret&sslmode=require&sslpassword=s3cret&oauth_client_secret=s3cret"
    assert redacted(in_query) == "postgresql+psycopg://host/db?sslmode=require"
