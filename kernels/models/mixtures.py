"""Parsing mixtures of experts, as Qwen and OLMoE name their entries."""

from __future__ import annotations

from typing import Any

from .config import MoeConfig, positive


def parse_moe(data: dict[str, Any], num_layers: int) -> MoeConfig:
    """Parse the mixture of experts. Newer files call `num_experts` `num_local_experts`. Raises ValueError."""
    num_experts = positive(data, "num_local_experts" if "num_local_experts" in data else "num_experts")
    num_chosen = positive(data, "num_experts_per_tok")
    if num_chosen > num_experts:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_chosen}, must not exceed the number of experts, {num_experts}"
        )
    step = positive(data, "decoder_sparse_step", default=1)
    dense = {int(index) for index in data.get("mlp_only_layers") or ()}
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=positive(data, "moe_intermediate_size"),
        normalise=bool(data.get("norm_topk_prob", False)),
        dense_layers=frozenset(index for index in range(num_layers) if index in dense or (index + 1) % step),
    )
