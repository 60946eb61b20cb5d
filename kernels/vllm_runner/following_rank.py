"""A rank that follows rank 0: loads with it, runs its passes, copies its blocks.

`rank_process.py` runs it in a process of its own. Messages are in `rank_messages.py`.

What must always hold: a pass is run exactly as rank 0 runs it, in the same order of rows, which is compared; whatever
raises here ends the process.
"""

from __future__ import annotations

import mmap
import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..backend import BackendConfig
from ..step_errors import RunnerDiverged
from .followed_samplers import FollowedDeviceSampler, FollowedSampler
from .rank_loading import RankLoader
from .rank_messages import (
    BlocksCopied,
    ComputeHead,
    CopyBlocks,
    KVPlan,
    NewArena,
    PassAbandoned,
    Profile,
    RankPlace,
    Ready,
    RowsDrawn,
    RunPass,
)
from .scheduler_message import Messages


class _Abandoned(Exception):
    """Rank 0 has drawn nothing in the pass that is running."""


class FollowingRank:
    """One follower."""

    def __init__(self, config: BackendConfig, place: RankPlace, passes: Connection) -> None:
        self._loader = RankLoader(config, place)
        self._messages = Messages(config.max_model_len)
        self._passes = passes
        self.size = place.size
        self._told: RunPass | None = None
        self._hidden_states_ND = torch.empty(0, 0)
        self._arenas: list[mmap.mmap] = []

    def load(self) -> None:
        """Load with the other ranks, as rank 0 says."""
        self._passes.send(self._loader.load())
        while not isinstance(message := self._passes.recv(), KVPlan):
            if not isinstance(message, Profile):
                raise RunnerDiverged(f"rank 0 says {message} instead of how to allocate the cache")
            self._passes.send(self._loader.profile())
        self._loader.allocate(message)
        kind = FollowedDeviceSampler if self._loader.is_v2 else FollowedSampler
        self._loader.runner.sampler = kind(self)
        self._passes.send(Ready())

    @torch.inference_mode()
    def serve(self) -> None:
        """Run passes until rank 0 is gone. Raises EOFError then."""
        runner = self._loader.runner
        while True:
            message = self._passes.recv()
            if isinstance(message, RunPass):
                self._run(message)
            elif isinstance(message, ComputeHead):
                runner.model.compute_logits(self._hidden_states_ND[message.places])
            elif not isinstance(message, PassAbandoned):
                raise RunnerDiverged(f"rank 0 says {message} where a pass begins")

    def move_blocks(self, moves: Connection) -> None:
        """Copy blocks until rank 0 is gone; in a thread of its own."""
        while True:
            try:
                message = moves.recv()
                if isinstance(message, NewArena):
                    self._arenas.append(_receive_arena(moves, message.num_bytes))
                    continue
                moves.send(self._copy(message))
            except (EOFError, OSError):
                os._exit(0)

    def drawn(self, order: list[int]) -> RowsDrawn:
        """Wait for what rank 0 draws in this pass."""
        message = self._passes.recv()
        if isinstance(message, PassAbandoned):
            raise _Abandoned
        if not isinstance(message, RowsDrawn) or message.order != order:
            raise RunnerDiverged(f"rank 0 says {message} where this rank has rows {order}")
        return message

    @property
    def told(self) -> RunPass:
        """The pass that is running."""
        if self._told is None:
            raise RunnerDiverged("vLLM's runner samples outside of a pass")
        return self._told

    @property
    def runner(self) -> Any:
        return self._loader.runner

    def _run(self, told: RunPass) -> None:
        executor, runner = self._loader.executor, self._loader.runner
        self._told = told
        self._loader.blocks.prepare(told.copies, told.step.fresh_blocks)
        try:
            if executor.execute_model(self._messages.step(told.step)) is not None:
                raise RunnerDiverged("vLLM's runner has answered a pass without running it")
            self._hidden_states_ND = runner.execute_model_state.hidden_states
            sampled = executor.sample_tokens(None, non_block=True)
            if sampled.done():
                sampled.result()  # raises what sampling has raised
        except _Abandoned:
            runner.execute_model_state = None  # else it would wait for the rest of this pass

    def _copy(self, asked: CopyBlocks) -> BlocksCopied:
        blocks = self._loader.blocks
        num_bytes = len(asked.blocks) * blocks.num_bytes
        with memoryview(self._arenas[asked.arena])[asked.start : asked.start + num_bytes] as memory:
            try:
                (blocks.read if asked.is_read else blocks.write)(asked.blocks, memory)
            except (ValueError, RuntimeError, MemoryError) as error:
                return BlocksCopied(f"{type(error).__name__}: {error}")
        return BlocksCopied()


def _receive_arena(moves: Connection, num_bytes: int) -> mmap.mmap:
    with socket.socket(fileno=os.dup(moves.fileno())) as by:
        _, (descriptor,), _, _ = socket.recv_fds(by, 1, 1)
    try:
        return mmap.mmap(descriptor, num_bytes)
    finally:
        os.close(descriptor)
