"""Engine processes that the launcher's servers use instead of starting an interpreter: a fork of it has loaded torch.

Loading torch and the engine takes two seconds of processor time, and hundreds of tests start engines. So the launcher
loads both; before a server runs, its process forks a few spares, which wait. When the server starts an engine, a spare
gets the command, environment, limits and descriptors that the process would have been started with, and runs the same
entry point as the same child of the same parent, under the same command line. Without a spare left (each serves one
start), or if torch would have to be loaded in another environment, a process is started as usual.

The server's process cannot import torch, which it must not: it would notice only that it takes long.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

MODULE = "quipu.actors.fleet.processes.engine_process"
LOADED = ("torch", "quipu.actors.engine.engine_server", "quipu.kernels.cpu.cpu_backend", MODULE)
"""What an engine imports; none of it starts a thread."""
NUM_SPARES = 2
ROOM = "-" * 16384
"""An argument of the launcher: where the command lines of engines are written."""
READ_AT_LOAD = ("GOMP_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH", "ATEN_", "LD_", "MALLOC_", "PYTHON")
"""Variables with these prefixes are read when an interpreter starts or torch is loaded."""
COMMAND = [sys.executable, "-P", "-m", MODULE]
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
MAX_REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 8


def load() -> dict[str, str]:
    """Load what engines need; return the variables that it has read."""
    for module in LOADED:
        import_module(module)
    return _read_at_load(os.environ)


def keep_spares(environment: dict[str, str]) -> None:
    """Fork spares, and use them for engines that this process starts, which has no threads yet.

    `environment` is what `load` has returned.
    """
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(NUM_SPARES):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := os.fork()):
            ours.close()
            for _, link in spares:
                link.close()
            _serve(theirs)
        theirs.close()
        spares.append((pid, ours))
    sys.modules["torch"] = None  # type: ignore[assignment]  # importing it raises

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            if spares and _can_fork(args, options, environment):
                self.args, self.returncode = args, None
                self.stdin = self.stdout = self.stderr = None
                self._child_created, self._waitpid_lock = True, threading.Lock()
                self.pid, link = spares.pop()
                with link:
                    _hand_over(link, args, options)
            else:
                super().__init__(args, *more, **options)

    subprocess.Popen = Popen


def _read_at_load(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_LOAD)}


def _can_fork(args: Sequence[str], options: dict[str, Any], loaded: dict[str, str]) -> bool:
    """Return whether a command is an engine's, and torch as it would be there; the fake executor does without it."""
    if args[: len(COMMAND)] != COMMAND or len("\0".join(args)) >= len(ROOM):
        return False
    return json.loads(args[-1])["executor"] == "fake" or _read_at_load(options["env"]) == loaded


def _hand_over(link: socket.socket, args: Sequence[str], options: dict[str, Any]) -> None:
    socket.send_fds(link, [json.dumps(request_of(args, options)).encode()], options["pass_fds"])
    link.recv(1)  # it has taken copies of the descriptors, which the caller may now close


def request_of(args: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return what `run_engine` needs to run a command as `subprocess.Popen` would."""
    assert options["stdin"] == subprocess.DEVNULL and options.get("stdout") is options.get("stderr") is None
    assert options.keys() <= {"pass_fds", "env", "stdin", "stdout", "stderr", "process_group"}, options.keys()
    return {
        "arguments": list(args),
        "environment": options["env"],
        "descriptors": options["pass_fds"],
        "group": options["process_group"],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
    }


def _serve(link: socket.socket) -> NoReturn:
    """Wait for a command, and run it in this process; end with the server."""
    data, received, _, _ = socket.recv_fds(link, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    run_engine(json.loads(data), received, lambda: link.send(b"x"))


def run_engine(request: dict[str, Any], received: list[int], confirm: Callable[[], object]) -> NoReturn:
    """Run an engine's command in this process. `received`: copies of the descriptors that it inherits."""
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    confirm()
    _place([os.open(os.devnull, os.O_RDONLY), *received], [0, *request["descriptors"]])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)
    os.environ.clear()
    os.environ.update(request["environment"])
    _be_called(request["arguments"])
    sys.argv = request["arguments"][len(COMMAND) - 1 :]
    import_module(MODULE).main(sys.argv[1:])
    os._exit(0)


def _place(descriptors: list[int], wanted: list[int]) -> None:
    """Give open files the descriptors that they are wanted at, and close all others."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(wanted) + 1) for descriptor in descriptors]
    for descriptor, place in zip(above, wanted, strict=True):
        os.dup2(descriptor, place, inheritable=True)
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in {1, 2, *wanted}:
            with suppress(OSError):  # the folder's own
                os.close(int(path.name))


def _be_called(arguments: Sequence[str]) -> None:
    """Write a command line over that of the launcher, so that /proc has it."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(argument.encode() + b"\0" for argument in arguments)
    assert len(line) < end - start, len(line)
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)
