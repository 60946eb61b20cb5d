"""What disturbs the servers of a chaotic run: one thread for their engines, one for everything around them.

An engine is disturbed only when the one before it is ready; the two threads overlap. `Timeline` remembers when what was
disturbed, because some disturbances allow a server to refuse requests.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import attrs

from tests.e2e.servers import Server, num_files
from tests.postgres import Postgres
from tests.processes import eventually

READY_S = 90.0
"""How long a server may take to be ready after a disturbance: a hung engine is found after 8 seconds."""
GRACE_S = 4.0
"""How long after a disturbance a server may still refuse requests."""
SPARE_BYTES = 24 << 20
"""Address space that is left to a process whose memory is limited."""
SPARE_FILES = 4


@attrs.frozen
class Disturbed:
    server: Server
    kind: str
    since: float
    until: float = float("inf")


class Timeline:
    """What was disturbed, and when."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._past: list[Disturbed] = []
        self._lock = threading.Lock()

    @contextmanager
    def during(self, server: Server, kind: str) -> Iterator[None]:
        begun = Disturbed(server, kind, time.monotonic())
        with self._lock:
            self.counts[kind] += 1
            self._past.append(begun)
        try:
            yield
        finally:
            with self._lock:
                self._past[self._past.index(begun)] = attrs.evolve(begun, until=time.monotonic() + GRACE_S)

    def kinds(self, server: Server, since: float) -> set[str]:
        """Return what was disturbed at any time since then."""
        with self._lock:
            return {each.kind for each in self._past if each.server is server and each.until >= since}


@attrs.frozen
class Pace:
    """Drawn pauses between two disturbances, in seconds, and what happens to engines."""

    least_s: float = 3.0
    most_s: float = 15.0
    scale: float = 1.0
    """Factor for how long a disturbance lasts."""
    kinds: tuple[str, ...] = (*("killed",) * 5, "crashed", "stopped", "paused", "short of memory")
    """One that is stopped is found to hang after eight seconds."""

    def pause(self, rng: random.Random) -> float:
        return rng.uniform(self.least_s, self.most_s)


@attrs.frozen
class Around:
    """What there is around a server that can be disturbed."""

    server: Server
    database: Postgres | None = None
    disk: Path | None = None
    """A small file system with its ledger and its log."""


def disturb_engines(
    server: Server, timeline: Timeline, pace: Pace, rng: random.Random, stopping: threading.Event
) -> None:
    """Kill, crash, stop or pause one engine after the other."""
    while not stopping.wait(pace.pause(rng)):
        eventually(lambda: ready(server), "an engine is ready again", READY_S)
        kind = rng.choice(pace.kinds)
        for pid in server.engines()[:1]:
            with timeline.during(server, f"engine {kind}"):
                _disturb_engine(pid, kind, pace, rng)
    eventually(lambda: ready(server), "an engine is ready at the end", READY_S)


def _disturb_engine(pid: int, kind: str, pace: Pace, rng: random.Random) -> None:
    try:
        match kind:
            case "killed":
                os.kill(pid, signal.SIGKILL)
            case "crashed":
                os.kill(pid, signal.SIGSEGV)
            case "stopped":
                os.kill(pid, signal.SIGSTOP)
            case "paused":
                os.kill(pid, signal.SIGSTOP)
                time.sleep(rng.uniform(0.2, 3.0) * pace.scale)
                os.kill(pid, signal.SIGCONT)
            case _:
                with limited(pid, resource.RLIMIT_AS, address_space(pid)):
                    time.sleep(rng.uniform(0.5, 3.0) * pace.scale)
    except ProcessLookupError:
        pass  # it had died by itself: of its limits, say


def disturb_surroundings(
    around: Around, timeline: Timeline, pace: Pace, rng: random.Random, stopping: threading.Event
) -> None:
    """Take away memory, descriptors, the database and the disk, one after the other, and give them back."""
    pid = around.server.pid
    kinds: dict[str, Callable[[], AbstractContextManager[None]]] = {
        "memory lowered": lambda: limited(pid, resource.RLIMIT_AS, address_space(pid) + SPARE_BYTES),
        "descriptors lowered": lambda: limited(pid, resource.RLIMIT_NOFILE, num_files(pid) + SPARE_FILES),
    }
    if around.database is not None:
        kinds["database away"] = lambda: away(around.database)
    if around.disk is not None:
        kinds["disk full"] = lambda: full(around.disk)
    order: list[str] = []
    while not stopping.wait(pace.pause(rng)):
        order = order or rng.sample(sorted(kinds), len(kinds))
        kind = order.pop()
        with timeline.during(around.server, kind), kinds[kind]():
            stopping.wait(rng.uniform(1.5, 6.0) * pace.scale)


def ready(server: Server) -> bool:
    assert server.process.poll() is None, "the server has ended: " + server.log_text[-2000:]
    try:
        return server.is_ready()
    except OSError:
        return False  # no descriptors, say


def address_space(pid: int) -> int:
    """Return the bytes of a process's address space."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()


@contextmanager
def limited(pid: int, what: int, limit: int) -> Iterator[None]:
    """Lower a soft limit of a process, and of those that it starts meanwhile."""
    soft, hard = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, what, (soft, hard))


@contextmanager
def away(database: Postgres | None) -> Iterator[None]:
    assert database is not None
    database.stop()
    try:
        yield
    finally:
        database.start()


@contextmanager
def full(disk: Path | None) -> Iterator[None]:
    assert disk is not None
    ballast = disk / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 16))
            except OSError:
                pass
        yield
    finally:
        ballast.unlink()


@contextmanager
def small_disk(folder: Path, num_mib: int) -> Iterator[str | None]:
    """Mount a tmpfs on `folder`. Gives None, or why it is not there."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_mib}m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, check=False, capture_output=True, text=True)
        why = mounted.stderr.strip() if mounted.returncode else None
    except OSError as error:
        why = str(error)
    if why is not None:
        yield f"a tmpfs cannot be mounted: {why}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
