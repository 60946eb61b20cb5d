"""`ReferenceBackend`: plain torch on fixed tiles. The oracle of every other backend, and the fallback on any machine.

The executor makes one through `load_backend` and calls `step` once a pass, from one thread.

What must always hold: a row's logits are bit-identical whatever its batch, its chunking, its cached prefix and its
physical blocks (`rows.py` explains how); and a pass that raises has changed nothing that a later pass can see, except
the KV slots that its own rows were to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import torch

from ..adapters.named_weights import NamedWeights
from ..backend import BackendConfig, Capabilities, RunsAtOnce, refuse_int8_activations, wants_strict
from ..batch import Drawn, StepBatch
from ..kv_cache import KVCache, choose_kv_dtype
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..machine import memory, peak_of, resident
from ..models.families import Model
from ..opened_model import draft_memory_of, open_model
from ..pooling import pool
from ..profile_run import NUM_BLOCKS, largest_pass
from ..sampling.logprobs import add_scores, score_rows
from ..sampling.oracle import draw
from .adapted_ops import NO_SLOT, AdaptedOps, ReferenceAdapters
from .ops import EmptyOps, ReferenceOps
from .plan import StepPlan, make_plan
from .rows import ROWS, round_up

# Below this hidden size a second thread costs more than it gains.
_ONE_THREAD_BELOW = 512


class ReferenceBackend(RunsAtOnce):
    """Implements `quipu.kernels.backend.Backend` on the CPU. Weights take four bytes each, whatever the dtype."""

    def __init__(self, config: BackendConfig) -> None:
        """Load the model and allocate the cache.

        Raises ValueError for an unsupported architecture, setting or tensor, for a `max_model_len` beyond the model's
        positions, and for a cache that does not fit.
        """
        wants_strict(config.determinism, strict_is_free=True)  # only validates it: there is one mode
        refuse_int8_activations(config.activations, "reference")
        with torch.inference_mode():
            opened = open_model(config, held_in=torch.float32)
            weights, share = opened.source, config.memory_share
            check_weights_fit(weights.expected_bytes, memory(), num_sharing=config.num_sharing, share=share)
            named = NamedWeights(weights)
            self._model = opened.build(named)
            self.adapters = ReferenceAdapters(
                named, dtype=opened.dtype, max_loras=config.max_loras, max_rank=config.max_lora_rank
            )
        kv_dtype = choose_kv_dtype(config.kv_cache_dtype, opened.dtype)
        block = opened.block_shape(config.block_size, kv_dtype)
        self.one_thread = opened.config.hidden_size < _ONE_THREAD_BELOW
        self._last_drawn: list[int | None] = [None] * config.max_num_seqs
        self._ops: type[ReferenceOps] = ReferenceOps
        self._dtype = opened.dtype
        self.cache = KVCache(NUM_BLOCKS, block)
        self.memory_plan = plan_memory(
            config,
            DeviceMemory(
                block_bytes=block.num_bytes,
                weights_bytes=weights.num_bytes,
                adapters=self.adapters.num_bytes,
                held=resident(),
                profile=partial(self._profile, config, opened.config.vocab_size),
                memory=memory,
                share=share,
                host_tier=config.host_tier_bytes,
                num_staged=config.num_staged_blocks,
                draft=draft_memory_of(config, opened.config.vocab_size, held_in=torch.float32),
            ),
        )
        self.cache = KVCache(self.memory_plan.num_blocks, block)
        self.capabilities = Capabilities(
            name="reference",
            dtype=str(opened.dtype).removeprefix("torch."),
            invariant=True,
            verifies_drafts=True,
            weights=weights.format,
            kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
            num_threads=1 if self.one_thread else torch.get_num_threads(),
        )

    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        with self._pass(batch) as head:
            logits_MV = head.logits([batch.query_start[row + 1] - 1 for row in rows])
            drawn = Drawn.of(batch, rows, draw(batch, rows, logits_MV.numpy()))
            if batch.scoring is not None:
                drawn_logits = (logits_MV, range(len(rows)))
                drawn = add_scores(drawn, batch.scoring, drawn_logits, head.rows, score_rows, at_once=ROWS)
            if batch.pooling is not None:
                pooled = pool(batch.pooling, batch.query_start, head.rows, at_once=ROWS)
                drawn = attrs.evolve(drawn, pooled=pooled)
        for row, token_id in zip(rows, drawn.token_ids, strict=True):
            self._last_drawn[batch.slots[row]] = token_id
        return drawn

    def logits(self, batch: StepBatch, tokens: list[int]) -> torch.Tensor:
        """Run the pass without drawing; return float32 logits `[len(tokens), V]` of these flat token indexes."""
        with self._pass(batch) as head:
            return head.logits(tokens)

    @contextmanager
    def _pass(self, batch: StepBatch) -> Iterator[_Head]:
        """Run the model up to the output head."""
        with torch.inference_mode(), _threads(1 if self.one_thread else torch.get_num_threads()):
            if batch.copies:
                self.cache.copy_blocks(batch.copies)
            plan = make_plan(batch, self._last_drawn, self.cache.block_size)
            ops = self._adapted(plan, batch) or self._ops(plan, self.cache, self._dtype)
            yield _Head(self._model, self._model.forward(plan.token_ids_N, ops), ops)

    def _adapted(self, plan: StepPlan, batch: StepBatch) -> ReferenceOps | None:
        """Return the operations of a pass in which a row has an adapter."""
        slots = self.adapters.of_rows(batch)
        if slots is None:
            return None
        slots_n = torch.tensor([NO_SLOT if slot is None else slot for slot in slots])
        slots_n = slots_n.repeat_interleave(torch.tensor([span.length for span in plan.spans]))
        return AdaptedOps(plan, self.cache, self._dtype, self.adapters, slots_n)

    def _profile(self, config: BackendConfig, vocab_size: int) -> int:
        """Measure the memory of the largest pass, with operations that skip what is slow."""

        def run() -> None:
            # the copy of logits that is made if every row requests logprobs
            copied_MV = torch.zeros(min(config.max_num_seqs, config.max_num_batched_tokens), vocab_size)
            self.step(largest_pass(config))
            del copied_MV

        self._ops = EmptyOps
        try:
            return peak_of(run)
        finally:
            self._ops = ReferenceOps
            self._last_drawn = [None] * config.max_num_seqs

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        return self.adapters.load(folder, expected)

    def unload_adapter(self, digest: str) -> None:
        self.adapters.unload(digest)

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return np.empty(num_blocks * self.memory_plan.block_bytes, np.uint8).data

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self.cache.read_blocks(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self.cache.write_blocks(blocks, source)

    def close(self) -> None:
        """Drop weights and cache, which frees their memory."""
        del self._model, self.cache


class _Head:
    """The rest of a pass: from hidden states to logits, for selected tokens."""

    def __init__(self, model: Model, x_ND: torch.Tensor, ops: ReferenceOps) -> None:
        self._model = model
        self._x_ND = x_ND
        self._ops = ops

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return float32 logits `[len(tokens), V]` of these flat token indexes."""
        x_ND = self._x_ND
        x_MD = x_ND.new_zeros((round_up(len(tokens), ROWS), x_ND.shape[1]))
        x_MD[: len(tokens)] = x_ND[tokens]
        self._ops.select(tokens)
        return self._model.logits(x_MD, self._ops)[: len(tokens)]

    def rows(self, tokens: list[int]) -> tuple[torch.Tensor, range]:
        return self.logits(tokens), range(len(tokens))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch on `count` threads. Used around each pass: torch keeps part of the setting per calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
