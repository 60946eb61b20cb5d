"""`TritonBackend`: our own kernels for NVIDIA GPUs, cuBLAS for matrix products, CUDA graphs for decode.

The executor makes one through `load_backend` and calls `step` once a pass, from one thread. Logits and drawn tokens
stay on the device, where a carried row is fed its slot's last token. The ids are copied to the host once, at the end of
a step.

What must always hold: if `capabilities.invariant`, a row's logits are bit-identical whatever its batch, chunking,
cached prefix and blocks, which `probe.py` has checked at start; a pass that raises has changed nothing that a later
pass can see, except the KV slots that its own rows were to write and the last tokens of their slots.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
import torch

from ..adapters.named_weights import NamedWeights
from ..backend import BackendConfig, Capabilities, RunsAtOnce, refuse_int8_activations, wants_strict
from ..batch import Drawn, StepBatch
from ..kv_cache import KVCache, choose_kv_dtype
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..models.config import DecoderConfig
from ..opened_model import draft_memory_of, open_model
from ..pooling import pool
from ..profile_run import NUM_BLOCKS, largest_pass
from ..sampling.logprobs import add_scores, score_rows
from .availability import check_capability, request_strict_cublas
from .columns import Tables
from .configs import Tiles, shared_tile, tiles_for, tiles_of_heads, token_ladder
from .device import CudaDevice, Device
from .matrices import LibraryLinear, Linear
from .memory import DeviceWeights, Heads
from .probe import StrictKernels, attention_kinds, choose_strict_kernels
from .runner import Bounds, Finished, Runner
from .sampler import Sampler
from .triton_adapters import TritonAdapters

# Prompt tokens whose logits are held at a time.
_SCORED_AT_ONCE = 256

# Length of the prompt that warm-up runs.
_WARM_PROMPT = 16

_log = logging.getLogger(__name__)


class TritonBackend(RunsAtOnce):
    """Implements `quipu.kernels.backend.Backend`."""

    def __init__(self, config: BackendConfig, device: Device | None = None, tiles: Tiles | None = None) -> None:
        """Load the model and allocate the cache. `device` and `tiles` are for tests; by default the first GPU.

        Raises TritonUnavailable for a GPU that is too old, and ValueError for an unsupported architecture, setting or
        tensor, for a cache that does not fit, and for `strict` if this GPU cannot guarantee it.
        """
        strict = wants_strict(config.determinism, strict_is_free=False)
        serving = device is None
        allow_cublas = True
        if device is None:
            allow_cublas = request_strict_cublas() if strict else True
            check_capability()
            device = CudaDevice()
        refuse_int8_activations(config.activations, "triton")
        self._device = device
        self._config = config
        self._tiles = tiles if tiles is not None else tiles_for(torch.cuda.get_device_capability())
        self._linear: Linear = LibraryLinear()
        with torch.inference_mode():
            opened = open_model(config)
            model_config, source, dtype = opened.config, opened.source, opened.dtype
            self._model_config = model_config
            _check_kv_dtype(config.kv_cache_dtype, dtype)
            self._tiles = tiles_of_heads(self._tiles, _heads(model_config).widest)
            if config.num_sharing > 1:
                memory = device.memory()
                share = memory.total // config.num_sharing
                check_weights_fit(source.expected_bytes, memory, num_sharing=config.num_sharing, share=share)
            if dtype == torch.float32:
                # without tensor cores a tile of many rows needs too many registers
                self._tiles = shared_tile(self._tiles)
            weights = DeviceWeights(source, device.torch_device)
            self.named_weights = NamedWeights(weights)
            self._model = opened.build(self.named_weights)
            self.strict_kernels: StrictKernels | None = None
            if strict:
                heads = _heads(model_config)
                block = opened.block_shape(16, dtype)
                kinds = attention_kinds(self._model, block, heads, device, self._tiles, dtype)
                self.strict_kernels = choose_strict_kernels(
                    weights.matrices, kinds, heads, config, device, self._tiles, dtype, allow_cublas=allow_cublas
                )
                self._tiles, self._linear = self.strict_kernels.tiles, self.strict_kernels.linear
            self.adapters: TritonAdapters | None = None
            if config.max_loras:
                self.adapters = TritonAdapters(
                    self.named_weights, device, self._tiles, dtype=dtype, max_loras=config.max_loras,
                    max_rank=config.max_lora_rank,
                )  # fmt: skip
                if strict and not self.adapters.is_invariant():
                    raise ValueError(
                        "determinism strict is not available with --enable-lora: on this GPU what an adapter adds to a "
                        "row depends on the other rows"
                    )
            self._block = opened.block_shape(config.block_size, dtype)
            self._start(NUM_BLOCKS)
            self.memory_plan = plan_memory(
                config,
                DeviceMemory(
                    block_bytes=self._block.num_bytes,
                    weights_bytes=weights.num_bytes,
                    held=device.held(config.num_sharing),
                    profile=lambda: device.peak_of(lambda: self.step(largest_pass(config))),
                    memory=device.memory,
                    default=device.default_kv_memory,
                    draft=draft_memory_of(config, model_config.vocab_size),
                ),
            )
            self._start(self.memory_plan.num_blocks)
        self.capabilities = Capabilities(
            name="triton",
            dtype=str(dtype).removeprefix("torch."),
            invariant=strict,
            verifies_drafts=True,
            runs_beside_host=True,
            weights=source.format,
            kv_cache_dtype=str(dtype).removeprefix("torch."),
            instruction_set=device.name,
        )
        if self.strict_kernels is not None:
            _log.info("strict: %s", self.strict_kernels)
        if serving:
            self.warm_up()

    def _start(self, num_blocks: int) -> None:
        """Allocate a cache of this size and everything that refers to it; discard all state of earlier passes."""
        config, model_config, device = self._config, self._model_config, self._device
        max_blocks = -(-config.max_model_len // config.block_size)
        self.cache = KVCache(num_blocks, self._block, device.torch_device)
        self._sampler = Sampler(config.max_num_seqs, device)
        self._has_drawn = [False] * config.max_num_seqs
        self.runner = Runner(
            self._model,
            self.cache,
            Tables(config.max_num_seqs, max_blocks, num_blocks, device),
            self._sampler.last_drawn,
            device,
            bounds=Bounds(
                num_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
                num_rows=config.max_num_seqs,
                num_positions=config.max_model_len,
                vocab_size=model_config.vocab_size,
            ),
            heads=_heads(model_config),
            tiles=self._tiles,
            linear=self._linear,
            replays=not config.enforce_eager,
            adapters=self.adapters,
        )

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        finished = self._run(batch)
        drawn = Drawn(rows=[], token_ids=[])
        drawn_logits: tuple[torch.Tensor, list[int]] = (torch.empty(0, 0), [])
        if rows:
            drawn_logits = finished.logits([batch.query_start[row + 1] - 1 for row in rows])
            pending = self._sampler.begin(batch, rows, *drawn_logits)
            drawn = Drawn.of(batch, rows, pending.read(batch, rows))
            for row in rows:
                self._has_drawn[batch.slots[row]] = True
        if batch.pooling is not None:
            pooled = pool(batch.pooling, batch.query_start, finished.logits, at_once=_SCORED_AT_ONCE)
            drawn = attrs.evolve(drawn, pooled=pooled)
        if batch.scoring is None:
            return drawn
        return add_scores(drawn, batch.scoring, drawn_logits, finished.logits, score_rows, at_once=_SCORED_AT_ONCE)

    @torch.inference_mode()
    def logits(self, batch: StepBatch, tokens: list[int]) -> torch.Tensor:
        """Run the pass without drawing; return float32 logits `[len(tokens), V]` of these flat token indexes."""
        finished = self._run(batch)
        parts = [torch.empty((0, self._model_config.vocab_size))]
        for start in range(0, len(tokens), _SCORED_AT_ONCE):
            logits_MV, places = finished.logits(tokens[start : start + _SCORED_AT_ONCE])
            parts.append(logits_MV[places].cpu())
        return torch.cat(parts)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile every kernel and record the graphs of every size of decode, so that no request waits for it."""
        config = self._config
        sizes = [size for size in token_ladder(config.max_num_seqs) if size <= config.max_num_batched_tokens]
        longest = min(_WARM_PROMPT, config.max_model_len)
        for num_rows, num_tokens in [*((size, size) for size in sizes), (1, longest)]:
            batch = largest_pass(attrs.evolve(config, max_num_seqs=num_rows, max_num_batched_tokens=num_tokens))
            self.step(batch)
            if self.adapters is not None:
                self.runner.run(batch, np.zeros(num_tokens, np.int32)).logits([num_tokens - 1])
        self._has_drawn = [False] * config.max_num_seqs

    def load_adapter(self, folder: Path, expected: str | None = None) -> str:
        if self.adapters is None:
            return super().load_adapter(folder, expected)
        return self.adapters.load(folder, expected)

    def unload_adapter(self, digest: str) -> None:
        if self.adapters is not None:
            self.adapters.unload(digest)

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return self._device.host_memory(num_blocks * self.memory_plan.block_bytes)

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        with self._device.transfers():
            self.cache.read_blocks(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        with self._device.transfers():
            self.cache.write_blocks(blocks, source)

    def close(self) -> None:
        """Drop weights, cache and graphs, which frees their memory."""
        del self._model, self.cache, self.runner, self._sampler

    def _run(self, batch: StepBatch) -> Finished:
        for row, carried in enumerate(batch.carried):
            if carried and not (
                self._has_drawn[batch.slots[row]] and batch.query_start[row + 1] - batch.query_start[row] == 1
            ):
                raise ValueError(f"row {row} carries slot {batch.slots[row]}, which has no single token to carry")
        if batch.copies:
            self.cache.copy_blocks(batch.copies)
        return self.runner.run(batch)


def _heads(config: DecoderConfig) -> Heads:
    kinds = {Heads(config.num_heads, config.num_kv_heads, config.head_dim): None}
    kinds |= {Heads(config.num_heads, one.num_kv_heads, one.head_dim): None for one in config.heads_of_layers}
    first, *others = kinds
    return attrs.evolve(first, others=others[0]) if others else first


def _check_kv_dtype(name: str, dtype: torch.dtype) -> None:
    if choose_kv_dtype(name, dtype) != dtype:
        ours = str(dtype).removeprefix("torch.")
        raise ValueError(f"--kv-cache-dtype {name}: the triton executor keeps the KV cache in the weights' {ours} only")
