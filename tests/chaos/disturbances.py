"""What disturbs the servers of a chaotic run: one thread for their engines, one for everything around them.

An engine is disturbed only when the one before it is ready, or, of several, when one is; the two threads overlap.
`Timeline` remembers when what was disturbed, because some disturbances allow a server to refuse requests.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import httpx

from tests.e2e.servers import Server, num_files
from tests.postgres import Postgres
from tests.processes import eventually
from tests.tiny import EXECUTOR

READY_S = 240.0 if EXECUTOR == "vllm" else 90.0
"""How long a server may take to be ready after a disturbance: a hung engine is found after 8 seconds, and vLLM is
imported in ten on an idle machine."""
ROLES = ("prefill", "decode", "mixed")
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
class Engines:
    """The engines of a server."""

    server: Server
    number: int
    """How many there are while none is being replaced."""
    starting: threading.Lock
    """Held while an engine is added: one that cannot start the first time, for lack of memory, is not tried again."""


@attrs.frozen
class Around:
    """The surroundings of a server that can be disturbed."""

    server: Server
    starting: threading.Lock
    """Held while resources are taken away that the first start of an engine needs."""
    database: Postgres | None = None
    disk: Path | None = None
    """A small file system with its ledger and its log."""


def disturb_engines(
    engines: Engines, timeline: Timeline, pace: Pace, rng: random.Random, stopping: threading.Event
) -> None:
    """Kill, crash, stop, pause or replace engines one after the other, a random one each time."""
    server = engines.server
    while not stopping.wait(pace.pause(rng)):
        eventually(lambda: ready(server), "an engine is ready again", READY_S)
        kind = rng.choice(pace.kinds)
        if kind == "replaced":
            _replace_engine(engines, timeline, rng)
        elif pids := server.engines():
            with timeline.during(server, f"engine {kind}"):
                _disturb_engine(rng.choice(sorted(pids)), kind, pace, rng)
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
        pass  # it had died by itself, for example because of its limits


def _replace_engine(engines: Engines, timeline: Timeline, rng: random.Random) -> None:
    """Drain an engine or remove it, if another is ready, and start one in its place.

    Or move some of its requests to others, or give it another role.
    """
    server = engines.server
    roles = {its["id"]: its["role"] for its in _listed(server) if its["state"] == "ready"}
    if len(roles) < 2:
        return
    engine_id = rng.choice(list(roles))
    if set(roles.values()) != {"mixed"} and rng.random() < 0.3:
        with timeline.during(server, "engine in another role"):
            for role in (rng.choice(ROLES), roles[engine_id]):
                _answer(server, "PATCH", f"/{engine_id}", {"role": role})
                time.sleep(rng.uniform(0.2, 2.0))
        return
    if rng.random() < 0.3:
        with timeline.during(server, "requests moved"):
            found = _answer(server, "POST", f"/{engine_id}/move", {"count": rng.randrange(1, 9)})
            assert found is None or found.status_code in (202, 404, 409), found.text
        return
    manner = rng.choice(("drained: finish", "drained: hand over", "drained: move", "removed"))
    with engines.starting, timeline.during(server, f"engine {manner}"):
        match manner:
            case "drained: finish":
                body = {"mode": "finish", "timeout_s": rng.choice((0.2, 30.0))}
                answer = _until_answered(server, "POST", f"/{engine_id}/drain", body)
            case "drained: move":
                answer = _until_answered(server, "POST", f"/{engine_id}/drain", {"mode": "move"})
            case "drained: hand over":
                answer = _until_answered(server, "POST", f"/{engine_id}/drain", {"mode": "hand_over"})
            case _:
                answer = _until_answered(server, "DELETE", f"/{engine_id}")
        if answer.status_code == 409:
            return  # no other would have been left
        assert answer.status_code in (202, 404), answer.text
        # the answer may be lost although one was added
        while _num_besides(server, engine_id) < engines.number:
            _answer(server, "POST", "", {"count": 1, "role": roles[engine_id]})
        eventually(lambda: not any(its["state"] == "starting" for its in _listed(server)), "it has started", READY_S)


def _num_besides(server: Server, engine_id: int) -> int:
    """Return the number of engines that are not about to end, without the one that was told to."""
    return sum(its["state"] != "draining" and its["id"] != engine_id for its in _listed(server))


def _listed(server: Server) -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = _until_answered(server, "GET", "").json()["engines"]
    return engines


def _answer(server: Server, method: str, path: str, body: Any = None) -> httpx.Response | None:
    """Send a request to /v1/admin/engines. Returns None if the server cannot answer now."""
    try:
        found = httpx.request(method, f"{server.url}/v1/admin/engines{path}", json=body, timeout=READY_S)
    except httpx.HTTPError:
        return None
    return None if found.status_code == 503 else found


def _until_answered(server: Server, method: str, path: str, body: Any = None) -> httpx.Response:
    found = eventually(lambda: _answer(server, method, path, body), "the server answers", READY_S)
    assert found is not None
    return found


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
        needed = around.starting if kind in ("memory lowered", "descriptors lowered") else nullcontext()
        with needed, timeline.during(around.server, kind), kinds[kind]():
            stopping.wait(rng.uniform(1.5, 6.0) * pace.scale)


def ready(server: Server) -> bool:
    assert server.process.poll() is None, "the server has ended: " + server.log_text[-2000:]
    try:
        return server.is_ready()
    except OSError:
        return False  # for example because it has no descriptors left


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
    """Mount a tmpfs on `folder`. Yields None, or why that was not possible."""
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
