"""What transformers calls in the place of its own attention and masks: keys and values go to our blocks.

One `PagedAttention` a backend, registered with transformers under a name of its own. Around each pass the backend says
which rows are computed over which cache (`over`); before the first one it has a pass watched (`watched`), which
computes nothing but learns what each layer asks for. `start_checks.py` compares the results.

What must always hold: what a layer asks for while it is watched is either computed here or refused by name; a layer
that asks for something else later ends the pass; each layer writes and reads its own part of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import attrs
import torch

from ..kv_cache import KVCache
from .attention_products import Scores, attend
from .packed_rows import PackedRows, Reads

_NUMBERS = count()
_COMPUTED = frozenset({"scaling", "sliding_window", "softcap", "s_aux"})
"""Arguments of an attention function that change results, and are computed..."""
_CHECKED = frozenset({"dropout", "is_causal"})
"""...that must have one value..."""
_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"})
"""...and those that only kernels for packed sequences read, or nobody."""


@attrs.frozen
class LayerMask:
    """What transformers is given in the place of a mask."""

    window: int | None
    """How many tokens a token sees, itself included; None: all before it."""


@attrs.frozen
class HeadShape:
    """The heads of one layer."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


@attrs.define
class Watched:
    """What layers have asked for in a pass that was watched."""

    layers: dict[int, HeadShape] = attrs.field(factory=dict)
    windows: set[int | None] = attrs.field(factory=set)


class Unsupported(ValueError):
    """A layer asks for attention that is not computed here. The message says for what."""


class PagedAttention:
    """Implements transformers' interfaces of attention and of masks."""

    def __init__(self) -> None:
        """Register both. transformers must be installed."""
        from transformers import AttentionInterface, AttentionMaskInterface

        self.name = f"quipu_paged_{next(_NUMBERS)}"
        self._watched: Watched | None = None
        self._pass: tuple[PackedRows, KVCache] | None = None
        self._windows: frozenset[int | None] = frozenset()
        self._kept: list[torch.Tensor | None] = [None, None]
        """Memory for the keys and the values that some rows read."""
        AttentionInterface.register(self.name, self._attend)
        AttentionMaskInterface.register(self.name, self._mask)

    @contextmanager
    def watched(self) -> Iterator[Watched]:
        """Have passes within the context watched: attention returns zeros."""
        self._watched = Watched()
        try:
            yield self._watched
            self._windows = frozenset(self._watched.windows)
        finally:
            self._watched = None

    @contextmanager
    def over(self, rows: PackedRows, cache: KVCache) -> Iterator[None]:
        """Compute a pass within the context over these rows and this cache."""
        self._pass = rows, cache
        try:
            yield
        finally:
            self._pass = None

    def close(self) -> None:
        """Free memory; transformers keeps this object."""
        self._kept = [None, None]

    def _mask(
        self, *, mask_function: Any, local_size: int | None = None, use_vmap: bool = False, **_: Any
    ) -> LayerMask:
        """Return what stands for a mask that transformers asks for."""
        if self._watched is not None:
            if use_vmap or not _is_window(mask_function, local_size):
                raise Unsupported("a mask that is neither causal nor a sliding window")
            self._watched.windows.add(local_size)
        elif local_size not in self._windows:
            raise RuntimeError(f"a layer asks for a window of {local_size}, which none did at start")
        return LayerMask(local_size)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute attention of a layer: o_1NHF, of q_1HNE, k_1KNE and v_1KNF."""
        q_HNE, k_KNE, v_KNF = query[0], key[0], value[0]
        if self._watched is not None:
            self._watch(self._watched, module, key, value, attention_mask, arguments)
            return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
        assert self._pass is not None and isinstance(attention_mask, LayerMask)
        rows, cache = self._pass
        scale, sinks = arguments.get("scaling"), arguments.get("s_aux")
        scores = Scores(q_HNE.shape[2] ** -0.5 if scale is None else float(scale), arguments.get("softcap"), sinks)
        keys, values = cache[int(module.layer_idx)]  # type: ignore[arg-type]  # was watched to be a number
        _write(keys, rows, k_KNE)
        _write(values, rows, v_KNF)
        o_NHF = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
        for reads in rows.reads(attention_mask.window):
            q_RHnE = q_HNE[:, reads.tokens_Rn].transpose(0, 1)
            k_RKCE, v_RKCF = self._read(0, keys, reads, k_KNE), self._read(1, values, reads, v_KNF)
            o_RHnF = attend(q_RHnE, k_RKCE, v_RKCF, reads.hidden_RnC, scores)
            o_NHF[reads.tokens_Rn.flatten()] = o_RHnF.transpose(1, 2).flatten(0, 1)
        return o_NHF.unsqueeze(0), None

    def _read(self, place: int, cache_BKSE: torch.Tensor, reads: Reads, like_KNE: torch.Tensor) -> torch.Tensor:
        """Return what rows read, `[R, K, C, E]`, in the shape and dtype of a layer's heads, until `place` is reused."""
        (num_rows, num_blocks), (num_heads, _, width) = reads.blocks_RB.shape, like_KNE.shape
        held_heads, size, held_width = cache_BKSE.shape[1:]
        heads_K1 = torch.arange(num_heads, device=cache_BKSE.device).unsqueeze(1)
        parts_P = (reads.blocks_RB.unsqueeze(1) * held_heads + heads_K1).flatten()
        kept = self._kept[place]
        if kept is None or len(kept) < len(parts_P):
            # new pages of the system for each layer took longer than the copy
            kept = self._kept[place] = cache_BKSE.new_empty(len(parts_P), size * held_width)
        held_Px = kept[: len(parts_P)]
        # one copy of whole parts of blocks, in the order in which they are multiplied
        torch.index_select(cache_BKSE.view(-1, size * held_width), 0, parts_P, out=held_Px)
        held_RKCE = held_Px.view(num_rows, num_heads, num_blocks * size, held_width)
        held_RKCE = held_RKCE[:, :, reads.first : reads.end, :width]
        if reads.unwritten is not None:
            held_RKCE.transpose(1, 2)[reads.unwritten] = 0.0  # a weight of 0 times NaN is NaN
        return held_RKCE.to(like_KNE.dtype)

    def _watch(
        self, watched: Watched, module: Any, key: torch.Tensor, value: torch.Tensor, mask: object, arguments: Any
    ) -> None:
        """Note the shape of a layer. Raises Unsupported."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Unsupported("attention of a layer without a number (layer_idx)")
        if layer in watched.layers:
            raise Unsupported(f"attention more than once in layer {layer}")
        if not isinstance(mask, LayerMask):
            raise Unsupported("masks of the model's own")
        for name, argument in arguments.items():
            ok = argument is None or argument is False or name in _COMPUTED or name in _WITHOUT_EFFECT
            if name in _CHECKED:
                ok = argument in (None, True) if name == "is_causal" else not argument
            if not ok:
                raise Unsupported(f"attention with {name}")
        window = arguments.get("sliding_window")
        if window is not None and window != mask.window:
            raise Unsupported(f"attention with a window of {window} and a mask of {mask.window}")
        if key.shape[:3] != value.shape[:3] or len(key) != 1:
            raise Unsupported(f"keys of shape {tuple(key.shape)} with values of shape {tuple(value.shape)}")
        watched.layers[layer] = HeadShape(key.shape[1], key.shape[3], value.shape[3])


def _is_window(mask_function: Any, window: int | None) -> bool:
    """Return whether a mask shows each token itself and the `window` - 1 before it, or all before it."""
    edge = 4 if window is None else window
    places = torch.tensor(sorted({0, 1, 2, 3, *range(max(0, edge - 2), edge + 3), 2 * edge, 2 * edge + 1}))
    zero = torch.tensor(0)
    shown_QC = mask_function(zero, zero, places.unsqueeze(1), places.unsqueeze(0))
    distance_QC = places.unsqueeze(1) - places.unsqueeze(0)
    expected_QC = (distance_QC >= 0) & ((distance_QC < window) if window is not None else torch.tensor(True))
    return torch.equal(torch.as_tensor(shown_QC).expand_as(expected_QC), expected_QC)


def _write(cache_BKSE: torch.Tensor, rows: PackedRows, new_KNE: torch.Tensor) -> None:
    """Write each token's heads to its slot; the cache may have more and larger heads."""
    num_heads, width = new_KNE.shape[0], new_KNE.shape[2]
    new_NKE = new_KNE.transpose(0, 1).to(cache_BKSE.dtype)
    cache_BKSE[rows.blocks_N, :num_heads, rows.offsets_N, :width] = new_NKE
