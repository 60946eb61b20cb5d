"""The Llama family, from config to logits, and the families that differ from it in parts.

Llama 2 and 3 (Touvron et al., arXiv:2302.13971; Grattafiori et al., arXiv:2407.21783), Mistral (Jiang et al.,
arXiv:2310.06825), Phi-3 and Phi-4 (Microsoft, arXiv:2404.14219 and 2412.08905); Qwen is parsed in `qwen.py`. The
configuration says what differs: biases, windows, norms of query and key heads, experts, and what is stored fused.

Every operation goes through `Ops`, in whose shape letters names end; this file knows nothing of batches, blocks or
devices.

What must always hold: a token's row depends on other tokens only through `ops.attend`.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Experts, Ops
from .config import DecoderConfig, positive, read_sizes, same_window
from .parts import Attention, Mlp, project_heads, read_attention, read_embeddings, read_mlp, read_norm
from .rope import make_rope_table
from .rope_config import parse_rope, rope_entries


def parse_llama(data: dict[str, Any]) -> DecoderConfig:
    sizes = read_sizes(data, every_head_its_kv=True)
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=same_window(data, None))


def parse_mistral(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `sliding_window` defaults to 4,096, as in the first Mistral; later ones set it to null."""
    sizes = read_sizes(data)
    window = None if data.get("sliding_window", 4096) is None else positive(data, "sliding_window", default=4096)
    return DecoderConfig(**sizes, rope=parse_rope(data, head_dim=sizes["head_dim"]), windows=same_window(data, window))


def parse_phi3(data: dict[str, Any]) -> DecoderConfig:
    """Parse `config.json`. `su` and `yarn` in older configurations mean `longrope`, as in transformers."""
    sizes = read_sizes(data, every_head_its_kv=True, rms_norm_eps=1e-5)
    entries = rope_entries(data)
    if (entries.get("rope_type") or entries.get("type")) in ("su", "yarn"):
        entries["rope_type"] = "longrope"
    rope = parse_rope(data, head_dim=sizes["head_dim"], entries=entries, partial=True)
    window = None if data.get("sliding_window") is None else positive(data, "sliding_window")
    return DecoderConfig(**sizes, rope=rope, windows=same_window(data, window), is_stored_fused=True)


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
    post_attention_layernorm_D: torch.Tensor
    mlp: Mlp | Mixture


class Llama:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        self.config = config
        self.rope = make_rope_table(config.rope, num_positions)
        self.embeddings = read_embeddings(weights, config)
        self.layers = [self._read_layer(weights, index) for index in range(config.num_layers)]
        self.norm_D = read_norm(weights, "model.norm.weight", config.hidden_size)

    def _read_layer(self, weights: Weights, index: int) -> Layer:
        prefix, D = f"model.layers.{index}.", self.config.hidden_size
        return Layer(
            input_layernorm_D=read_norm(weights, prefix + "input_layernorm.weight", D),
            attention=read_attention(weights, prefix + "self_attn.", self.config),
            post_attention_layernorm_D=read_norm(weights, prefix + "post_attention_layernorm.weight", D),
            mlp=self._read_mlp(weights, prefix + "mlp.", index),
        )

    def _read_mlp(self, weights: Weights, prefix: str, index: int) -> Mlp | Mixture:
        c, D, moe = self.config, self.config.hidden_size, self.config.moe
        if moe is None or index in moe.dense_layers:
            return read_mlp(weights, prefix, D, c.intermediate_size, is_stored_fused=c.is_stored_fused)
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
            q_NHE, k_NKE, v_NKE = project_heads(h_ND, layer.attention, c, ops)
            q_NHE, k_NKE = ops.rope(q_NHE, self.rope), ops.rope(k_NKE, self.rope)
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

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm; return the final hidden states, h_ND."""
        return ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head; return logits_NV."""
        return ops.linear(self.states(x_ND, ops), self.embeddings.head_VD)
