"""Starts one engine process on its own machine, and watches it.

`ray_driver.py` runs it as a Ray actor, in a Ray worker on the engine's node. It has the other end of the engine's
lifeline, so that the engine ends when the keeper's process does. The engine's messages do not pass through here.

What must always hold: an engine process never outlives its keeper by more than a second; the ticket that lets it be
connected, and what it shares with other engines, are in no file, log or list of processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import attrs
import msgspec

import quipu

from ...config.engine_config import EngineConfig
from ...shared.step_record import StepRecord
from ..machine_parts import available_memory, read_machine
from ..processes.child import OWN_GROUP, kill_group
from .checkpoint_finder import Wanted, default_cache, find_or_fetch
from .ray_messages import Ending, EngineOrder
from .shipping import PieceSource

THREADS = "OMP_NUM_THREADS"


class Keeper:
    """Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._record: StepRecord | None = None
        self._our_end: int | None = None

    def start(
        self, order: EngineOrder, num_sharing: int = 1, wanted: Wanted | None = None, source: PieceSource | None = None
    ) -> int:
        """Start the engine process, and return its id. Raises OSError, and CheckpointError if it is not on this node.

        `num_sharing`: engines of this server that share the node's CPUs and memory. `wanted` is the checkpoint to find
        here, or to fetch from `source`; without it, the configuration's path is taken.
        """
        config = share_node(msgspec.json.decode(order.config, type=EngineConfig), num_sharing)
        if wanted is not None:
            folder = find_or_fetch(wanted, source, default_cache(), partial(print, file=sys.stderr, flush=True))
            config = attrs.evolve(config, model_path=str(folder))
        with ExitStack() as failing, ExitStack() as inherited:
            lifeline, our_end = os.pipe()
            inherited.callback(os.close, lifeline)
            failing.callback(os.close, our_end)
            os.write(our_end, order.ticket + order.peer_secret)
            memory = StepRecord.open_memory(order.max_num_seqs)
            inherited.callback(os.close, memory)
            record = StepRecord(memory)
            failing.callback(record.close)
            numbers = map(str, (lifeline, -1, memory, order.incarnation, order.beat_s))
            command = [sys.executable, "-P", "-m", order.module, *numbers, order.address]
            process = subprocess.Popen(  # noqa: S603 -- our own program; its arguments are from our web process
                [*command, msgspec.json.encode(config).decode()],
                pass_fds=(lifeline, memory),
                env=environment_of(order, os.environ, num_sharing),
                stdin=subprocess.DEVNULL,
                process_group=OWN_GROUP,
            )
            failing.pop_all()
        self._process, self._record, self._our_end = process, record, our_end
        return process.pid

    def wait(self) -> Ending:
        """Wait until the process has ended, and return how."""
        assert self._process is not None and self._record is not None
        returncode = self._process.wait()
        self.end()
        return Ending(returncode, self._record.read())

    def end(self) -> None:
        """Tell the process to end, by closing its lifeline."""
        with self._changing:
            our_end, self._our_end = self._our_end, None
        if our_end is not None:
            os.close(our_end)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            kill_group(self._process.pid)


def share_node(config: EngineConfig, num_sharing: int) -> EngineConfig:
    """Return the configuration of one of several engines on this node."""
    free = available_memory() if num_sharing > 1 else None
    memory_share = None if free is None else free // num_sharing
    return attrs.evolve(config, num_sharing=num_sharing, memory_share=memory_share)


def environment_of(order: EngineOrder, own: Mapping[str, str], num_sharing: int) -> dict[str, str]:
    """Return an engine's environment: this process's, with as many threads as the engine may use."""
    environment = {**own, **order.environment}
    if THREADS not in order.environment:
        environment[THREADS] = str(max(1, read_machine(own).num_usable_cpus // num_sharing))
    # where this process has found quipu, the engine finds it too
    root = str(Path(quipu.__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (root, own.get("PYTHONPATH", "")) if part)
    return environment
