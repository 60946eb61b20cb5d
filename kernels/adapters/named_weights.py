"""Which modules each matrix of a model consists of: adapters name modules, and change the products with their matrices.

`NamedWeights` sits between a checkpoint and a model's constructor. Models fuse matrices with the same input; an adapter
has matrices of its own for each part (q, k and v), or for the fused one, if the checkpoint stores it fused.

What must always hold: a model multiplies with the tensors that it was given here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import attrs
import torch

from ..checkpoints.row_slices import whole_name
from ..checkpoints.weights import Shape, Weights

_EMBEDDING, _HEAD = "model.embed_tokens", "lm_head"
_FIXED = (
    *(".mlp.gate", ".mlp.router", ".mlp.shared_expert_gate", ".feed_forward.router", ".self_attn.kv_b_proj"),
    *(".block_sparse_moe.gate", ".block_sparse_moe.router.layer", ".router.proj", ".embed_tokens_per_layer"),
)
_EXPERT = re.compile(r"\.experts\.\d+\.")


@attrs.frozen
class Part:
    """Consecutive rows of a matrix."""

    module: str
    rows: int


class NamedWeights:
    """Implements `quipu.kernels.checkpoints.weights.Weights` on top of another source."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self._parts: dict[int, tuple[torch.Tensor, tuple[Part, ...]]] = {}
        self.linear: dict[str, Shape] = {}
        """The shape of every module that adapters may change, by name."""
        self.others: set[str] = set()
        """Modules with a matrix that adapters may not change: the embedding, experts, routers, and what makes
        keys and values of latents."""

    def tensor(self, name: str, shape: Shape) -> torch.Tensor:
        return self.fused([(name, shape)])

    def fused(self, parts: list[tuple[str, Shape]]) -> torch.Tensor:
        whole = self._source.fused(parts)
        if len(parts[0][1]) == 2:
            named = [(whole_name(name).removesuffix(".weight"), shape) for name, shape in parts]
            if any(_EXPERT.search(name) or name.endswith(_FIXED) for name, _ in named):
                self.others.update(name for name, _ in named)
                return whole
            if named[0][0] == _EMBEDDING:
                # if the head is tied, models multiply with the embedding, and adapters call that the head
                self.others.add(_EMBEDDING)
                named = [(_HEAD, named[0][1])]
            self.linear.update(named)
            # the tensor is kept, too: an id is unique only while its object lives
            self._parts[id(whole)] = (whole, tuple(Part(name, shape[0]) for name, shape in named))
        return whole

    @property
    def num_bytes(self) -> int:
        return self._source.num_bytes

    def check_all_used(self, *, ignore: frozenset[str] = frozenset()) -> None:
        self._source.check_all_used(ignore=ignore)

    @property
    def matrices(self) -> Mapping[int, tuple[torch.Tensor, tuple[Part, ...]]]:
        """Every matrix that adapters may change and its parts, by the matrix's id."""
        return self._parts
