"""Hosts an engine in a process of its own on this machine, over a stream socket pair at first.

Run by the supervisor, see `connected_host.py`. The process finds the way back by itself (`reconnection.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import msgspec
import trio

from ...config.engine_config import EngineConfig
from ...config.runtime_config import RuntimeConfig
from ...shared.step_record import StepRecord
from ...threads import open_process, run_in_thread
from ..engine_shares import SPIN_COUNT, EngineShares
from ..machine_parts import available_memory, read_machine
from ..supervisor import Death
from .child import OWN_GROUP, kill_group
from .connected_host import ConnectedHost
from .engine_child import EngineChild
from .reconnection import Listener

_LENGTH_BYTES = 8
ENGINE_MODULE = "quipu.actors.fleet.processes.engine_process"


@attrs.define(eq=False)
class LocalProcess:
    """An engine process on this machine. Implements `engine_child.EngineProcess`."""

    _process: trio.Process
    _record: StepRecord
    _checkpoint: Path

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def wait(self) -> None:
        await self._process.wait()

    def kill(self) -> None:
        kill_group(self._process.pid)

    def step_ids(self) -> tuple[int, ...] | None:
        return self._record.read()

    async def explain(self) -> Death:
        if self._process.returncode == -signal.SIGBUS:
            return await run_in_thread(_explain_bus_error, self._checkpoint)
        return explain(self._process.returncode)

    def release(self) -> None:
        self._record.close()


class ProcessHost(ConnectedHost):
    """Runs the engine in its own process."""

    MODULE = ENGINE_MODULE
    """Module that the process runs. A benchmark replaces it by one that measures it."""

    def __init__(self, config: EngineConfig, environment: dict[str, str], **options: Any) -> None:
        """`environment` is the process's. For `options` see `ConnectedHost`."""
        super().__init__(**options)
        self._config = config
        self._environment = environment

    async def _start_child(self, incarnation: int) -> tuple[EngineChild, trio.SocketStream]:
        with ExitStack() as opened:
            memory = StepRecord.open_memory(self._config.max_num_seqs)
            with ExitStack() as inherited:
                inherited.callback(os.close, memory)
                record = StepRecord(memory)
                opened.callback(record.close)
                listener = Listener()
                opened.callback(listener.close)
                inherited.callback(listener.close_lifeline_of_child)
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                opened.callback(ours.close)
                inherited.callback(theirs.close)
                process = await self._start(theirs.fileno(), memory, incarnation, listener)
            opened.pop_all()
        ours.setblocking(False)
        stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        return EngineChild(LocalProcess(process, record, Path(self._config.model_path)), listener, stream), stream

    async def _start(self, descriptor: int, memory: int, incarnation: int, listener: Listener) -> trio.Process:
        lifeline, address = listener.lifeline, listener.address
        config = msgspec.json.encode(self._config).decode()
        numbers = map(str, (lifeline, descriptor, memory, incarnation, self._beat_s))
        return await open_process(
            [sys.executable, "-P", "-m", self.MODULE, *numbers, address, config],
            pass_fds=(lifeline, descriptor, memory),
            env=self._environment,
            stdin=subprocess.DEVNULL,
            process_group=OWN_GROUP,
        )


def local_hosts(config: RuntimeConfig) -> tuple[Callable[[int], ProcessHost], Callable[[int], object]]:
    """Return what makes hosts on this machine, and what to call when an engine is removed. Raises CheckpointError."""
    environment = dict(os.environ)
    environment.setdefault(*SPIN_COUNT)
    shares = EngineShares(config, read_machine(environment), environment, available_memory)

    def make_host(engine_id: int) -> ProcessHost:
        share = shares.take(engine_id)
        return ProcessHost(share.config, share.environment, step_timeout_s=config.step_timeout_s)

    return make_host, shares.release


def explain(returncode: int | None) -> Death:
    """Return why an engine process has ended, by its exit code or the signal that ended it."""
    if returncode is not None and returncode < 0:
        return Death(f"killed by {signal.Signals(-returncode).name}")
    if returncode == os.EX_TEMPFAIL:
        return Death("there was not enough memory, or not enough file descriptors, to load it", is_shortage=True)
    return Death(f"its process ended with exit code {returncode}")


def _explain_bus_error(checkpoint: Path) -> Death:
    """Return why reading mapped memory failed. Final if it would fail again."""
    if (cut_off := find_cut_off(checkpoint)) is not None:
        return Death(f"killed by SIGBUS: a checkpoint file changed while it was in use: {cut_off}", is_final=True)
    causes = "a file changed while it was in use, or the disk or /dev/shm is full or broken"
    return Death(f"killed by SIGBUS: mapped memory could not be read ({causes})")


def find_cut_off(folder: Path) -> str | None:
    """Return which safetensors file of a checkpoint is shorter than its header says, in words; None if none is.

    A file that is cut off while it is mapped kills with SIGBUS whoever reads the missing part. Does without torch,
    which the web process does not load.
    """
    for path in sorted(folder.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                header = json.loads(file.read(min(length, size)))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            expected = _LENGTH_BYTES + length + max(ends, default=0)
        except OSError as error:
            return f"{path.name} cannot be read: {error.strerror or error}"
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return f"{path.name} has no valid header any more"
        if size < expected:
            return f"{path.name} is cut off: it has {size} bytes, and its header says {expected}"
    return None
