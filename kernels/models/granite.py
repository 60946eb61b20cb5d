"""The configurations of IBM's Granite: 3 dense and with experts, and 4 as far as its layers are of attention.

Embeddings, attention scores, what a layer adds, and logits are multiplied with numbers of the configuration. Experts'
softmax is over the chosen ones. In Granite 4 each token has a shared MLP, and experts or none; layers with a recurrent
state (Mamba 2) are refused. `decoder_model.py` computes them.
"""

from __future__ import annotations

from typing import Any

import attrs

from .config import DecoderConfig, positive, positive_number, read_sizes, same_window
from .config_parts import MlpNames
from .mixtures import check_values, parse_moe
from .rope_config import parse_rope

_SHARED = MlpNames(gate_up="input_linear", down="output_linear")
_EXPERTS = "block_sparse_moe"


def parse_granite(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. All four multipliers are 1 by default.

    What a layer adds is multiplied by `residual_multiplier`, m. We keep the sum divided by m instead. That is the same,
    but for the epsilon of the norms that read it: the mean square to which it is added is smaller by m squared.
    """
    sizes = read_sizes(data, every_head_its_kv=True)
    embedding, residual, attention, logits = (
        positive_number(data, name, default=1.0) or 1.0
        for name in ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    )
    sizes["rms_norm_eps"] /= residual**2
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=same_window(data, None),
        attention_scale=attention,
        embed_scale=embedding / residual,
        embed_scale_is_exact=True,
        logits_divisor=logits,
    )


def parse_granite_moe(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`: Granite 3 whose `intermediate_size` is that of an expert."""
    config = parse_granite(data)
    width = {"moe_intermediate_size": config.intermediate_size, "norm_topk_prob": True}
    moe = attrs.evolve(parse_moe({**data, **width}, config.num_layers), router_name="router.layer")
    return attrs.evolve(config, mlp_name=_EXPERTS, moe=moe)


def parse_granite_hybrid(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Layers without a type have a recurrent state; heads are rotated if it says `rope`."""
    check_values(data, normalization_function="rmsnorm")
    types = data.get("layer_types") or ["mamba"]
    data = {**data, "layer_types": ["full_attention" if kind == "attention" else kind for kind in types]}
    position = data.get("position_embedding_type")
    if position not in (None, "nope", "rope"):
        raise ValueError(f"config.json: position_embedding_type {position!r} is not supported, only 'rope' and 'nope'")
    shared = positive(data, "shared_intermediate_size")
    if data.get("num_local_experts") == 0:
        config = attrs.evolve(parse_granite(data), intermediate_size=shared, mlp_name="shared_mlp", mlp_names=_SHARED)
    else:
        config = parse_granite_moe(data)
        assert config.moe is not None
        moe = attrs.evolve(
            config.moe,
            shared_intermediate_size=shared,
            scores_shared=False,
            shared_name="shared_mlp",
            shared_names=_SHARED,
        )
        config = attrs.evolve(config, moe=moe)
    return attrs.evolve(config, unrotated=frozenset(() if position == "rope" else range(config.num_layers)))
