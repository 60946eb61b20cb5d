"""Gemma 2 and the text part of Gemma 3 (Gemma Team, arXiv:2408.00118 and 2503.19786), from config to logits.

Norms before and after attention and MLP, with weights 1 + w; scaled embeddings; GELU; soft caps on logits. Gemma 2 caps
attention scores, too, and has a window in every second layer. Gemma 3 norms query and key heads, and has a window and
another rotary embedding in five layers of six.

Every operation goes through `Ops`, in whose shape letters names end; this file knows nothing of batches, blocks or
devices.

What must always hold: a token's row depends on other tokens only through `ops.attend`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig, positive, positive_number, read_sizes, read_windows
from .parts import Attention, Mlp, project_heads, read_attention, read_embeddings, read_gemma_norm, read_mlp
from .rope import make_rope_table
from .rope_config import Rope, parse_rope, rope_entries


def parse_gemma2(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Soft caps and windows default to those of Gemma 2 9B."""
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    alternating = ["full_attention" if index % 2 else "sliding_attention" for index in range(sizes["num_layers"])]
    return DecoderConfig(
        **sizes,
        rope=parse_rope(data, head_dim=sizes["head_dim"]),
        windows=read_windows(data, alternating, 4096),
        attention_scale=_read_scale(data),
        attention_soft_cap=positive_number(data, "attn_logit_softcapping", default=50.0),
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=30.0),
    )


def parse_gemma3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. By default every sixth layer has no window."""
    sizes = read_sizes(data, default_head_dim=256, tied=True)
    every = positive(data, "sliding_window_pattern", default=6)
    pattern = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(sizes["num_layers"])]
    rope, local_rope = _parse_ropes(data, sizes["head_dim"])
    return DecoderConfig(
        **sizes,
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(data, pattern, 4096),
        norms_heads=True,
        attention_scale=_read_scale(data),
        logits_soft_cap=positive_number(data, "final_logit_softcapping", default=None),
    )


def _read_scale(data: dict[str, Any]) -> float:
    return float(positive(data, "query_pre_attn_scalar", default=256) ** -0.5)


def _parse_ropes(data: dict[str, Any], head_dim: int) -> tuple[Rope, Rope]:
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
    post_attention_layernorm_D: torch.Tensor
    pre_feedforward_layernorm_D: torch.Tensor
    mlp: Mlp
    post_feedforward_layernorm_D: torch.Tensor


class Gemma:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        self.config = config
        self.rope = make_rope_table(config.rope, num_positions)
        is_alike = config.local_rope == config.rope
        self.local_rope = self.rope if is_alike else make_rope_table(config.local_rope, num_positions)
        self.embeddings = read_embeddings(weights, config)
        self.layers = [self._read_layer(weights, f"model.layers.{index}.") for index in range(config.num_layers)]
        self.norm_D = read_gemma_norm(weights, "model.norm.weight", config.hidden_size)

    def _read_layer(self, weights: Weights, prefix: str) -> Layer:
        D, F = self.config.hidden_size, self.config.intermediate_size
        return Layer(
            input_layernorm_D=read_gemma_norm(weights, prefix + "input_layernorm.weight", D),
            attention=read_attention(weights, prefix + "self_attn.", self.config, read_norm=read_gemma_norm),
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
            q_NHE, k_NKE, v_NKE = project_heads(h_ND, layer.attention, c, ops)
            rope = self.rope if c.windows[index] is None else self.local_rope
            q_NHE, k_NKE = ops.rope(q_NHE, rope), ops.rope(k_NKE, rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(
                index, q_NHE, scale=c.attention_scale, window=c.windows[index], soft_cap=c.attention_soft_cap
            )
            y_ND = ops.linear(o_NHE.flatten(1), layer.attention.o_DI, layer.attention.o_bias_D)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.post_attention_layernorm_D, c.rms_norm_eps))
            h_ND = ops.rms_norm(x_ND, layer.pre_feedforward_layernorm_D, c.rms_norm_eps)
            y_ND = ops.linear(ops.gelu_mul(ops.linear(h_ND, layer.mlp.gate_up_OD)), layer.mlp.down_DF)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.post_feedforward_layernorm_D, c.rms_norm_eps))
        return x_ND

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm; return the final hidden states, h_ND."""
        return ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm, the output head and the soft cap; return logits_NV."""
        logits_NV = ops.linear(self.states(x_ND, ops), self.embeddings.head_VD)
        cap = self.config.logits_soft_cap
        return logits_NV if cap is None else ops.soft_cap(logits_NV, cap)
