"""What passes at start show of a model: which heads each layer has, and that its logits are its own.

`transformers_backend.py` calls `watch` before it allocates a cache and `compare` before it serves.

What must always hold: a model that is served has the logits that transformers computes for a whole prompt, although the
prompt is computed in chunks beside another one; so nothing of it looks at neighbours, or keeps a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..batch import ImageTokens, StepBatch
from ..kv_cache import BlockShape, KVCache
from ..step_types import PromptImage
from .causal_head import SplitModel
from .packed_rows import PackedRows
from .paged_attention import Unsupported
from .transformers_loading import Loaded

_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Of a token's logits, relative to their spread: attention that adds in another order, in these dtypes."""
_FIRST, _SECOND, _BESIDE = 7, 5, 4
"""Tokens of the prompt's chunks, and of the one beside it, which has one more in the second pass."""
_IMAGES = ((1, 6), (8, 11))
"""Tokens of the prompt that are taken for images' if such attend to one another, whatever their embeddings are."""


@torch.inference_mode()
def watch(loaded: Loaded, split: SplitModel, block_size: int, kv_dtype: torch.dtype) -> BlockShape:
    """Return the shape of the cache's blocks: all layers have the heads of the largest.

    Raises ValueError for a model whose attention is not computed here.
    """
    tokens_1N = torch.zeros(1, 3, dtype=torch.int64, device=loaded.device)
    positions_1N = torch.arange(3, device=loaded.device).unsqueeze(0)
    try:
        with loaded.attention.watched() as watched:
            split.hidden_states(tokens_1N, positions_1N)
    except Unsupported as error:
        raise ValueError(f"{loaded.named} needs {error}, which the transformers executor does not compute") from None
    except Exception as error:  # of a model that does something with masks, caches or shapes that there are not
        raise ValueError(f"{loaded.named} cannot be run with attention of ours: {error or repr(error)}") from error
    num_layers = int(loaded.model.config.get_text_config().num_hidden_layers)
    if sorted(watched.layers) != list(range(num_layers)):
        raise ValueError(
            f"{loaded.named} calls attention in {len(watched.layers)} of {num_layers} layers: what the others keep "
            f"cannot be in blocks"
        )
    heads = watched.layers.values()
    return BlockShape(
        num_layers=num_layers,
        num_kv_heads=max(head.num_kv_heads for head in heads),
        block_size=block_size,
        head_dim=max(max(head.key_dim, head.value_dim) for head in heads),
        dtype=kv_dtype,
    )


@torch.inference_mode()
def compare(loaded: Loaded, split: SplitModel, block: BlockShape) -> None:
    """Raises ValueError if logits of chunks, packed with others, are not those of the whole prompt alone."""
    vocab_size = int(loaded.model.config.get_text_config().vocab_size)
    tokens = torch.randint(vocab_size, (2, _FIRST + _SECOND), generator=torch.Generator().manual_seed(3)).tolist()
    prompt, beside = tokens[0], tokens[1][: _BESIDE + 1]
    try:
        ours = _in_chunks(loaded, split, block, prompt, beside)
        theirs = _alone(loaded, prompt, _IMAGES), _alone(loaded, beside)
    except Exception as error:  # what a model does in its second pass, or with attention of its own
        raise ValueError(f"{loaded.named} cannot be run with attention of ours: {error or repr(error)}") from error
    expected = (
        torch.cat([theirs[0][:_FIRST], theirs[1][:_BESIDE]]),
        torch.cat([theirs[0][_FIRST:], theirs[1][_BESIDE:]]),
    )
    difference = max(_difference(one, other) for one, other in zip(ours, expected, strict=True))
    allowed = _TOLERANCES[loaded.dtype]
    if not difference <= allowed:
        raise ValueError(
            f"{loaded.named}: logits of a prompt in chunks beside another differ from those of the whole prompt alone "
            f"by {difference:.2g} of their spread ({allowed:g} is allowed): the model computes a token by more than "
            f"its position and the keys and values before it, or has attention of its own"
        )


def _in_chunks(
    loaded: Loaded, split: SplitModel, block: BlockShape, prompt: list[int], beside: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of two passes: of a first chunk and a prompt beside it, then of the rest of both."""
    size = block.block_size
    num_blocks = [-(-len(tokens) // size) for tokens in (prompt, beside)]
    cache = KVCache(1 + sum(num_blocks), block, loaded.device)
    cache.fill(float("nan"))
    tables = list(range(num_blocks[0], 0, -1)), list(range(sum(num_blocks), num_blocks[0], -1))
    logits = []
    for first, second, places in (
        (prompt[:_FIRST], beside[:_BESIDE], (0, 0)),
        (prompt[_FIRST:], beside[_BESIDE:], (_FIRST, _BESIDE)),
    ):
        batch = StepBatch(
            slots=[0, 1],
            query_start=[0, len(first), len(first) + len(second)],
            positions=list(places),
            token_ids=[*first, *second],
            block_tables=list(tables),
            samples=[True, True],
            images=[
                ImageTokens(PromptImage(b"", b"", 0, 0, end - start), 0, 0, start - places[0], end - start)
                for start, end in _IMAGES
                if places[0] <= start < places[0] + len(first)
            ],
        )
        rows = PackedRows(batch, [None, None], size, loaded.device, whole_images=loaded.whole_images)
        with loaded.attention.over(rows, cache):
            hidden = split.hidden_states(rows.token_ids_1N, rows.positions_1N)
        logits.append(hidden.logits(list(range(len(batch.token_ids)))))
    return logits[0], logits[1]


def _alone(loaded: Loaded, tokens: list[int], images: Sequence[tuple[int, int]] = ()) -> torch.Tensor:
    """Return the logits that transformers computes with the model's own attention."""
    model: Any = loaded.model
    loaded.attend_with("eager")
    try:
        ids_1N = torch.tensor([tokens], device=loaded.device)
        kinds_1N = torch.zeros_like(ids_1N)
        for start, end in images:
            kinds_1N[:, start:end] = 1
        told = {"token_type_ids": kinds_1N} if loaded.whole_images else {}
        logits_NV: torch.Tensor = model(input_ids=ids_1N, use_cache=False, **told).logits[0].to("cpu", torch.float32)
    finally:
        loaded.attend_with(loaded.attention.name)
    return logits_NV


def _difference(ours_NV: torch.Tensor, theirs_NV: torch.Tensor) -> float:
    """Return the median over tokens of how far logits differ, relative to their spread over the vocabulary."""
    spread_N = (theirs_NV - theirs_NV.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((ours_NV - theirs_NV).norm(dim=-1) / spread_N).median())
