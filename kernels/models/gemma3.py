"""Gemma 3, text (Gemma Team, arXiv:2503.19786), from config to logits.

Gemma 2 without soft caps on attention scores, with normed query and key heads; five layers of six have a window, and a
rotary embedding of their own.

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
from .config import DecoderConfig, positive, positive_number, read_sizes, read_windows
from .parts import Attention, Mlp, read_attention, read_embeddings, read_gemma_norm, read_mlp, split_heads
from .refusals import check_entries
from .rope import make_rope_table
from .rope_config import Rope, parse_rope, rope_entries

READ = (
    "attention_bias query_pre_attn_scalar sliding_window sliding_window_pattern _sliding_window_pattern "
    "final_logit_softcapping rope_local_base_freq"
)


def parse_gemma3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every sixth layer has no window.

    Raises ValueError for an entry that is missing or not supported.
    """
    check_entries(data, read=READ, activation="gelu_pytorch_tanh")
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    every = positive(data, "sliding_window_pattern", default=6)
    pattern = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(sizes["num_layers"])]
    rope, local_rope = parse_ropes(data, sizes["head_dim"])
    bias = bool(data.get("attention_bias", False))
    return DecoderConfig(
        **sizes,
        architecture="Gemma3ForCausalLM",
        rope=rope,
        local_rope=local_rope,
        qkv_bias=bias,
        o_bias=bias,
        windows=read_windows(data, pattern, 4096),
        attention_scale=positive(data, "query_pre_attn_scalar", default=256) ** -0.5,
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=None),
    )


def parse_ropes(data: dict[str, Any], head_dim: int) -> tuple[Rope, Rope]:
    """Parse the rotary embeddings of full and of windowed layers. The older `rope_scaling` is for full layers only."""
    entries = rope_entries(data)
    if entries.keys() & {"full_attention", "sliding_attention"}:
        full, local = entries.get("full_attention") or {}, entries.get("sliding_attention") or {}
    else:
        full, local = {"rope_theta": data.get("rope_theta"), **entries}, {}
    thetas = (1_000_000.0, data.get("rope_local_base_freq") or 10_000.0)
    both = [
        parse_rope(data, head_dim=head_dim, entries={**one, "rope_theta": one.get("rope_theta") or theta})
        for one, theta in zip((full, local), thetas, strict=True)
    ]
    return both[0], both[1]


@attrs.frozen
class Layer:
    """Weights of one layer; 1 has been added to those of norms."""

    input_layernorm_D: torch.Tensor
    attention: Attention
    q_norm_E: torch.Tensor
    k_norm_E: torch.Tensor
    post_attention_layernorm_D: torch.Tensor
    pre_feedforward_layernorm_D: torch.Tensor
    mlp: Mlp
    post_feedforward_layernorm_D: torch.Tensor


class Gemma3:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        c = config
        self.config = c
        self.rope = make_rope_table(c.rope, num_positions)
        self.local_rope = make_rope_table(c.local_rope, num_positions)
        self.embeddings = read_embeddings(weights, c)
        self.layers = [self._read_layer(weights, f"model.layers.{i}.") for i in range(c.num_layers)]
        self.norm_D = read_gemma_norm(weights, "model.norm.weight", c.hidden_size)

    def _read_layer(self, weights: Weights, prefix: str) -> Layer:
        D, F = self.config.hidden_size, self.config.intermediate_size
        return Layer(
            input_layernorm_D=read_gemma_norm(weights, prefix + "input_layernorm.weight", D),
            attention=read_attention(weights, prefix + "self_attn.", self.config),
            q_norm_E=read_gemma_norm(weights, prefix + "self_attn.q_norm.weight", self.config.head_dim),
            k_norm_E=read_gemma_norm(weights, prefix + "self_attn.k_norm.weight", self.config.head_dim),
            post_attention_layernorm_D=read_gemma_norm(weights, prefix + "post_attention_layernorm.weight", D),
            pre_feedforward_layernorm_D=read_gemma_norm(weights, prefix + "pre_feedforward_layernorm.weight", D),
            mlp=read_mlp(weights, prefix + "mlp.", D, F),
            post_feedforward_layernorm_D=read_gemma_norm(weights, prefix + "post_feedforward_layernorm.weight", D),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD, scale=c.hidden_size**0.5)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.input_layernorm_D, c.rms_norm_eps)
            qkv_NO = ops.linear(h_ND, layer.attention.qkv_OD, layer.attention.qkv_bias_O)
            q_NHE, k_NKE, v_NKE = split_heads(qkv_NO, c)
            rope = self.rope if c.windows[index] is None else self.local_rope
            q_NHE = ops.rope(ops.rms_norm(q_NHE, layer.q_norm_E, c.rms_norm_eps), rope)
            k_NKE = ops.rope(ops.rms_norm(k_NKE, layer.k_norm_E, c.rms_norm_eps), rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(index, q_NHE, scale=c.attention_scale, window=c.windows[index])
            y_ND = ops.linear(o_NHE.flatten(1), layer.attention.o_DI, layer.attention.o_bias_D)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.post_attention_layernorm_D, c.rms_norm_eps))
            h_ND = ops.rms_norm(x_ND, layer.pre_feedforward_layernorm_D, c.rms_norm_eps)
            y_ND = ops.linear(ops.gelu_mul(ops.linear(h_ND, layer.mlp.gate_up_OD)), layer.mlp.down_DF)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.post_feedforward_layernorm_D, c.rms_norm_eps))
        return x_ND

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm, the output head and the soft cap; return logits_NV."""
        logits_NV = ops.linear(ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps), self.embeddings.head_VD)
        cap = self.config.logits_soft_cap
        return logits_NV if cap is None else ops.soft_cap(logits_NV, cap)
