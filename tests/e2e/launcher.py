"""Start `quipu` by forking a process that has imported it: a start takes a tenth of a second instead of one and a half.

`launch` is the test's side: one launcher per test session is started with the first `quipu`, and ended with the
session. Run as a script, this file is the launcher: it handles one request at a time over a socket. Each child runs the
same entry point as the installed command, with the arguments, working directory, environment and streams that it was
given. The processes that a server starts are forked likewise (`spare_processes.py`). Tests of the installed command
(`test_command_line.py`, a wheel named by QUIPU_COMMAND) do not use the launcher.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any

if __name__ == "__main__":
    ended: list[int] = []
    atexit.register(lambda: leave_objects(ended))  # before all others, so that it is called after them
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
from tests.e2e.spare_processes import (
    MAX_DESCRIPTORS,
    ROOM,
    SPARES_OF_SERVER,
    SPARES_OF_SEVERAL,
    STARTS_ANEW,
    descriptors_of,
    keep_spares,
    load,
    load_transformers,
    request_of,
    run_command,
)
from tests.lazy_builders import lazy_builders

LAUNCHER = "tests/e2e/launcher.py"
MAX_REQUEST_BYTES = 1 << 17
START_ENGINES = ("serve", "bench latency", "bench throughput")


class Launched:
    """A process that was started by the launcher, with the interface of `subprocess.Popen`."""

    def __init__(self, launcher: Launcher, pid: int) -> None:
        self._launcher = launcher
        self._descriptor = os.pidfd_open(pid)
        self.pid = pid
        self.args: Sequence[str] = ()
        self.returncode: int | None = None
        self._ending = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code if the process has ended, negative for a signal; otherwise None."""
        return self._wait_ms(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait_ms(None if timeout is None else round(timeout * 1000))
        if code is None:
            raise subprocess.TimeoutExpired("quipu", timeout or 0.0)
        return code

    def _wait_ms(self, timeout_ms: int | None) -> int | None:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            if poll.poll(timeout_ms):
                with self._ending:  # one thread may wait while another one looks
                    if self.returncode is None:
                        self.returncode = self._launcher.reap(self.pid)
                        os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """The test's end of the socket."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", str(Path(__file__)), str(theirs.fileno()), ROOM]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._socket = ours
        self._one_at_a_time = threading.Lock()
        self._reaped: dict[int, int] = {}

    def launch(
        self,
        arguments: Sequence[str],
        folder: Path,
        stdout: int,
        stderr: int,
        environment: Mapping[str, str],
        own_session: bool,
        module: str,
    ) -> Launched:
        """Start `quipu ARGUMENTS` in `folder`, with these descriptors for its output, this environment and our CPUs.

        `module`: what is run instead, as by `python -m`.
        """
        request: dict[str, Any] = {"arguments": arguments, "folder": str(folder), "environment": dict(environment)}
        request |= {"own_session": own_session, "module": module}
        request["cpus"] = sorted(os.sched_getaffinity(0))
        return Launched(self, self._ask(request, [stdout, stderr]))

    def launch_engine(self, command: Sequence[str], **options: Any) -> Launched:
        """Start an engine, or a helper of a server, like `subprocess.Popen`; its parent is the launcher."""
        request = {"engine": request_of(command, options)}
        launched = Launched(self, self._ask(request, list(descriptors_of(options).values())))
        launched.args = command
        return launched

    def reap(self, pid: int) -> int:
        """Return the exit code of a child that has ended."""
        with self._one_at_a_time:
            if pid not in self._reaped:
                self._reaped[pid] = self._ask_alone({"reap": pid}, [])
            return self._reaped[pid]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> int:
        with self._one_at_a_time:
            return self._ask_alone(request, descriptors)

    def _ask_alone(self, request: dict[str, Any], descriptors: list[int]) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return int.from_bytes(self._socket.recv(8), "big", signed=True)


_launcher: Launcher | None = None
_starting = threading.Lock()


def _session_launcher() -> Launcher:
    global _launcher
    with _starting:
        if _launcher is None:
            _launcher = Launcher()
            atexit.register(_launcher.close)
        return _launcher


def launch_engine(command: Sequence[str], **options: Any) -> Launched:
    """Call `Launcher.launch_engine` of this session's launcher."""
    return _session_launcher().launch_engine(command, **options)


def launch(
    arguments: Sequence[str],
    folder: Path,
    stdout: int,
    stderr: int,
    *,
    environment: Mapping[str, str] = os.environ,
    own_session: bool = False,
    module: str = "",
) -> Launched:
    """Call `Launcher.launch` of this session's launcher."""
    return _session_launcher().launch(arguments, folder, stdout, stderr, environment, own_session, module)


def run_launcher(link: socket.socket) -> Callable[[], int]:
    """Handle requests until the other end is closed; in each child, return the function to run."""
    # what a server imports at start-up or when it opens its ledger; none of it starts a thread
    for module in ("alembic", "httpcore2", "quipu.web.cli.serve"):
        import_module(module)
    loaded = load()
    cpus = sorted(os.sched_getaffinity(0))  # by which torch has chosen its number of threads
    gc.collect()
    gc.freeze()  # a server looks through its objects when it has started: for only those that are its own
    from quipu.web.cli.cli import main

    while True:
        data, descriptors, _, _ = socket.recv_fds(link, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        if not data:
            os._exit(0)
        request = json.loads(data)
        if "transformers" in request.get("arguments", ()):
            load_transformers()
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = os.waitstatus_to_exitcode(status)
        elif not (answer := os.fork()):
            link.close()
            if "engine" in request:
                run_command(request["engine"], list(descriptors), loaded, lambda: None)
            for descriptor, stream in zip(descriptors, (1, 2), strict=True):
                os.dup2(descriptor, stream)
                os.close(descriptor)
            os.sched_setaffinity(0, request["cpus"])
            if request["own_session"]:
                os.setsid()
            os.chdir(request["folder"])
            os.environ.clear()
            os.environ.update(request["environment"])
            sys.argv = ["quipu", *request["arguments"]]
            module = request["module"]
            starts_engines = module or " ".join(request["arguments"]).startswith(START_ENGINES)
            if starts_engines and request["cpus"] == cpus and STARTS_ANEW not in os.environ:
                keep_spares(loaded, SPARES_OF_SEVERAL if "--engines" in request["arguments"] else SPARES_OF_SERVER)
                sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises
            return partial(run_main, module) if module else main
        for descriptor in descriptors:
            os.close(descriptor)
        link.send(answer.to_bytes(8, "big", signed=True))


def run_main(module: str) -> int:
    """Run a module as `python -m` does; return its exit code."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def leave_objects(codes: list[int]) -> None:
    """Exit without taking objects apart: most are shared with the launcher, and that takes longer than a command."""
    if codes:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    del sys.path[0]
    with lazy_builders():
        ended.append(run_launcher(socket.socket(fileno=int(sys.argv[1])))())
    sys.exit(ended[0])
