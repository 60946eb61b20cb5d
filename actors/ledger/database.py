"""The ledger's database: SQLite in the data directory, or PostgreSQL by URL. Opens, migrates and writes it.

`loader.py` writes, in a thread; `reading.py` reads. All of it blocks, so nothing here may run in the event loop.

What must always hold: a record and the position after it are committed together; an existing record is never changed; a
schema newer than this code is refused; no password appears in a message.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ..shared.private_files import make_private_database
from .entries import Entry, EntryKind
from .fields import with_defaults
from .retries import FirstRequest, TenantKeys
from .schema import HEAD, marks, records, sources
from .segment_files import BEGINNING, Position, Scan

SQLITE_NAME: Final = "ledger.sqlite3"
CONNECT_S: Final = 5
STATEMENT_S: Final = 60
SQLITE_LOCK_S: Final = 30.0
"""How long to wait for another process that is writing."""
_MIGRATION_LOCK: Final = 0x71756970
"""Key of PostgreSQL's advisory lock, so that of servers that start together only one migrates."""
_alembic_lock: Final = threading.Lock()
"""Held by the thread that uses Alembic, whose `op` and `context` are of the process: two ledgers may open at once, and
a closed one may leave a thread behind. Whoever takes it has its database's lock already."""


class LedgerError(Exception):
    """The ledger cannot be used as configured. The message tells the operator why and what to do."""


class NoLedgerYet(LedgerError):
    """The database has no ledger: no server has loaded anything."""


def sqlite_url(data_dir: Path) -> str:
    return f"sqlite:///{data_dir / SQLITE_NAME}"


def redacted(url: str) -> str:
    """Return a URL without its password, for messages."""
    parsed = parse_url(url)
    secrets = [name for name in parsed.query if "password" in name.lower() or "secret" in name.lower()]
    return parsed.difference_update_query(secrets).render_as_string(hide_password=True)


def parse_url(url: str) -> sa.URL:
    """Parse the URL of a supported database. Raises LedgerError, whose message contains no password."""
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        raise LedgerError(
            "--ledger-url is not a database URL (for example postgresql+psycopg://USER@HOST/DATABASE)"
        ) from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("postgresql+psycopg", "sqlite"):
        raise LedgerError(f"--ledger-url: unsupported {parsed.drivername}; supported are postgresql+psycopg and sqlite")
    return parsed


def make_engine(url: str, *, durable: bool = False, reads_only: bool = False) -> sa.Engine:
    """Make an engine, without connecting yet. Raises LedgerError.

    `durable`: a commit returns only when it would survive a power loss.
    """
    parsed = parse_url(url)
    if parsed.drivername == "sqlite":
        return _make_sqlite(parsed, durable=durable, reads_only=reads_only)
    arguments = {
        "connect_timeout": CONNECT_S,
        "client_encoding": "utf8",  # without it, text from a SQL_ASCII database arrives as bytes
        "options": f"-c statement_timeout={STATEMENT_S * 1000}",
        "tcp_user_timeout": STATEMENT_S * 1000,
        "application_name": "quipu-ledger",
    }
    return sa.create_engine(parsed, connect_args=arguments, pool_size=2, pool_pre_ping=True)


class KeptEngines:
    """Engines by URL that readers use one after another, so that statements are compiled once.

    Compiling took two thirds of a small report's time. No two readers share an engine, and an idle one has no
    connection. May be used from several threads.
    """

    def __init__(self) -> None:
        self._idle: dict[str, list[sa.Engine]] = {}

    def take(self, url: str) -> sa.Engine:
        """Return an engine that nobody else has. Raises LedgerError."""
        try:
            return self._idle[url].pop()
        except (KeyError, IndexError):
            return make_engine(url, reads_only=True)

    def give_back(self, url: str, engine: sa.Engine) -> None:
        """Close an engine's connections and keep it for the next reader."""
        engine.dispose()
        self._idle.setdefault(url, []).append(engine)


def _make_sqlite(url: sa.URL, *, durable: bool, reads_only: bool) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": SQLITE_LOCK_S})
    is_file = url.database not in (None, "", ":memory:") and not str(url.database).startswith("file:")

    @sa.event.listens_for(engine, "do_connect")
    def keep_private(*_: object) -> None:
        if is_file and not reads_only:
            with suppress(OSError):  # SQLite will report what is wrong with the file
                make_private_database(Path(str(url.database)))

    @sa.event.listens_for(engine, "connect")
    def configure(connection: Any, _: object) -> None:
        connection.isolation_level = None  # or the driver would run DDL outside the transaction
        pragmas = [f"synchronous={'FULL' if durable else 'NORMAL'}"]
        pragmas += ["query_only=ON"] if reads_only else ["journal_mode=WAL"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN" if reads_only else "BEGIN IMMEDIATE")

    return engine


def migrate(engine: sa.Engine) -> None:
    """Migrate the schema to HEAD. Raises LedgerError for a newer one, SQLAlchemyError if it cannot be reached."""
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        found = _version(connection)
        if found != HEAD:
            _upgrade(connection, found)


def _upgrade(connection: sa.Connection, found: str | None) -> None:
    # imported here because it is slow to load, and most starts have nothing to migrate
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", "quipu.actors.ledger:migrations")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise LedgerError(f"the ledger's database has schema {found}, newer than this version's {HEAD}: upgrade quipu")
    config.attributes["connection"] = connection
    with _alembic_lock:
        command.upgrade(config, "head")


def _version(connection: sa.Connection) -> str | None:
    """Return the schema version as Alembic keeps it. None: there is no ledger yet."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
    return None if found is None else str(found)


def check_version(engine: sa.Engine) -> None:
    """Raise LedgerError unless the schema is HEAD, NoLedgerYet without one. For readers, which change nothing."""
    with engine.connect() as connection:
        found = _version(connection)
    if found is None:
        raise NoLedgerYet("there is no ledger in this database yet")
    if found != HEAD:
        raise LedgerError(
            f"the ledger's database has schema {found}, this version reads {HEAD}: "
            "a server of this version migrates an older one when it starts"
        )


def loaded_position(connection: sa.Connection, ledger: str) -> Position:
    """Return the position in this ledger's write-ahead file up to which the database has everything."""
    packed = connection.scalar(sa.select(sources.c.position).where(sources.c.ledger == ledger))
    return BEGINNING if packed is None else Position.unpack(packed)


def read_firsts(engine: sa.Engine, since: float, window_s: float, max_keys: int) -> dict[str, TenantKeys]:
    """Return, by tenant, the newest requests with an idempotency key admitted since then that were not retries."""
    c = records.c
    age = sa.func.row_number().over(partition_by=c.tenant, order_by=c.admitted_at.desc()).label("age")
    first = sa.select(c.tenant, c.idempotency_digest, c.request_id, c.admitted_at, age).where(
        c.idempotency_digest.is_not(None), c.admitted_at >= since, c.retry_of.is_(None)
    )
    newest = first.subquery().c
    wanted = sa.select(newest.tenant, newest.idempotency_digest, newest.request_id, newest.admitted_at)
    wanted = wanted.where(newest.age <= max_keys).order_by(newest.admitted_at)
    found: dict[str, TenantKeys] = {}
    with engine.connect() as connection:
        for row in connection.execute(wanted):
            keys = found.setdefault(row.tenant, TenantKeys())
            keys.put(row.idempotency_digest, FirstRequest(row.request_id, row.admitted_at), window_s)
    return found


def reason(error: Exception) -> str:
    """Return an error's reason in one line, without the statement and its parameters."""
    text = str(error.orig if isinstance(error, sa.exc.DBAPIError) else error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def load(engine: sa.Engine, ledger: str, batch: Scan) -> None:
    """Load a batch's chained entries and store its end."""
    chained = [located for located in batch.entries if located.entry.kind is not EntryKind.ADMITTED]
    with engine.begin() as connection:
        insert = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
        closings = {p.entry.request_id: p for p in reversed(chained) if p.entry.kind is EntryKind.CLOSED}
        known = sa.select(records.c.request_id, records.c.hash).where(records.c.request_id.in_(closings))
        there = {row.request_id: row.hash for row in connection.execute(known)}
        rows: list[dict[str, object]] = []
        others: list[dict[str, object]] = []
        for located in chained:
            entry = located.entry
            first = entry.kind is EntryKind.CLOSED and closings[entry.request_id] is located
            if first and entry.request_id not in there:
                own = {"recovered": entry.recovered, **_chain_row(entry, located.end, ledger)}
                rows.append(with_defaults(entry.values) | own)
            elif entry.kind is not EntryKind.CLOSED or there.get(entry.request_id) != entry.hash:
                others.append({"kind": entry.kind.value, "at": entry.at, **_chain_row(entry, located.end, ledger)})
        if rows:
            connection.execute(insert(records).on_conflict_do_nothing(), rows)
        if others:
            connection.execute(insert(marks).on_conflict_do_nothing(), others)
        upsert = insert(sources).values(ledger=ledger, position=batch.end.packed)
        connection.execute(
            upsert.on_conflict_do_update(index_elements=["ledger"], set_={"position": upsert.excluded.position})
        )


def _chain_row(entry: Entry, end: Position, ledger: str) -> dict[str, object]:
    return {
        "server": entry.server,
        "number": entry.number,
        "hash": entry.hash,
        "previous": entry.previous,
        "entry": entry.text,
        "ledger": ledger,
        "position": end.packed,
    }
