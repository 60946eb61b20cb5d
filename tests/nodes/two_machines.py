"""Two network namespaces with a cable between them, as two machines on which a Ray cluster runs.

Needs root and `ip` (iproute2). Processes and files are shared, so a test sees those of both machines.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from tests.processes import eventually, has_ended

ADDRESSES = ("10.77.0.1", "10.77.0.2")
GCS_PORT = 6379
MARK = "QUIPU_TWO_MACHINES"
"""In the environment of all processes of a run, so that none is left behind."""


@attrs.frozen
class Machine:
    """One of the two: a namespace, its end of the cable, and its address."""

    namespace: str
    cable: str
    address: str
    folder: Path

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on this machine, and return what it prints."""
        done = subprocess.run(
            ["ip", "netns", "exec", self.namespace, *command], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 or not check, f"{command}: {done.stdout[-1000:]}{done.stderr[-1000:]}"
        return done.stdout

    @property
    def cache(self) -> Path:
        """The folder that keeps what was shipped to this machine."""
        return self.folder.with_name(self.folder.name + "-cache")

    def start_ray(self, *flags: str, hides: Path | None = None) -> None:
        """Start Ray's processes on this machine, with one CPU for engines. They see an empty folder at `hides`."""
        ray = str(Path(sys.executable).with_name("ray"))
        # `ip netns exec` has made a mount namespace, which these processes keep
        hiding = () if hides is None else ("sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(hides))
        self.run(
            *hiding,
            *("env", f"XDG_CACHE_HOME={self.cache}"),
            *(ray, "start", "--node-ip-address", self.address, "--num-cpus", "1", "--temp-dir", str(self.folder)),
            *("--object-store-memory", str(200 << 20), "--disable-usage-stats", *flags),
        )


def why_not() -> str | None:
    """Return why two machines cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "it needs root, to make network namespaces"
    if shutil.which("ip") is None:
        return "it needs `ip`, from iproute2"
    probe = f"quipu-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Connect two machines, and remove them with all their processes when the block is left."""
    mark = f"{os.getpid()}"
    os.environ[MARK] = mark
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # nothing else can reach the two
    folder = Path(tempfile.mkdtemp(prefix="qn-", dir="/tmp"))
    machines = tuple(
        Machine(f"quipu-{name}-{mark}", f"q{name}{mark}"[:15], address, folder / name)
        for name, address in zip("ab", ADDRESSES, strict=True)
    )
    one, other = machines
    try:
        for machine in machines:
            _ip("netns", "add", machine.namespace)
        _ip(*("link", "add", one.cable, "netns", one.namespace, "type", "veth"), *("peer", "name", other.cable))
        _ip("link", "set", other.cable, "netns", other.namespace)
        for machine in machines:
            _ip("-n", machine.namespace, "addr", "add", f"{machine.address}/24", "dev", machine.cable)
            for name in ("lo", machine.cable):
                _ip("-n", machine.namespace, "link", "set", name, "up")
        yield one, other
    finally:
        _end_processes(mark)
        for machine in machines:
            subprocess.run(["ip", "netns", "del", machine.namespace], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def cut(machine: Machine) -> Iterator[None]:
    """Unplug the cable while the block runs: nothing arrives, and neither end is notified."""
    _ip("-n", machine.namespace, "link", "set", machine.cable, "down")
    try:
        yield
    finally:
        _ip("-n", machine.namespace, "link", "set", machine.cable, "up")


def processes_on(machine: Machine, word: str) -> list[int]:
    """Return the processes on a machine whose command line has a word."""
    found = []
    for pid in map(int, machine_pids(machine)):
        with suppress(OSError):
            if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and not has_ended(pid):
                found.append(pid)
    return found


def machine_pids(machine: Machine) -> list[str]:
    done = subprocess.run(["ip", "netns", "pids", machine.namespace], capture_output=True, text=True, check=True)
    return done.stdout.split()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"


def _end_processes(mark: str) -> None:
    def left() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if f"{MARK}={mark}\0".encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return [pid for pid in found if not has_ended(pid)]

    def kill() -> bool:
        for pid in left():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not left()

    eventually(kill, "all processes have ended")
