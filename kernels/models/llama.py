"""Llama 2 and 3 (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783), from config to logits.

Reads from top to bottom: configuration, weights, layers, logits. Every operation goes through `Ops`, in whose shape
letters names end; this file knows nothing of batches, blocks or devices.

What must always hold: a token's row depends on other tokens only through `ops.attend`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig, read_sizes, same_window
from .parts import Attention, Mlp, read_attention, read_embeddings, read_mlp, split_heads
from .refusals import check_entries
from .rope import make_rope_table
from .rope_config import parse_rope

READ = "attention_bias"


def parse_llama(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Raises ValueError for an entry that is missing or not supported."""
    check_entries(data, read=READ)
    sizes = read_sizes(data, every_head_its_kv=True)
    rope = parse_rope(data, head_dim=sizes["head_dim"])
    bias = bool(data.get("attention_bias", False))
    return DecoderConfig(
        **sizes,
        architecture="LlamaForCausalLM",
        rope=rope,
        local_rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        windows=same_window(data, None),
        attention_scale=sizes["head_dim"] ** -0.5,
    )


@attrs.frozen
class Layer:
    """Weights of one layer."""

    input_layernorm_D: torch.Tensor
    attention: Attention
    post_attention_layernorm_D: torch.Tensor
    mlp: Mlp


class Llama:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        c = config
        self.config = c
        self.rope = make_rope_table(c.rope, num_positions)
        self.embeddings = read_embeddings(weights, c)
        self.layers = [self._read_layer(weights, f"model.layers.{i}.") for i in range(c.num_layers)]
        self.norm_D = weights.tensor("model.norm.weight", (c.hidden_size,))

    def _read_layer(self, weights: Weights, prefix: str) -> Layer:
        D, F = self.config.hidden_size, self.config.intermediate_size
        return Layer(
            input_layernorm_D=weights.tensor(prefix + "input_layernorm.weight", (D,)),
            attention=read_attention(weights, prefix + "self_attn.", self.config),
            post_attention_layernorm_D=weights.tensor(prefix + "post_attention_layernorm.weight", (D,)),
            mlp=read_mlp(weights, prefix + "mlp.", D, F),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.input_layernorm_D, c.rms_norm_eps)
            qkv_NO = ops.linear(h_ND, layer.attention.qkv_OD, layer.attention.qkv_bias_O)
            q_NHE, k_NKE, v_NKE = split_heads(qkv_NO, c)
            q_NHE, k_NKE = ops.rope(q_NHE, self.rope), ops.rope(k_NKE, self.rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(index, q_NHE, scale=c.attention_scale)
            x_ND = ops.add(x_ND, ops.linear(o_NHE.flatten(1), layer.attention.o_DI, layer.attention.o_bias_D))
            h_ND = ops.rms_norm(x_ND, layer.post_attention_layernorm_D, c.rms_norm_eps)
            x_ND = ops.add(x_ND, ops.linear(ops.silu_mul(ops.linear(h_ND, layer.mlp.gate_up_OD)), layer.mlp.down_DF))
        return x_ND

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head; return logits_NV."""
        return ops.linear(ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps), self.embeddings.head_VD)
