"""Qwen3-MoE (Qwen Team, arXiv:2505.09388), from config to logits: a Qwen3 with a mixture of experts as MLP.

Reads from top to bottom: configuration, weights, layers, logits. Every operation goes through `Ops`, in whose shape
letters names end; this file knows nothing of batches, blocks or devices.

What must always hold: a token's row depends on other tokens only through `ops.attend`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Experts, Ops
from .config import DecoderConfig, MoeConfig, positive, read_sizes, same_window
from .parts import Attention, Mlp, read_attention, read_embeddings, read_mlp, split_heads
from .refusals import check_entries
from .rope import make_rope_table
from .rope_config import parse_rope

READ = (
    "attention_bias sliding_window use_sliding_window max_window_layers num_experts num_local_experts "
    "num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers"
)


def parse_qwen3_moe(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. A window applies to all layers.

    Raises ValueError for an entry that is missing or not supported.
    """
    check_entries(data, read=READ)
    sizes = read_sizes(data)
    window = positive(data, "sliding_window", default=4096) if data.get("use_sliding_window") else None
    rope = parse_rope(data, head_dim=sizes["head_dim"])
    bias = bool(data.get("attention_bias", False))
    return DecoderConfig(
        **sizes,
        architecture="Qwen3MoeForCausalLM",
        rope=rope,
        local_rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        windows=same_window(data, window),
        attention_scale=sizes["head_dim"] ** -0.5,
        moe=parse_moe(data, sizes["num_layers"]),
    )


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


@attrs.frozen
class Mixture:
    """The experts, and the router, whose product with a token scores them."""

    router_XD: torch.Tensor
    experts: Experts


@attrs.frozen
class Layer:
    """Weights of one layer."""

    input_layernorm_D: torch.Tensor
    attention: Attention
    q_norm_E: torch.Tensor
    k_norm_E: torch.Tensor
    post_attention_layernorm_D: torch.Tensor
    mlp: Mlp | Mixture


class Qwen3Moe:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        c = config
        self.config = c
        self.rope = make_rope_table(c.rope, num_positions)
        self.embeddings = read_embeddings(weights, c)
        self.layers = [self._read_layer(weights, i) for i in range(c.num_layers)]
        self.norm_D = weights.tensor("model.norm.weight", (c.hidden_size,))

    def _read_layer(self, weights: Weights, index: int) -> Layer:
        prefix, D = f"model.layers.{index}.", self.config.hidden_size
        return Layer(
            input_layernorm_D=weights.tensor(prefix + "input_layernorm.weight", (D,)),
            attention=read_attention(weights, prefix + "self_attn.", self.config),
            q_norm_E=weights.tensor(prefix + "self_attn.q_norm.weight", (self.config.head_dim,)),
            k_norm_E=weights.tensor(prefix + "self_attn.k_norm.weight", (self.config.head_dim,)),
            post_attention_layernorm_D=weights.tensor(prefix + "post_attention_layernorm.weight", (D,)),
            mlp=self._read_mlp(weights, prefix + "mlp.", index),
        )

    def _read_mlp(self, weights: Weights, prefix: str, index: int) -> Mlp | Mixture:
        D, moe = self.config.hidden_size, self.config.moe
        assert moe is not None, "parse_qwen3_moe sets it"
        if index in moe.dense_layers:
            return read_mlp(weights, prefix, D, self.config.intermediate_size)
        mlps = [read_mlp(weights, f"{prefix}experts.{x}.", D, moe.intermediate_size) for x in range(moe.num_experts)]
        return Mixture(
            router_XD=weights.tensor(prefix + "gate.weight", (moe.num_experts, D)),
            experts=Experts(
                gate_up_OD=[mlp.gate_up_OD for mlp in mlps],
                down_DF=[mlp.down_DF for mlp in mlps],
                num_chosen=moe.num_chosen,
                normalise=moe.normalise,
            ),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.input_layernorm_D, c.rms_norm_eps)
            qkv_NO = ops.linear(h_ND, layer.attention.qkv_OD, layer.attention.qkv_bias_O)
            q_NHE, k_NKE, v_NKE = split_heads(qkv_NO, c)
            q_NHE = ops.rope(ops.rms_norm(q_NHE, layer.q_norm_E, c.rms_norm_eps), self.rope)
            k_NKE = ops.rope(ops.rms_norm(k_NKE, layer.k_norm_E, c.rms_norm_eps), self.rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(index, q_NHE, scale=c.attention_scale, window=c.windows[index])
            x_ND = ops.add(x_ND, ops.linear(o_NHE.flatten(1), layer.attention.o_DI, layer.attention.o_bias_D))
            h_ND = ops.rms_norm(x_ND, layer.post_attention_layernorm_D, c.rms_norm_eps)
            if isinstance(layer.mlp, Mixture):
                y_ND = ops.experts(h_ND, ops.linear(h_ND, layer.mlp.router_XD), layer.mlp.experts)
            else:
                y_ND = ops.linear(ops.silu_mul(ops.linear(h_ND, layer.mlp.gate_up_OD)), layer.mlp.down_DF)
            x_ND = ops.add(x_ND, y_ND)
        return x_ND

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head; return logits_NV."""
        return ops.linear(ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps), self.embeddings.head_VD)
