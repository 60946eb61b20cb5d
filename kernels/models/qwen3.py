"""Qwen3, dense (Qwen Team, arXiv:2505.09388), from config to logits: a Llama whose query and key heads are normed.

Read top to bottom: numbers, weights, one layer, the network. Every operation goes through `Ops`, whose shape letters
the names here carry; this file knows neither batches nor blocks nor devices.

What must always hold: a token's row meets other tokens only inside `ops.attend`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from quipu.kernels.models.config import DecoderConfig, parse_config
from quipu.kernels.models.rope import RopeTable
from quipu.kernels.ops import Ops
from quipu.kernels.weights import Weights


def parse_qwen3(data: dict[str, Any]) -> DecoderConfig:
    """Raises ValueError for what is missing or not computed.

    An absent `head_dim` is 128, as in transformers' own configuration class, not hidden size over heads.
    """
    return parse_config(data, architecture="Qwen3ForCausalLM", default_head_dim=128)


@attrs.frozen
class Layer:
    """One block's weights; q, k and v are fused by rows, and so are gate and up."""

    attention_norm_D: torch.Tensor
    qkv_OD: torch.Tensor
    qkv_bias_O: torch.Tensor | None
    q_norm_E: torch.Tensor
    k_norm_E: torch.Tensor
    o_DI: torch.Tensor
    o_bias_D: torch.Tensor | None
    mlp_norm_D: torch.Tensor
    gate_up_OD: torch.Tensor
    down_DF: torch.Tensor


class Qwen3:
    """The network."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        c = config
        self.config = c
        self.rope = RopeTable(c, num_positions)
        self.embed_VD = weights.tensor("model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
        self.layers = [self._read_layer(weights, f"model.layers.{i}.") for i in range(c.num_layers)]
        self.norm_D = weights.tensor("model.norm.weight", (c.hidden_size,))
        self.head_VD = (
            self.embed_VD if c.tie_word_embeddings else weights.tensor("lm_head.weight", (c.vocab_size, c.hidden_size))
        )

    def _read_layer(self, weights: Weights, prefix: str) -> Layer:
        c = self.config
        D, F, Q, KV = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = [(attention + "q_proj", Q), (attention + "k_proj", KV), (attention + "v_proj", KV)]
        return Layer(
            attention_norm_D=weights.tensor(prefix + "input_layernorm.weight", (D,)),
            qkv_OD=weights.fused([(name + ".weight", (rows, D)) for name, rows in qkv]),
            qkv_bias_O=weights.fused([(name + ".bias", (rows,)) for name, rows in qkv]) if c.attention_bias else None,
            q_norm_E=weights.tensor(attention + "q_norm.weight", (c.head_dim,)),
            k_norm_E=weights.tensor(attention + "k_norm.weight", (c.head_dim,)),
            o_DI=weights.tensor(attention + "o_proj.weight", (D, Q)),
            o_bias_D=weights.tensor(attention + "o_proj.bias", (D,)) if c.attention_bias else None,
            mlp_norm_D=weights.tensor(prefix + "post_attention_layernorm.weight", (D,)),
            gate_up_OD=weights.fused([(mlp + "gate_proj.weight", (F, D)), (mlp + "up_proj.weight", (F, D))]),
            down_DF=weights.tensor(mlp + "down_proj.weight", (D, F)),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """All layers: x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embed_VD)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.attention_norm_D, c.rms_norm_eps)
            qkv_NO = ops.linear(h_ND, layer.qkv_OD, layer.qkv_bias_O)
            heads = qkv_NO.view(qkv_NO.shape[0], -1, c.head_dim)
            q_NHE, k_NKE, v_NKE = torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
            q_NHE = ops.rope(ops.rms_norm(q_NHE, layer.q_norm_E, c.rms_norm_eps), self.rope)
            k_NKE = ops.rope(ops.rms_norm(k_NKE, layer.k_norm_E, c.rms_norm_eps), self.rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(index, q_NHE, scale=c.head_dim**-0.5)
            x_ND = ops.add(x_ND, ops.linear(o_NHE.flatten(1), layer.o_DI, layer.o_bias_D))
            h_ND = ops.rms_norm(x_ND, layer.mlp_norm_D, c.rms_norm_eps)
            x_ND = ops.add(x_ND, ops.linear(ops.silu_mul(ops.linear(h_ND, layer.gate_up_OD)), layer.down_DF))
        return x_ND

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Final norm and head: logits_NV."""
        return ops.linear(ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps), self.head_VD)
