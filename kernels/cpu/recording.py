"""Turns a model into a program for the kernels: a list of C structs, which one library call replays.

The model runs once on a `Recorder`. Then calls that one kernel can do together are fused (`fusing.py`), operations that
only sampling needs are narrowed to the sampled rows (`narrowing.py`), results that only bfloat16 products read are
stored as bfloat16 (`rounding.py`), and each value gets memory for the maximum number of rows (`layout.py`).
`cpu_backend.py` is the only caller.

What must always hold: a program refers to no memory that it does not keep.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ..kv_cache import KVCache
from ..models.families import Model
from .adapted_products import AdaptedProducts
from .call_recorder import ROWS
from .fusing import fuse
from .layout import compile_op, join_heads, lay_out, remove_barriers
from .narrowing import narrowed, through_last_attention
from .packing import PackedWeights
from .program import Bounds, Op
from .recorded import Program, RecordedOp
from .recorder import Recorder
from .rounding import store_rounded


def record(
    model: Model,
    weights: PackedWeights,
    cache: KVCache,
    bounds: Bounds,
    adapters: AdaptedProducts | None = None,
    shared: Sequence[torch.Tensor] = (),
) -> Program:
    """Record the program of a model, for passes within these bounds, or of passes with adapters.

    `shared`: the workspace of another program of this model, which never runs at the same time.
    """
    recorder = Recorder(weights, cache, bounds, adapters)
    x_ND = model.forward(torch.zeros(ROWS, dtype=torch.int64), recorder)
    num_trunk = len(recorder.recorded)
    model.logits(recorder.start_head(x_ND), recorder)
    trunk, head = fuse(recorder.recorded[:num_trunk]), fuse(recorder.recorded[num_trunk:])
    keys, logits = through_last_attention(trunk), head[-1].y.value
    after = trunk[len(keys) :]
    narrow = narrowed([*after, *head], logits, recorder.values)
    for part in ([*keys, *narrow], trunk, head):
        remove_barriers(part)
    if weights.multiplies_pairs:
        store_rounded([*keys, *narrow, *trunk, *head], recorder.values)
    kept = {logits, *head[0].read}  # the head may run again for other tokens
    memory = lay_out([*keys, *narrow, *after, *head], recorder.values, bounds, kept, shared)

    def array(calls: list[RecordedOp]) -> ctypes.Array[Op]:
        ops = (Op * len(calls))(*(compile_op(call, recorder.values.widths, memory) for call in calls))
        join_heads(ops, calls)
        return ops

    return Program(
        keys=array(keys),
        draw=array([*keys, *narrow]),
        trunk=array(trunk),
        head=array(head),
        logits_MV=memory[logits][: bounds.num_logits * recorder.values.widths[logits]].view(bounds.num_logits, -1),
        memory=[*memory.values(), *recorder.memory],
        workspace=list({id(tensor): tensor for tensor in memory.values()}.values()),
    )
