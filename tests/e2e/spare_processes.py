"""Processes that the launcher's servers use instead of starting an interpreter: forks of it have loaded what they need.

Loading torch and the engine takes two seconds of processor time, and what renders chats, encodes and follows grammars
half a second in five processes; hundreds of tests start servers. So the launcher loads all of it; before a server runs,
its process forks a few spares, which wait, and so does an engine. When the server starts a process, a spare gets the
command, environment, limits and descriptors that it would have been started with, and runs the same entry point as the
same child of the same parent, under the same command line. Without a spare left (each serves one start), if torch would
have to be loaded in another environment (but for its number of threads, which is then set), for an engine of vLLM's, or
for a server that has `STARTS_ANEW` in its environment, a process is started as usual.

The server's process cannot import torch, which it must not: it would notice only that it takes long.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import Any, NoReturn

MODULE = "quipu.actors.fleet.processes.engine_process"
ENGINES = (MODULE, "bench.timed_engine")
"""Programs of engines; the second one is a benchmark's."""
HELPERS = (
    "quipu.actors.engine.executor.mask_program",
    "quipu.actors.text_workers.chat_worker",
    "quipu.actors.text_workers.encode_worker",
    "quipu.actors.text_workers.grammar_worker",
    "quipu.actors.text_workers.image_worker",
    "quipu.web.api.admin.report_worker",
)
"""Programs that engines and servers start next to themselves."""
LOADED = ("torch", "quipu.actors.engine.engine_server", "quipu.kernels.cpu.cpu_backend", MODULE, *HELPERS, "tokenizers")
"""What they import; none of it starts a thread."""
SPARES_OF_SERVER = 7
"""Two processes that render, one that encodes, one that checks grammars and one that makes reports or opens images; an
engine, and the one that replaces it."""
SPARES_OF_SEVERAL = 9
"""Likewise for two engines."""
SPARES_OF_ENGINE = 1
"""The process that follows grammars."""
ROOM = "-" * 16384
"""An argument of the launcher: where the command lines of processes are written."""
READ_AT_LOAD = ("GOMP_", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "TORCH", "PYTORCH", "ATEN_", "LD_", "MALLOC_", "PYTHON")
"""Variables with these prefixes are read when an interpreter starts or torch is loaded."""
THREADS = "OMP_NUM_THREADS"
STARTS_ANEW = "QUIPU_TEST_STARTS_ANEW"
"""Set for servers whose processes' environment is read from /proc."""
ENGINE_COMMAND = [sys.executable, "-P", "-m"]
HELPER_COMMAND = [sys.executable, "-P", "-c"]
HELPER_ENDS = tuple(f"from {module} import main; main()" for module in HELPERS)
"""What the code of their commands ends with."""
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
MAX_REQUEST_BYTES = 1 << 17
MAX_DESCRIPTORS = 8


def load() -> dict[str, str]:
    """Load what the processes need; return the variables that it has read."""
    for module in LOADED:
        import_module(module)
    return _read_at_load(os.environ)


@cache
def load_transformers() -> None:
    """Load what engines with that executor need, two seconds of processor time for each; none of it starts a thread."""
    import_module("quipu.kernels.transformers_runner.transformers_settings").settle_environment()
    library = import_module("transformers")
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoModelForImageTextToText"):
        getattr(library, name)
    gc.collect()
    gc.freeze()


def keep_spares(environment: dict[str, str], number: int) -> None:
    """Fork spares, and use them for processes that this one starts, which has no threads yet.

    `environment` is what `load` has returned.
    """
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(number):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := os.fork()):
            ours.close()
            for _, link in spares:
                link.close()
            _serve(theirs, environment)
        theirs.close()
        spares.append((pid, ours))

    class Popen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            spare = None
            if _can_fork(args, options, environment):
                with suppress(IndexError):
                    spare = spares.pop()
            if spare is None:
                super().__init__(args, *more, **options)
                return
            self.args, self.returncode = args, None
            self.stdin = self.stdout = self.stderr = None
            self._child_created, self._waitpid_lock = True, threading.Lock()
            self.pid, link = spare
            with link:
                _hand_over(link, args, options)

    subprocess.Popen = Popen


def _read_at_load(environment: Any) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_AT_LOAD)}


def is_of_a_server(args: Sequence[str]) -> bool:
    """Return whether a command is a helper's, or that of an engine which needs nothing of its own."""
    if args[: len(HELPER_COMMAND)] == HELPER_COMMAND:
        return args[-1].endswith(HELPER_ENDS)
    if args[: len(ENGINE_COMMAND)] != ENGINE_COMMAND or args[len(ENGINE_COMMAND)] not in ENGINES:
        return False
    # vLLM looks at what every module holds, which raises for those of a web server
    return bool(json.loads(args[-1])["executor"] != "vllm")


def _can_fork(args: Sequence[str], options: dict[str, Any], loaded: dict[str, str]) -> bool:
    """Return whether a spare can run a command: a helper's; an engine's if torch is as it would be there, or unused."""
    if len("\0".join(map(str, args))) >= len(ROOM):
        return False
    if not is_of_a_server(args):
        return False
    if args[: len(HELPER_COMMAND)] == HELPER_COMMAND or json.loads(args[-1])["executor"] == "fake":
        return True
    needed = _read_at_load(options["env"])
    return needed | {THREADS: ""} == loaded | {THREADS: ""} and (THREADS in needed or THREADS not in loaded)


def _hand_over(link: socket.socket, args: Sequence[str], options: dict[str, Any]) -> None:
    descriptors = descriptors_of(options)
    socket.send_fds(link, [json.dumps(request_of(args, options)).encode()], list(descriptors.values()))
    link.recv(1)  # it has taken copies of the descriptors, which the caller may now close


def descriptors_of(options: dict[str, Any]) -> dict[int, int]:
    """Return which descriptor of ours a process has at which number, apart from its output, as `subprocess.Popen`."""
    stdin = options["stdin"]
    own = {} if stdin == subprocess.DEVNULL else {0: stdin if isinstance(stdin, int) else stdin.fileno()}
    return own | {descriptor: descriptor for descriptor in options.get("pass_fds", ())}


def request_of(args: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Return what `run_command` needs to run a command as `subprocess.Popen` would."""
    stdout = options.get("stdout")
    assert stdout in (None, subprocess.DEVNULL) and options.get("stderr") is None
    assert options.keys() <= {"pass_fds", "env", "stdin", "stdout", "stderr", "process_group"}, options.keys()
    return {
        "arguments": list(args),
        "environment": dict(os.environ if options.get("env") is None else options["env"]),
        "descriptors": list(descriptors_of(options)),
        "empty": [number for number, where in enumerate((options["stdin"], stdout)) if where == subprocess.DEVNULL],
        "group": options["process_group"],
        "limits": [resource.getrlimit(limit) for limit in LIMITS],
    }


def _serve(link: socket.socket, loaded: dict[str, str]) -> NoReturn:
    """Wait for a command, and run it in this process; end with the server."""
    data, received, _, _ = socket.recv_fds(link, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
    if not data:
        os._exit(0)
    run_command(json.loads(data), received, loaded, lambda: link.send(b"x"))


def run_command(
    request: dict[str, Any], received: list[int], loaded: dict[str, str], confirm: Callable[[], object]
) -> NoReturn:
    """Run an engine's or a helper's command in this process. `received`: copies of the descriptors that it inherits."""
    if request["group"] is not None:
        os.setpgid(0, request["group"])
    confirm()
    empty = [os.open(os.devnull, os.O_RDWR) for _ in request["empty"]]
    _place([*empty, *received], [*request["empty"], *request["descriptors"]])
    for limit, values in zip(LIMITS, request["limits"], strict=True):
        resource.setrlimit(limit, values)
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = request["arguments"]
    _be_called(arguments)
    if arguments[: len(HELPER_COMMAND)] == HELPER_COMMAND:
        _limit_growth()
        sys.argv = ["-c"]
        exec(arguments[-1], {"__name__": "__main__"})
    else:
        keep_spares(loaded, SPARES_OF_ENGINE)
        if os.environ.get(THREADS) != loaded.get(THREADS):
            import_module("torch").set_num_threads(int(os.environ[THREADS]))
        sys.argv = arguments[len(ENGINE_COMMAND) :]
        if sys.argv[0] == MODULE:
            import_module(MODULE).main(sys.argv[1:])
        else:
            sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
            run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    os._exit(0)


def _limit_growth() -> None:
    """Add what is mapped now to limits of the address space: a new interpreter has not mapped torch."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    setrlimit = resource.setrlimit

    def set_more(limit: int, values: tuple[int, int]) -> None:
        if limit == resource.RLIMIT_AS:
            _, most = resource.getrlimit(limit)
            soft, hard = (value + mapped for value in values)
            values = (soft, hard) if most == resource.RLIM_INFINITY else (min(soft, most), min(hard, most))
        setrlimit(limit, values)

    resource.setrlimit = set_more


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
