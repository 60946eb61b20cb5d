"""`TransformersBackend`: a causal language model of the transformers library over our blocks.

The executor makes one through `load_backend` and calls `step` once a pass, from one thread. A pass runs the model's
decoder once, over the tokens of all rows behind one another (`packed_rows.py`); the host draws from the logits.

What must always hold: keys and values are in our blocks and nowhere else, so a row is computed from its tokens, its
position and its block table. Results are not invariant: products are the library's, and add up in an order that depends
on how many rows there are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import attrs
import numpy as np
import torch

from ..backend import BackendConfig, Capabilities, KVMemory, MemoryPlan, RunsAtOnce
from ..batch import Drawn, StepBatch
from ..host_sampling import host_sampling
from ..kv_cache import BlockShape, KVCache, choose_kv_dtype
from ..kv_cache_size import DeviceMemory, plan_memory
from ..machine import memory, peak_of, resident
from ..models.families import FAMILIES
from ..profile_run import NUM_BLOCKS, largest_pass
from ..sampling.logprobs import add_scores
from ..triton.device import CudaDevice
from .causal_head import HiddenStates, SplitModel
from .image_tower import ImageTower, Normalization
from .packed_rows import PackedRows
from .start_checks import compare, watch
from .transformers_loading import Loaded, load

_SCORED_AT_ONCE = 64
"""Prompt tokens whose logits are held at a time."""
_PROFILED_TOKENS = 256
"""Of the largest pass on a CPU, where its memory grows with its tokens and the whole of it takes minutes."""
_log = logging.getLogger(__name__)


class TransformersBackend(RunsAtOnce):
    """Implements `quipu.kernels.backend.Backend`."""

    def __init__(self, config: BackendConfig) -> None:
        """Load the model, check its logits and allocate the cache.

        Raises ValueError without transformers, for a model or a setting that is not served, and for a cache that does
        not fit.
        """
        loaded = load(config)
        self._attention, self._device = loaded.attention, loaded.device
        self._whole_images = loaded.whole_images
        self._cuda = CudaDevice() if loaded.device.type == "cuda" else None
        self._split = SplitModel(loaded.model)
        self._tower = None if loaded.seeing is None else ImageTower(loaded.model, Normalization.read(config.model_path))
        kv_dtype = choose_kv_dtype(config.kv_cache_dtype, loaded.dtype)
        block = watch(loaded, self._split, config.block_size, kv_dtype)
        compare(loaded, self._split, block)
        num_threads = torch.get_num_threads()
        self._sampling = host_sampling(num_threads)
        self._last_drawn: list[int | None] = [None] * config.max_num_seqs
        self.cache = KVCache(NUM_BLOCKS, block, loaded.device)
        self.memory_plan = self._plan(config, loaded, block)
        self._last_drawn = [None] * config.max_num_seqs
        self.cache = KVCache(self.memory_plan.num_blocks, block, loaded.device)
        self.capabilities = Capabilities(
            name="transformers",
            dtype=str(loaded.dtype).removeprefix("torch."),
            invariant=False,
            kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
            weights=loaded.weights,
            num_threads=num_threads if self._cuda is None else None,
            verifies_drafts=True,
            library=loaded.library,
        )
        ours = ": --executor auto serves it, too, and faster" if loaded.named in FAMILIES else ""
        _log.warning("%s is computed by %s, more slowly than by kernels of ours%s", loaded.named, loaded.library, ours)

    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        with self._pass(batch) as hidden:
            logits_MV = hidden.logits([batch.query_start[row + 1] - 1 for row in rows])
            drawn = Drawn.of(batch, rows, self._sampling.draw(batch, rows, logits_MV.numpy()))
            if batch.scoring is not None:
                drawn = add_scores(
                    drawn,
                    batch.scoring,
                    (logits_MV, range(len(rows))),
                    hidden.rows,
                    self._sampling.score,
                    at_once=_SCORED_AT_ONCE,
                )
        for row, token_id in zip(rows, drawn.token_ids, strict=True):
            self._last_drawn[batch.slots[row]] = token_id
        return drawn

    def logits(self, batch: StepBatch, tokens: list[int]) -> torch.Tensor:
        """Run the pass without drawing; return float32 logits `[len(tokens), V]` of these flat token indexes."""
        with self._pass(batch) as hidden:
            return hidden.logits(tokens)

    @contextmanager
    def _pass(self, batch: StepBatch) -> Iterator[HiddenStates]:
        """Run the model up to its output head."""
        with torch.inference_mode():
            if batch.copies:
                self.cache.copy_blocks(batch.copies)
            rows = PackedRows(
                batch, self._last_drawn, self.cache.block_size, self._device, whole_images=self._whole_images
            )
            with self._attention.over(rows, self.cache):
                hidden = self._split.hidden_states(rows.token_ids_1N, rows.positions_1N, self._seen(rows, batch))
            yield hidden

    def _seen(self, rows: PackedRows, batch: StepBatch) -> torch.Tensor | None:
        """Return what the decoder reads where images are in the batch. Raises ValueError if the model reads none."""
        if not batch.images:
            return None
        if self._tower is None:
            raise ValueError("the model reads no images")
        x_1ND = self._split.embeddings(rows.token_ids_1N)
        self._tower.place(x_1ND[0], batch)
        return x_1ND

    def _plan(self, config: BackendConfig, loaded: Loaded, block: BlockShape) -> MemoryPlan:
        """Choose the number of blocks."""
        if self._cuda is not None:
            cuda = self._cuda
            return plan_memory(
                config,
                DeviceMemory(
                    block_bytes=block.num_bytes,
                    weights_bytes=loaded.num_bytes,
                    held=cuda.held(config.num_sharing),
                    profile=lambda: self._with_images(
                        cuda.peak_of(lambda: self.step(largest_pass(config))), cuda.peak_of
                    ),
                    memory=cuda.memory,
                    default=KVMemory(utilization=cuda.default_kv_memory.utilization),
                ),
            )
        return plan_memory(
            config,
            DeviceMemory(
                block_bytes=block.num_bytes,
                weights_bytes=loaded.num_bytes,
                held=resident(),
                profile=partial(self._profile, config),
                memory=memory,
                share=config.memory_share,
                host_tier=config.host_tier_bytes,
                num_staged=config.num_staged_blocks,
            ),
        )

    def _profile(self, config: BackendConfig) -> int:
        """Measure a part of the largest pass, and return what the whole of it takes."""
        part = attrs.evolve(config, max_num_batched_tokens=min(config.max_num_batched_tokens, _PROFILED_TOKENS))
        peak = peak_of(lambda: self.step(largest_pass(part)))
        return self._with_images(peak * config.max_num_batched_tokens // part.max_num_batched_tokens, peak_of)

    def _with_images(self, peak: int, measure: Callable[[Callable[[], object]], int]) -> int:
        """Return the peak of a pass, where images may be computed before it, and are held."""
        if self._tower is None:
            return peak
        images = self._tower.measure(measure)
        return max(peak, images.one) + images.held

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        num_bytes = num_blocks * self.memory_plan.block_bytes
        return np.empty(num_bytes, np.uint8).data if self._cuda is None else self._cuda.host_memory(num_bytes)

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        with self._transfers():
            self.cache.read_blocks(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        with self._transfers():
            self.cache.write_blocks(blocks, source)

    def _transfers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._cuda is None else self._cuda.transfers()

    def close(self) -> None:
        """Drop weights and cache, which frees their memory."""
        self._attention.close()
        del self._split, self.cache
