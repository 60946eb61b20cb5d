"""The steps that `bench/execution.py` measures: their shapes, and the least work that each needs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import attrs

from bench.shapes import QWEN3_06B as SHAPE
from quipu.kernels.backend import MemoryPlan
from quipu.kernels.batch import StepBatch

CONTEXT = 512
PREFILL = 1024
BLOCK_SIZE = 16
STREAMS = (1, 8, 32)


@attrs.frozen
class Work:
    """The minimum of bytes and operations that a step needs."""

    name: str
    num_rows: int
    num_tokens: int
    """New tokens per row, at the end of its context."""
    context: int
    shared: int = 0
    """Tokens at the start of the context whose blocks all rows share."""

    def bytes_read(self, plan: MemoryPlan) -> float:
        """Return the bytes of all weights, and of the keys and values from earlier steps."""
        kept = plan.block_bytes / plan.block_size
        num_tokens = self.shared + self.num_rows * (self.context - self.shared - self.num_tokens)
        return float(plan.weights_bytes + num_tokens * kept)

    def operations(self) -> float:
        """Count multiplications and additions: matrices, causal attention, and one token per row in the LM head.

        In the last layer all tokens need keys and values, but only those that draw need anything else.
        """
        tokens, layers = self.num_rows * self.num_tokens, SHAPE["num_hidden_layers"]
        seen = self.num_rows * sum(range(self.context - self.num_tokens + 1, self.context + 1))
        of_key = 4 * SHAPE["num_attention_heads"] * SHAPE["head_dim"]
        attention = of_key * (seen * (layers - 1) + self.num_rows * self.context)
        keys, others = _layer_weights()
        matrices = 2 * (tokens * (keys * layers + others * (layers - 1)) + self.num_rows * others)
        head = 2 * SHAPE["vocab_size"] * SHAPE["hidden_size"] * self.num_rows
        return float(matrices + attention + head)


def _layer_weights() -> tuple[int, int]:
    """Count the elements of the matrices of a layer: those that make keys and values, and the others."""
    hidden, mlp, width = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    heads, kv_heads = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"]
    return int(hidden * width * 2 * kv_heads), int(hidden * width * 2 * heads + 3 * hidden * mlp)


FORMATS = {"bf16": None, "int8": "int8", "int4": "int4"}
"""Formats of weights, and how dummy weights get them."""


@attrs.frozen
class Setting:
    """What is measured."""

    executor: str = "auto"
    format: str = "bf16"
    activations: str = "auto"
    kv_cache_dtype: str = "auto"
    context: int = CONTEXT
    streams: Sequence[int] = STREAMS
    shared: int = 0

    def works(self) -> list[Work]:
        """Return what is measured."""
        decodes = [Work(f"decode_{rows}", rows, 1, self.context + self.shared) for rows in self.streams]
        if not self.shared:
            return [*decodes, Work("prefill_1024", 1, PREFILL, PREFILL)]
        several = [work for work in decodes if work.num_rows > 1]
        return [
            each
            for work in several
            for each in (work, attrs.evolve(work, name=f"{work.name}, shared", shared=self.shared))
        ]

    @property
    def max_num_seqs(self) -> int:
        return max(self.streams)

    @property
    def max_model_len(self) -> int:
        return max(PREFILL, self.context + self.shared)

    @property
    def num_blocks(self) -> int:
        """Blocks for all rows and the null block."""
        return 1 + max(self.max_num_seqs * (self.context + self.shared), PREFILL) // BLOCK_SIZE


def make_batch(work: Work, num_blocks: int = Setting().num_blocks) -> StepBatch:
    """Make greedy rows with scattered blocks."""
    draw = random.Random(work.name)
    blocks = list(range(1, num_blocks))
    draw.shuffle(blocks)
    count, per_row = work.num_rows, work.context // BLOCK_SIZE
    return StepBatch(
        slots=list(range(count)),
        query_start=[row * work.num_tokens for row in range(count + 1)],
        positions=[work.context - work.num_tokens] * count,
        token_ids=[draw.randrange(SHAPE["vocab_size"]) for _ in range(count * work.num_tokens)],
        block_tables=[
            blocks[: work.shared // BLOCK_SIZE]
            + blocks[row * per_row + work.shared // BLOCK_SIZE : (row + 1) * per_row]
            for row in range(count)
        ],
        samples=[True] * count,
    )
