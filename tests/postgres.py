"""A real PostgreSQL for tests: a cluster of its own in a temporary folder, on a free port, stopped at the end.

It refuses to run as root, so root runs it as another user. Where it cannot be had, the tests that need it are skipped,
and the end of the test run says so in so many words.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

PASSWORD = "correct-horse"
_OTHER_USERS = ("postgres", "nobody")
_MISSING = pytest.StashKey[str]()
_numbers = itertools.count(1)


class CannotRun(Exception):
    """Why there is no PostgreSQL here."""


@attrs.define(eq=False)
class Postgres:
    """A cluster that can be stopped and started again at the same address."""

    programs: Path
    folder: Path
    port: int
    user: str | None
    """Whom it runs as; None: as ourselves."""

    def start(self) -> None:
        options = f"-c port={self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-l", f"{self.folder}/log", "-o", options, "-w", "-t", "60", "start")

    def stop(self) -> None:
        """At once, as a crash would."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def create(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run(
            "initdb", "-D", self._data, "-U", "quipu", f"--pwfile={password}", "-A", "scram-sha-256", "-E", "UTF8", "-N"
        )

    def new_database(self) -> str:
        """An empty one; its URL."""
        name = f"ledger_{next(_numbers)}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "quipu", name)
        return f"postgresql+psycopg://quipu:{PASSWORD}@127.0.0.1:{self.port}/{name}"

    @property
    def _data(self) -> str:
        return str(self.folder / "data")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self.programs / program), *arguments]
        as_other: dict[str, Any] = {} if self.user is None else {"user": self.user, "extra_groups": []}
        if self.user is not None:
            as_other["group"] = pwd.getpwnam(self.user).pw_gid
        environment = {"PATH": os.defpath, "PGPASSWORD": PASSWORD, "LC_ALL": "C"}
        log = self.folder / "output"
        with log.open("wb") as output:  # not a pipe: the server would inherit it, and nobody would see its end
            done = subprocess.run(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, check=False, **as_other
            )
        if done.returncode:
            raise CannotRun(f"{program} failed: {log.read_text('utf-8', 'replace').strip()}")


def _programs() -> Path:
    candidates = [Path(path).resolve().parent for path in (shutil.which("initdb"),) if path]
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in candidates:
        if all((folder / name).exists() for name in ("initdb", "pg_ctl", "createdb")):
            return folder
    raise CannotRun("PostgreSQL is not installed (Debian: apt-get install postgresql)")


def _user() -> str | None:
    if os.getuid() != 0:
        return None
    for name in _OTHER_USERS:
        try:
            pwd.getpwnam(name)
        except KeyError:
            continue
        return name
    raise CannotRun("PostgreSQL refuses to run as root, and there is no other user")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def postgres_cluster(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """One for the whole run. Skips, loudly, where there is none."""
    folder = Path(tempfile.mkdtemp(prefix="quipu-postgres-"))
    try:
        try:
            cluster = Postgres(_programs(), folder, _free_port(), _user())
            if cluster.user is not None:
                os.chown(folder, pwd.getpwnam(cluster.user).pw_uid, -1)
            cluster.create()
            cluster.start()
        except CannotRun as error:
            request.config.stash[_MISSING] = str(error)
            pytest.skip(f"NO POSTGRESQL: {error}")
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def postgres(postgres_cluster: Postgres) -> Iterator[Postgres]:
    """The cluster, running; running again afterwards, whatever a test did to it."""
    yield postgres_cluster
    try:
        postgres_cluster.new_database()
    except CannotRun:
        postgres_cluster.start()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    why = config.stash.get(_MISSING, None)
    if why is not None:
        terminalreporter.section("WARNING: the tests on PostgreSQL did not run", sep="!", red=True, bold=True)
        terminalreporter.write_line(why, red=True)
