"""Parsing mixtures of experts: as Qwen and OLMoE name their entries, and as DeepSeek does."""

from __future__ import annotations

from typing import Any

import attrs

from .config import flag, positive, positive_number, whole
from .config_parts import ExpertChoice, MoeConfig


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
        normalise=flag(data, "norm_topk_prob", default=False),
        dense_layers=frozenset(index for index in range(num_layers) if index in dense or (index + 1) % step),
    )


def parse_sigmoid_moe(data: dict[str, Any], *, normalise: bool, **defaults: int | float) -> MoeConfig:
    """Parse a mixture of experts that are chosen by sigmoids and biases (`topk_method` `noaux_tc`). Raises ValueError.

    `defaults` are those of absent entries.
    """
    check_values(data, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    data = {**defaults, **data}
    choice = with_groups(data, ExpertChoice(is_sigmoid=True, factor=read_factor(data)))
    return parse_grouped_moe(data, choice, normalise=normalise)


def parse_grouped_moe(data: dict[str, Any], choice: ExpertChoice, *, normalise: bool) -> MoeConfig:
    """Parse a mixture of experts as DeepSeek names its entries. Raises ValueError."""
    num_experts, num_chosen = positive(data, "n_routed_experts"), positive(data, "num_experts_per_tok")
    group = num_experts // choice.num_groups
    if num_experts % choice.num_groups or (choice.is_sigmoid and group < 2):
        raise ValueError(f"config.json: n_group is {choice.num_groups}, must divide n_routed_experts {num_experts}")
    if num_chosen > group * choice.num_chosen_groups:
        raise ValueError(
            f"config.json: num_experts_per_tok is {num_chosen}, must not exceed the {group * choice.num_chosen_groups} "
            "experts that may be chosen from"
        )
    size, num_layers = positive(data, "moe_intermediate_size"), positive(data, "num_hidden_layers")
    num_shared = whole(data, "n_shared_experts")
    return MoeConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=size,
        normalise=normalise,
        dense_layers=frozenset(range(min(num_layers, whole(data, "first_k_dense_replace")))),
        shared_intermediate_size=size * num_shared or None,
        scores_shared=False,
        choice=choice,
    )


def with_groups(data: dict[str, Any], choice: ExpertChoice) -> ExpertChoice:
    """Return the same choice from `topk_group` of `n_group` groups. Raises ValueError."""
    groups, chosen = positive(data, "n_group"), positive(data, "topk_group")
    if chosen > groups:
        raise ValueError(f"config.json: topk_group is {chosen}, must not exceed n_group {groups}")
    return attrs.evolve(choice, num_groups=groups, num_chosen_groups=chosen)


def read_factor(data: dict[str, Any]) -> float:
    """Read the factor of experts' weights. Raises ValueError."""
    factor = positive_number(data, "routed_scaling_factor", default=1.0)
    return 1.0 if factor is None else factor


def read_num_ignored(data: dict[str, Any]) -> int:
    """Read how many layers for multi-token prediction a checkpoint has, in either spelling. Raises ValueError."""
    name = "num_nextn_predict_layers" if "num_nextn_predict_layers" in data else "num_mtp_layers"
    return 0 if data.get(name, 1) is None else whole({"num_mtp_layers": 1, **data}, name)


def check_values(data: dict[str, Any], **computed: object) -> None:
    """Raises ValueError for an entry with another value than what is computed."""
    for name, value in computed.items():
        if data.get(name) not in (None, value):
            raise ValueError(
                f"config.json: {name} {data[name]!r} is not supported for this architecture, only {value!r}"
            )
