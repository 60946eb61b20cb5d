"""`CpuBackend`: our own kernels in C++ (`csrc/`), compiled for this machine's processor.

The executor creates one through `load_backend` and calls `step` once per pass, from one thread. A step is one call into
the library, which releases the GIL, so that the engine can plan the next step meanwhile.

What must always hold: a row's logits are bit-identical whatever its batch, its chunking, its cached prefix, its
physical blocks and the number of threads; a pass that raises changes nothing that a later pass can see, except the KV
slots that its own rows should have written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from ..adapters.named_weights import NamedWeights
from ..backend import BackendConfig, Capabilities, RunsAtOnce, SharesBlocks, wants_strict
from ..batch import Drawn, Pooling, StepBatch
from ..kv_cache import KVCache, choose_kv_dtype
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..machine import memory, peak_of, resident
from ..models.config import DecoderConfig
from ..opened_model import draft_memory_of, open_model
from ..pooling import is_of_last_tokens, pool
from ..profile_run import NUM_BLOCKS, largest_pass
from ..sampling.logprobs import add_scores
from ..step_types import Scores
from .adapted_products import AdaptedProducts
from .block_moves import BlockMoves
from .build import CannotBuild, Kernels, load_kernels
from .first_touch import FirstTouch
from .packing import PackedWeights
from .profiled_program import each_kernel_once, touch
from .program import STORED, STORED_KV, Bounds, Pass, check_layout
from .recorded import Program
from .recording import record
from .sampler import draw
from .scores import score

# Below this hidden size, a second thread costs more than it gains.
_ONE_THREAD_BELOW = 512
# Prompt tokens whose logits are held at a time: the logits of a whole prompt may be larger than the model.
_SCORED_AT_ONCE = 32
# head_dim must be a multiple of this, the step of the attention kernel's registers.
_HEAD_STEP = 16


class CpuKernelsUnavailable(Exception):
    """These kernels cannot run on this machine or cannot run this model; the message says why."""


class CpuBackend(RunsAtOnce, SharesBlocks):
    """Implements `quipu.kernels.backend.Backend`."""

    def __init__(self, config: BackendConfig, kernels: Kernels | None = None) -> None:
        """Load the model, pack it, and record its program, for these kernels or the best ones that run here.

        Raises CpuKernelsUnavailable if the reference could run instead, and ValueError for an unsupported architecture,
        setting or tensor, and for a cache that does not fit.
        """
        wants_strict(config.determinism, strict_is_free=True)  # only validates the setting: there is one mode
        try:
            kernels = kernels or load_kernels()
        except CannotBuild as error:
            raise CpuKernelsUnavailable(str(error)) from None
        self._library = kernels.library
        check_layout(self._library)
        with torch.inference_mode():
            opened = open_model(config)
            model_config, source, dtype = opened.config, opened.source, opened.dtype
            kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
            _check_supported(model_config, dtype, kv_dtype)
            share = config.memory_share
            check_weights_fit(source.expected_quantized_bytes, memory(), num_sharing=config.num_sharing, share=share)
            activations = source.activations if config.activations == "auto" else config.activations
            weights = PackedWeights(source, self._library, byte_products=activations == "int8")
            named = NamedWeights(weights)
            model = opened.build(named)
            if config.activations == "int8" and not weights.is_quantized:
                raise ValueError("--activations int8 needs quantized weights: add --quantization int8, or int4")
        self.num_threads = 1 if model_config.hidden_size < _ONE_THREAD_BELOW else torch.get_num_threads()
        self._last_drawn: list[int | None] = [None] * config.max_num_seqs
        self.adapters = AdaptedProducts(
            named, self._library, dtype=dtype, max_loras=config.max_loras, max_rank=config.max_lora_rank
        )
        block = opened.block_shape(config.block_size, kv_dtype)
        self.cache: KVCache
        self._bounds: Bounds
        self._program: Program
        self._adapted: Program | None = None  # of passes in which a row has an adapter

        def set_up(num_blocks: int, *, is_shared: bool = False) -> None:
            """Allocate a cache of this size, and record the program for it."""
            self.cache = KVCache(num_blocks, block, is_shared=is_shared)
            for tensor in self.cache.tensors:
                self._library.quipu_large_pages(tensor.data_ptr(), tensor.nbytes)
            self._bounds = Bounds(
                num_tokens=config.max_num_batched_tokens,
                num_logits=max(config.max_num_seqs, _SCORED_AT_ONCE),
                num_blocks=num_blocks,
                num_positions=config.max_model_len,
                vocab_size=model_config.vocab_size,
            )
            with torch.inference_mode():
                if config.max_loras:
                    self._adapted = record(model, weights, self.cache, self._bounds, self.adapters)
                shared = [] if self._adapted is None else self._adapted.workspace
                self._program = record(model, weights, self.cache, self._bounds, shared=shared)

        def profile() -> int:
            """Measure the memory of the largest pass."""

            def run() -> None:
                set_up(NUM_BLOCKS)
                if self._adapted is not None:
                    touch(self._adapted)
                self._program = each_kernel_once(self._program)
                self.step(largest_pass(config))

            peak = peak_of(run)
            del self._program, self.cache  # so that two never exist at once
            self._adapted = None
            self._last_drawn = [None] * config.max_num_seqs
            return peak

        self.memory_plan = plan_memory(
            config,
            DeviceMemory(
                block_bytes=block.num_bytes,
                weights_bytes=weights.num_bytes,
                adapters=self.adapters.num_bytes,
                held=resident(),
                profile=profile,
                memory=memory,
                share=share,
                host_tier=config.host_tier_bytes,
                num_staged=config.num_staged_blocks,
                draft=draft_memory_of(config, model_config.vocab_size),
            ),
        )
        set_up(self.memory_plan.num_blocks, is_shared=config.shares_cache)
        self._moves = BlockMoves(
            self._library, self.cache, FirstTouch(self._library, self.cache.tensors, self.cache.shared)
        )
        self.capabilities = Capabilities(
            name="cpu",
            dtype=str(dtype).removeprefix("torch."),
            invariant=True,
            verifies_drafts=True,
            weights=source.format,
            activations="int8" if weights.is_quantized and activations == "int8" else "float",
            kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
            instruction_set=kernels.instruction_set,
            num_threads=self.num_threads,
        )

    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a scored prompt token has NaN logits."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        one_pass, last = self._pass(batch), [batch.query_start[row + 1] - 1 for row in rows]
        if batch.pooling is not None and not rows and is_of_last_tokens(batch.pooling, batch.query_start):
            return Drawn([], [], pooled=self._pool_last(batch, batch.pooling, one_pass))
        if batch.pooling is not None or (batch.scoring is not None and batch.scoring.prompt_tokens):
            logits_MV = self._run_all(one_pass, last)
        else:
            logits_MV = self._run(one_pass, last)
        token_ids = draw(self._library, batch, rows, logits_MV.numpy(), num_threads=self.num_threads)
        drawn = Drawn.of(batch, rows, token_ids)

        def head(tokens: list[int]) -> tuple[torch.Tensor, range]:
            return self._run_head(one_pass, tokens), range(len(tokens))

        if batch.scoring is not None:
            drawn_logits = (logits_MV, range(len(rows)))
            drawn = add_scores(drawn, batch.scoring, drawn_logits, head, self._score_rows, at_once=_SCORED_AT_ONCE)
        if batch.pooling is not None:
            pooled = pool(batch.pooling, batch.query_start, head, at_once=self._bounds.num_logits)
            drawn = attrs.evolve(drawn, pooled=pooled)
        for row, token_id in zip(rows, drawn.token_ids, strict=True):
            self._last_drawn[batch.slots[row]] = token_id
        return drawn

    def _pool_last(self, batch: StepBatch, pooling: Pooling, one_pass: Pass) -> list[bytes]:
        """Run a pass for the last tokens of some rows alone, and pool these."""

        def run(tokens: list[int]) -> tuple[torch.Tensor, range]:
            return self._run(one_pass, tokens), range(len(tokens))

        return pool(pooling, batch.query_start, run, at_once=len(pooling.rows))

    def logits(self, batch: StepBatch, tokens: list[int]) -> torch.Tensor:
        """Run the pass without sampling; return float32 logits `[len(tokens), V]` of these flat token indexes."""
        one_pass = self._pass(batch)
        nothing_MV = self._run_all(one_pass, [])
        starts = range(0, len(tokens), self._bounds.num_logits)
        parts = [self._run_head(one_pass, tokens[start : start + self._bounds.num_logits]).clone() for start in starts]
        return torch.cat([nothing_MV, *parts])

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        return self.adapters.load(folder, expected)

    def unload_adapter(self, digest: str) -> None:
        self.adapters.unload(digest)

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return np.empty(num_blocks * self.memory_plan.block_bytes, np.uint8).data

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self._moves.read(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self._moves.write(blocks, source)

    @property
    def cache_descriptor(self) -> int | None:
        return None if self.cache.shared is None else self.cache.shared.descriptor

    def copy_from(self, cache: memoryview, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._moves.copy_from(cache, sources, targets)

    def while_idle(self) -> bool:
        """Touch a piece of the KV cache, so that no pass has to wait until the system has committed its memory."""
        return self._moves.touch_piece()

    def close(self) -> None:
        """Drop weights and cache, which frees their memory."""
        if self.cache.shared is not None:
            self.cache.shared.close()
        del self._program, self._adapted, self._moves, self.cache

    def _pass(self, batch: StepBatch) -> Pass:
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        return Pass(
            batch,
            self._last_drawn,
            bounds=self._bounds,
            block_size=self.cache.block_size,
            num_threads=self.num_threads,
            adapters=self.adapters.in_pass(batch),
        )

    def _program_of(self, one_pass: Pass) -> Program:
        return self._adapted if one_pass.has_adapters and self._adapted is not None else self._program

    def _run(self, one_pass: Pass, logits_indices: list[int]) -> torch.Tensor:
        """Run a pass and return the logits of these tokens, in ascending order. The next call overwrites them."""
        program = self._program_of(one_pass)
        one_pass.run(self._library, program.draw if logits_indices else program.keys, logits_indices)
        return program.logits_MV[: len(logits_indices)]

    def _run_all(self, one_pass: Pass, logits_indices: list[int]) -> torch.Tensor:
        """Run a pass for all its tokens, so that `_run_head` may follow for any of them; return the selected logits."""
        program = self._program_of(one_pass)
        one_pass.run(self._library, program.trunk, [])
        return self._run_head(one_pass, logits_indices) if logits_indices else program.logits_MV[:0]

    def _run_head(self, one_pass: Pass, logits_indices: list[int]) -> torch.Tensor:
        """Run the head for these tokens of the pass that `_run_all` has run."""
        program = self._program_of(one_pass)
        one_pass.run(self._library, program.head, logits_indices)
        return program.logits_MV[: len(logits_indices)]

    def _score_rows(
        self, logits_MV: torch.Tensor, rows: Sequence[int], target_ids: list[int], num_top: list[int]
    ) -> Scores:
        return score(self._library, logits_MV.numpy(), rows, target_ids, num_top, num_threads=self.num_threads)


def _check_supported(config: DecoderConfig, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    if dtype not in STORED:
        raise CpuKernelsUnavailable(f"dtype {str(dtype).removeprefix('torch.')} is neither bfloat16 nor float32")
    if kv_dtype not in STORED_KV:
        raise CpuKernelsUnavailable(
            f"kv_cache_dtype {str(kv_dtype).removeprefix('torch.')} is none of bfloat16, float32 and int8"
        )
    for head_dim in (heads.head_dim for heads in config.heads_of_layers):
        if head_dim % _HEAD_STEP:
            raise CpuKernelsUnavailable(f"head_dim {head_dim} is not a multiple of {_HEAD_STEP}")
