"""One loaded vLLM backend for all engines of a test process: each is lent slots and blocks of its own in it.

Loading takes seconds, vLLM's process groups are those of one model, and a test may have several engines at once. The
weights are those of `TINY` in float32, so that results are comparable however they were computed.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np

from quipu.kernels.backend import BackendConfig, Capabilities, MemoryPlan, RunsAtOnce
from quipu.kernels.batch import Drawn, StepBatch
from quipu.kernels.vllm_runner.vllm_backend import VllmBackend
from quipu.kernels.vllm_runner.vllm_settings import engine_arguments
from tests.kernels.kernel_checkpoints import backend_config
from tests.tiny import BLOCK, TINY

LARGEST: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "num_blocks": 4096,
    "max_num_seqs": 320,
    "max_model_len": 16384,
    "max_num_batched_tokens": 4096,
    "enforce_eager": True,
}
"""What the engines of a process have together."""


@attrs.frozen
class Loan:
    blocks: list[int]
    slots: list[int]
    give_back: Callable[[], object]


class SharedVllm:
    """The backend, and what of it is lent."""

    def __init__(self) -> None:
        with warnings.catch_warnings(action="ignore"):
            self.backend = VllmBackend(backend_config(TINY, **LARGEST))
        self.lock = threading.Lock()
        """Held during a pass: engines run theirs in threads of their own."""
        self._blocks = list(range(1, LARGEST["num_blocks"]))
        self._slots = list(range(LARGEST["max_num_seqs"]))

    def lend(self, borrower: LentVllm, num_blocks: int, num_slots: int) -> Loan:
        """Lend blocks, the null block first, and slots, until they are given back or `borrower` is collected."""
        if num_blocks > len(self._blocks) + 1 or num_slots > len(self._slots):
            raise ValueError(f"{num_blocks} blocks and {num_slots} slots are more than the tests' vLLM has left")
        blocks, self._blocks = self._blocks[: num_blocks - 1], self._blocks[num_blocks - 1 :]
        slots, self._slots = self._slots[:num_slots], self._slots[num_slots:]

        def give_back() -> None:
            self._blocks += blocks
            self._slots += slots

        return Loan([0, *blocks], slots, weakref.finalize(borrower, give_back))


@cache
def shared_vllm() -> SharedVllm:
    """Load the backend of this process."""
    return SharedVllm()


class LentVllm(RunsAtOnce):
    """An engine's part of the shared backend, with the sizes that the engine asked for."""

    def __init__(self, config: BackendConfig) -> None:
        """Raises ValueError for what the executor refuses, and for another block size or more blocks than there are."""
        engine_arguments(config)
        if config.block_size != BLOCK:
            raise ValueError(f"vLLM's attention has blocks of {BLOCK} tokens here, not of {config.block_size}")
        self._shared = shared_vllm()
        whole = self._shared.backend
        num_blocks = config.num_blocks or 512
        self._loan = self._shared.lend(self, num_blocks, config.max_num_seqs)
        self._blocks, self._slots = self._loan.blocks, self._loan.slots
        self.memory_plan: MemoryPlan = attrs.evolve(
            whole.memory_plan, num_blocks=num_blocks, max_model_len=config.max_model_len
        )
        self.capabilities: Capabilities = whole.capabilities

    def step(self, batch: StepBatch) -> Drawn:
        theirs = attrs.evolve(
            batch,
            slots=[self._slots[slot] for slot in batch.slots],
            block_tables=[[self._blocks[block] for block in table] for table in batch.block_tables],
            copies=[(self._blocks[source], self._blocks[destination]) for source, destination in batch.copies],
        )
        with self._shared.lock:
            return self._shared.backend.step(theirs)

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return np.empty(num_blocks * self.memory_plan.block_bytes, np.uint8).data

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self._shared.backend.read_blocks([self._blocks[block] for block in blocks], to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self._shared.backend.write_blocks([self._blocks[block] for block in blocks], source)

    def close(self) -> None:
        self._loan.give_back()
