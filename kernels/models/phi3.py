"""Phi-3 and Phi-4 (Microsoft, arXiv:2404.14219 and 2412.08905), from config to logits: a Llama whose
checkpoints store fused matrices, and which may rotate only a part of each head.

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
from .config import DecoderConfig, positive, read_sizes, same_window
from .parts import read_embeddings, split_heads
from .refusals import check_entries
from .rope import make_rope_table
from .rope_config import parse_rope, rope_entries

READ = "sliding_window"


def parse_phi3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. Raises ValueError for an entry that is missing or not supported.

    `su` and `yarn` in older configurations mean `longrope`, as in transformers.
    """
    check_entries(data, read=READ)
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    entries = rope_entries(data)
    if (entries.get("rope_type") or entries.get("type")) in ("su", "yarn"):
        entries["rope_type"] = "longrope"
    rope = parse_rope(data, head_dim=sizes["head_dim"], entries=entries, partial=True)
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    return DecoderConfig(
        **sizes,
        architecture="Phi3ForCausalLM",
        rope=rope,
        local_rope=rope,
        qkv_bias=False,
        o_bias=False,
        windows=same_window(data, window),
        attention_scale=sizes["head_dim"] ** -0.5,
    )


@attrs.frozen
class Layer:
    """Weights of one layer."""

    input_layernorm_D: torch.Tensor
    qkv_OD: torch.Tensor
    o_DI: torch.Tensor
    post_attention_layernorm_D: torch.Tensor
    gate_up_OD: torch.Tensor
    down_DF: torch.Tensor


class Phi3:
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
        c = self.config
        D, F, Q, KV = c.hidden_size, c.intermediate_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return Layer(
            input_layernorm_D=weights.tensor(prefix + "input_layernorm.weight", (D,)),
            qkv_OD=weights.tensor(prefix + "self_attn.qkv_proj.weight", (Q + 2 * KV, D)),
            o_DI=weights.tensor(prefix + "self_attn.o_proj.weight", (D, Q)),
            post_attention_layernorm_D=weights.tensor(prefix + "post_attention_layernorm.weight", (D,)),
            gate_up_OD=weights.tensor(prefix + "mlp.gate_up_proj.weight", (2 * F, D)),
            down_DF=weights.tensor(prefix + "mlp.down_proj.weight", (D, F)),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.input_layernorm_D, c.rms_norm_eps)
            qkv_NO = ops.linear(h_ND, layer.qkv_OD)
            q_NHE, k_NKE, v_NKE = split_heads(qkv_NO, c)
            q_NHE, k_NKE = ops.rope(q_NHE, self.rope), ops.rope(k_NKE, self.rope)
            ops.write_kv(index, k_NKE, v_NKE)
            o_NHE = ops.attend(index, q_NHE, scale=c.attention_scale, window=c.windows[index])
            x_ND = ops.add(x_ND, ops.linear(o_NHE.flatten(1), layer.o_DI))
            h_ND = ops.rms_norm(x_ND, layer.post_attention_layernorm_D, c.rms_norm_eps)
            x_ND = ops.add(x_ND, ops.linear(ops.silu_mul(ops.linear(h_ND, layer.gate_up_OD)), layer.down_DF))
        return x_ND

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head; return logits_NV."""
        return ops.linear(ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps), self.embeddings.head_VD)
