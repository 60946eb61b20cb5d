"""The fake backend with vLLM's runner beneath it: each pass of a small runtime is one of vLLM's, too.

Traps and fault tests run on the KV-reading fake backend: it says what every sequence must draw, and its dials inject
faults. With `QUIPU_TEST_EXECUTOR=vllm` they get a `FakeOverVllm`, which also runs each pass on vLLM:

- a row draws under a mask that allows only the token that the fake backend has drawn, so texts stay what tests expect;
- the logits of one row of each pass are compared with those of the cpu executor, which computes the row's sequence
  anew: they differ if a block of vLLM's holds anything else than what the fake backend has read there;
- copies within the pass, and blocks that go to the host and come back, are vLLM's blocks as well;
- where a dial makes a pass raise, vLLM's pass raises in the middle, or has been run in vain.

What differs is raised in the pass, and again at the end of the test (`sound_passes`), which may expect failed passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from unittest import mock

import attrs
import numpy as np
import pytest

from quipu.actors.engine.executor import loading
from quipu.kernels.backend import Backend, BackendConfig
from quipu.kernels.batch import Drawn, Scoring, StepBatch
from quipu.kernels.cpu.cpu_backend import CpuBackend
from quipu.kernels.fake import FakeBackend
from quipu.kernels.fake_scores import slot_value
from quipu.kernels.load import load_backend
from quipu.kernels.logit_processors import Processing
from quipu.kernels.step_types import RowSampling, Scores
from tests.kernels.kernel_checkpoints import backend_config
from tests.kernels.step_batches import make_batch
from tests.tiny import BLOCK, TINY
from tests.vllm_runner.shared_vllm import LARGEST, LentVllm, shared_vllm

VOCAB_SIZE = 4096
NUM_TOP = 4
TOLERANCE = 2e-3
"""Of logprobs in float32, whatever the chunks and the batch."""
LONG, LESS_OFTEN = 256, 16
"""Sequences of more tokens are computed anew in one of so many passes."""
_token_of: dict[int, int] = {}
"""The token that a slot of the fake backend stands for."""
problems: list[str] = []
"""What was found in this test."""


class FakeOverVllm(FakeBackend):
    """A fake backend whose passes run on vLLM as well."""

    checks_logits = True
    """Whether blocks hold what their sequences say; not where a test has them overwritten."""

    def __init__(self, config: BackendConfig) -> None:
        super().__init__(attrs.evolve(config, shares_cache=False))  # others would find the fake blocks alone
        self._beneath = LentVllm(attrs.evolve(config, num_blocks=self.memory_plan.num_blocks))
        self._fake_bytes = self.memory_plan.block_bytes
        block_bytes = self._fake_bytes + self._beneath.memory_plan.block_bytes
        self.memory_plan = attrs.evolve(self.memory_plan, block_bytes=block_bytes)
        self._num_failed = 0

    def step(self, batch: StepBatch) -> Drawn:
        try:
            drawn = super().step(batch)
        except Exception as error:
            self._fail_beneath(batch, error)
            raise
        try:
            self._run_beneath(batch, drawn)
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {error}")
            raise
        return drawn

    def close(self) -> None:
        super().close()
        self._beneath.close()

    def _run_beneath(self, batch: StepBatch, drawn: Drawn) -> None:
        found = self._beneath.step(beneath(batch, drawn))
        assert found.token_ids == drawn.token_ids and not found.broken_rows
        if not drawn.rows or not self.checks_logits:
            return
        at = self.num_passes % len(drawn.rows)
        row = drawn.rows[at]
        sequence = [_token_of[value] for value in self._read(batch, row, batch.query_start[row + 1] - 1)]
        if len(sequence) > LONG and self.num_passes % LESS_OFTEN:
            return
        assert found.scores is not None
        difference = compared(found.scores, at, cold_scores(sequence, drawn.token_ids[at]))
        if difference > TOLERANCE:
            raise AssertionError(f"vLLM's logits of row {row} differ by {difference} from those of its sequence")

    def _fail_beneath(self, batch: StepBatch, error: Exception) -> None:
        """Have the pass raise within vLLM's runner, or let it be run in vain, in turn."""
        self._num_failed += 1
        if self._num_failed % 2:
            runner = vars(shared_vllm().backend)["_runner"]
            with mock.patch.object(runner, "_model_forward", side_effect=error), pytest.raises(type(error)):
                self._step_beneath(batch, None)
        else:
            self._step_beneath(batch, None)

    def _step_beneath(self, batch: StepBatch, drawn: Drawn | None) -> Drawn:
        return self._beneath.step(beneath(batch, drawn))

    def _write(self, batch: StepBatch, row: int, position: int, token_id: int) -> None:
        super()._write(batch, row, position, token_id)
        _token_of[slot_value(token_id, position, "")] = token_id

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        for block, fakes, theirs in self._parts(blocks, to):
            super().read_blocks([block], fakes)
            self._beneath.read_blocks([block], theirs)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        for block, fakes, theirs in self._parts(blocks, source):
            super().write_blocks([block], fakes)
            self._beneath.write_blocks([block], theirs)

    def _parts(self, blocks: Sequence[int], memory: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        size = self.memory_plan.block_bytes
        if memory.nbytes != len(blocks) * size:
            raise ValueError(f"{memory.nbytes} bytes for {len(blocks)} blocks of {size}")
        for at, block in enumerate(blocks):
            whole = memory[at * size : (at + 1) * size]
            yield block, whole[: self._fake_bytes], whole[self._fake_bytes :]


def beneath(batch: StepBatch, drawn: Drawn | None) -> StepBatch:
    """Return what vLLM runs: rows draw what `drawn` says, or anything if it is None."""
    if len(set(batch.slots)) < len(batch.slots) or any(batch.adapters or ()):
        raise ValueError("the vllm executor verifies no drafts, and has no adapters")
    prompt = batch.scoring or Scoring([], [], [], [], [])
    rows = [] if drawn is None else drawn.rows
    masks = [] if drawn is None else [mask_of(token_id) for token_id in drawn.token_ids]
    return attrs.evolve(
        batch,
        sampling=[RowSampling()] * len(batch.slots),
        processing=Processing([], [], rows, lambda: masks),
        scoring=attrs.evolve(prompt, drawn_rows=rows, drawn_num_top=[NUM_TOP] * len(rows)),
        adapters=None,
    )


def mask_of(token_id: int) -> bytes:
    """Return a bit mask that allows one token."""
    bits = bytearray(VOCAB_SIZE // 8)
    bits[token_id // 8] = 1 << token_id % 8
    return bytes(bits)


@cache
def cpu_backend() -> CpuBackend:
    """Load the cpu executor, which computes one sequence at a time here."""
    return CpuBackend(backend_config(TINY, **{**LARGEST, "num_blocks": 1 + 16384 // BLOCK, "max_num_seqs": 1}))


def cold_scores(token_ids: list[int], drawn: int) -> Scores:
    """Return the scores of a token after a sequence that is computed from its beginning."""
    backend, size = cpu_backend(), LARGEST["max_num_batched_tokens"]
    blocks = list(range(1, 2 + len(token_ids) // BLOCK))
    for begin in range(0, len(token_ids), size):
        part = token_ids[begin : begin + size]
        ends = begin + len(part) == len(token_ids)
        batch = make_batch({"position": begin, "token_ids": part, "blocks": blocks, "samples": ends})
        result = backend.step(beneath(batch, Drawn([0], [drawn]) if ends else None))
    assert result.scores is not None
    return result.scores


def compared(found: Scores, at: int, wanted: Scores) -> float:
    """Return by how much the logprobs of a token and of the likeliest ones differ."""
    likeliest = np.subtract(found.top_logprobs[at], wanted.top_logprobs[0])
    return float(max(abs(found.logprobs[at] - wanted.logprobs[0]), np.abs(likeliest).max()))


def load_for_tests(name: str, config: BackendConfig) -> Backend:
    """Load a backend as `load_backend` does, but for models that are `TINY` one that runs on vLLM."""
    if config.model_path != TINY:
        return load_backend(name, config)
    return FakeOverVllm(config) if name == "fake" else LentVllm(config)


def load_vllm_first() -> None:
    """Have the engines of this process run on vLLM.

    It looks at all that is imported when it is loaded, and trips over what Quart's modules hold.
    """
    shared_vllm()
    setattr(loading, "load_backend", load_for_tests)  # noqa: B010 - mypy knows no module's functions as variables


@pytest.fixture(autouse=True)
def sound_passes() -> Iterator[None]:
    """Check that nothing was found in a test's passes."""
    problems.clear()
    yield
    assert problems == []
