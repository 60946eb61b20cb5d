"""A real PostgreSQL for tests: its own cluster in a temporary folder, on a free port, stopped at the end.

It refuses to run as root, so root runs it as another user. If it is not available, the tests that need it are skipped,
and the summary of the test run warns about that.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest

from tests.processes import free_ports

PASSWORD = "correct-horse"
_OTHER_USERS = ("postgres", "nobody")
_MISSING = pytest.StashKey[str]()
_numbers = itertools.count(1)


class CannotRun(Exception):
    """PostgreSQL is not available; the message says why."""


@attrs.define(eq=False)
class Postgres:
    """A cluster that can be stopped and started again at the same address."""

    programs: Path
    folder: Path
    port: int
    user: str | None
    """User to run as; None means the current user."""

    def start(self) -> None:
        options = f"-c port={self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories='' -c fsync=off"
        self._run("pg_ctl", "-D", self._data, "-l", f"{self.folder}/log", "-o", options, "-w", "-t", "60", "start")

    def stop(self) -> None:
        """Stop immediately, like a crash."""
        self._run("pg_ctl", "-D", self._data, "-m", "immediate", "-w", "stop")

    def create(self) -> None:
        password = self.folder / "password"
        password.write_text(PASSWORD)
        password.chmod(0o644)
        self._run(
            "initdb", "-D", self._data, "-U", "quipu", f"--pwfile={password}", "-A", "scram-sha-256", "-E", "UTF8", "-N"
        )

    def new_database(self) -> str:
        """Create an empty database and return its URL."""
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
        with log.open("wb") as output:  # not a pipe: the server would inherit it and keep it open
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
    raise CannotRun("PostgreSQL refuses to run as root, and there is no other user to run it as")


@contextmanager
def running_cluster() -> Iterator[Postgres]:
    """Create a cluster and run it until the block is left. Raises CannotRun."""
    folder = Path(tempfile.mkdtemp(prefix="quipu-postgres-"))
    try:
        cluster = Postgres(_programs(), folder, free_ports(1)[0], _user())
        if cluster.user is not None:
            os.chown(folder, pwd.getpwnam(cluster.user).pw_uid, -1)
        cluster.create()
        cluster.start()
        yield cluster
        cluster.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_cluster(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """Start one cluster for the whole run; skip, with a warning in the summary, if that is not possible."""
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(running_cluster())
        except CannotRun as error:
            request.config.stash[_MISSING] = str(error)
            pytest.skip(f"NO POSTGRESQL: {error}")
        yield cluster


@pytest.fixture
def postgres(postgres_cluster: Postgres) -> Iterator[Postgres]:
    """Provide the running cluster; start it again if a test stopped it."""
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
