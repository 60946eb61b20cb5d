"""`ReferenceBackend`: plain torch on fixed tiles. The oracle of every other backend, and the fallback on any machine.

The executor makes one through `load_backend` and calls `step` once a pass, from one thread.

What must always hold: a row's logits are bit-identical whatever its batch, its chunking, its cached prefix and its
physical blocks (`tiles.py` explains how); and a pass that raises has changed nothing that a later pass can see, except
the KV slots that its own rows were to write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import attrs
import numpy as np
import torch

from ..backend import BackendConfig, Capabilities, MemoryPlan, RunsAtOnce, refuse_int8_activations, wants_strict
from ..batch import Drawn, Scoring, StepBatch
from ..checkpoints.weights import open_weights
from ..kv_cache import BlockShape, KVCache, choose_kv_dtype
from ..kv_cache_size import DeviceMemory, check_weights_fit, plan_memory
from ..machine import memory, peak_of, resident
from ..models.config import check_length, read_config
from ..models.families import Model, find_family
from ..profile_run import NUM_BLOCKS, largest_pass, logits_of_all
from ..sampling.logprobs import score
from ..sampling.oracle import draw
from ..step_types import Scores
from .ops import ReferenceOps
from .plan import make_plan
from .profile_ops import EmptyOps
from .tiles import ROWS, round_up

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
        config_json = read_config(config.model_path)
        family = find_family(config_json)
        model_config = family.parse(config_json)
        check_length(model_config, config.max_model_len)
        with torch.inference_mode():
            weights, dtype = open_weights(
                config.model_path,
                config_json,
                load_format=config.load_format,
                dtype=config.dtype,
                held_in=torch.float32,
                quantization=config.quantization,
            )
            share = config.memory_share
            check_weights_fit(weights.expected_bytes, memory(), num_sharing=config.num_sharing, share=share)
            self._model = family.build(model_config, weights, config.max_model_len)
            # A tied head may be stored nevertheless; it equals the embedding.
            weights.check_all_used(
                ignore=frozenset({"lm_head.weight"}) if model_config.tie_word_embeddings else frozenset()
            )
            kv_dtype = choose_kv_dtype(config.kv_cache_dtype, dtype)
            block = BlockShape(
                num_layers=model_config.num_layers,
                num_kv_heads=model_config.num_kv_heads,
                block_size=config.block_size,
                head_dim=model_config.head_dim,
                dtype=kv_dtype,
            )
        self.one_thread = model_config.hidden_size < _ONE_THREAD_BELOW
        self._last_drawn: list[int | None] = [None] * config.max_num_seqs
        self._ops: type[ReferenceOps] = ReferenceOps
        self._dtype = dtype
        self.cache = KVCache(NUM_BLOCKS, block)
        self._memory_plan = plan_memory(
            config,
            DeviceMemory(
                block_bytes=block.num_bytes,
                weights_bytes=weights.num_bytes,
                held=resident(),
                profile=partial(self._profile, config, model_config.vocab_size),
                memory=memory,
                share=share,
                host_tier=config.host_tier_bytes,
            ),
        )
        self.cache = KVCache(self._memory_plan.num_blocks, block)
        self._capabilities = Capabilities(
            name="reference",
            dtype=str(dtype).removeprefix("torch."),
            invariant=True,
            weights=weights.format,
            kv_cache_dtype=str(kv_dtype).removeprefix("torch."),
            num_threads=1 if self.one_thread else torch.get_num_threads(),
        )

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def memory_plan(self) -> MemoryPlan:
        return self._memory_plan

    def step(self, batch: StepBatch) -> Drawn:
        """See `Backend.step`. Raises ArithmeticError if a prompt token that is scored has NaN logits."""
        rows = [row for row, samples in enumerate(batch.samples) if samples]
        with self._pass(batch) as head:
            logits_MV = head.logits([batch.query_start[row + 1] - 1 for row in rows])
            drawn = Drawn.of(batch, rows, draw(batch, rows, logits_MV.numpy()))
            if batch.scoring is not None:
                drawn = _score(batch.scoring.without(drawn.broken_rows), drawn, logits_MV, head)
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
            ops = self._ops(plan, self.cache, self._dtype)
            yield _Head(self._model, self._model.forward(plan.token_ids_N, ops), ops)

    def _profile(self, config: BackendConfig, vocab_size: int) -> int:
        """Measure the memory of the largest pass, with operations that skip what is slow."""

        def run() -> None:
            copied_MV = logits_of_all(config, vocab_size)
            self.step(largest_pass(config))
            del copied_MV

        self._ops = EmptyOps
        try:
            return peak_of(run)
        finally:
            self._ops = ReferenceOps
            self._last_drawn = [None] * config.max_num_seqs

    def allocate_on_host(self, num_blocks: int) -> memoryview:
        return np.empty(num_blocks * self._memory_plan.block_bytes, np.uint8).data

    def read_blocks(self, blocks: Sequence[int], to: memoryview) -> None:
        self.cache.read_blocks(blocks, to)

    def write_blocks(self, blocks: Sequence[int], source: memoryview) -> None:
        self.cache.write_blocks(blocks, source)

    def while_idle(self) -> bool:
        return False

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
        return self._model.logits(x_MD, self._ops)[: len(tokens)]


def _score(scoring: Scoring, drawn: Drawn, logits_MV: torch.Tensor, head: _Head) -> Drawn:
    """Add the requested scores to what was drawn; `logits_MV` are those of the rows that drew."""
    at = {row: index for index, row in enumerate(drawn.rows)}
    scored_rows = [at[row] for row in scoring.drawn_rows]
    drawn_scores = score(
        logits_MV[scored_rows], [drawn.token_ids[index] for index in scored_rows], scoring.drawn_num_top
    )
    prompt_scores = Scores.empty()
    # tile by tile: the logits of a whole prompt may be larger than the model
    for start in range(0, len(scoring.prompt_tokens), ROWS):
        tile = slice(start, start + ROWS)
        tile_MV = head.logits(scoring.prompt_tokens[tile])
        prompt_scores.extend(score(tile_MV, scoring.prompt_target_ids[tile], scoring.prompt_num_top[tile]))
    return attrs.evolve(drawn, scores=drawn_scores, prompt_scores=prompt_scores)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Run torch on `count` threads. Used around each pass: torch keeps part of the setting per calling thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
