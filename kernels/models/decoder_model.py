"""The model of all families, from config to logits: a decoder whose configuration says in what families differ.

That is where a layer norms, norms of queries and keys, rotary embeddings, windows, biases, experts, scales and caps,
and what is stored fused. Each family's parser (`llama.py`, `gemma.py`, `qwen.py` and others) makes the configuration.

Every operation goes through `Ops`, in whose shape letters names end; this file knows nothing of batches, blocks or
devices.

What must always hold: a token's row depends on other tokens only through `ops.attend`.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Choice, Experts, Ops, RopeTable
from .config import DecoderConfig
from .config_parts import MoeConfig
from .latent import LatentAttention, attend_latent, read_latent_attention
from .parts import (
    Attention,
    Mlp,
    Norm,
    PlainMlp,
    QueryKeyNorms,
    make_logits,
    project_heads,
    read_attention,
    read_embeddings,
    read_expert_biases,
    read_layer_norm,
    read_mlp,
    read_plain_mlp,
)
from .rope import make_factor_table, make_rope_table, position_factors


@attrs.frozen
class SharedExpert:
    """An expert that all tokens have, and the row whose product with a token scores it; None: it is not scored."""

    score_1D: torch.Tensor | None
    mlp: Mlp


@attrs.frozen
class Mixture:
    """The experts, and the router, whose product with a token scores them."""

    router_XD: torch.Tensor
    router_bias_X: torch.Tensor | None
    experts: Experts
    shared: SharedExpert | None


@attrs.frozen
class LayerNorms:
    """A layer's norms, each named after its place; None: not there."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None


@attrs.frozen
class Layer:
    """Weights of one layer, its rotary embeddings and its window."""

    norms: LayerNorms
    attention: Attention | LatentAttention
    mlp: Mlp | PlainMlp | Mixture
    rope: RopeTable | None
    """Of keys..."""
    query_rope: RopeTable | None
    """...and of queries; None: they are not rotated."""
    window: int | None


class Decoder:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        self.config = config
        self.rope = make_rope_table(config.rope, num_positions)
        is_alike = config.local_rope == config.rope
        self.local_rope = self.rope if is_alike else make_rope_table(config.local_rope, num_positions)
        factor_P = position_factors(config.temperature, num_positions)
        self._rotated_queries, self._other_queries = self.rope, None
        if factor_P is not None and config.unrotated:
            self._other_queries = make_factor_table(factor_P, config.head_dim)
        elif factor_P is not None:
            self._rotated_queries = make_rope_table(config.rope, num_positions, factor_P)
        self.embeddings = read_embeddings(weights, config)
        self.layers = [self._read_layer(weights, index) for index in range(config.num_layers)]
        self.norm = read_layer_norm(weights, "model.norm.weight", config)
        self.head_norm = self.norm if config.logits_divisor == 1.0 else self.norm.divided_by(config.logits_divisor)

    def _read_layer(self, weights: Weights, index: int) -> Layer:
        c, prefix = self.config, f"model.layers.{index}."
        window = c.windows[index]
        if index in c.unrotated:
            rope, query_rope = None, self._other_queries
        elif window is None or self.local_rope is self.rope:
            rope, query_rope = self.rope, self._rotated_queries
        else:
            rope = query_rope = self.local_rope
        norms = LayerNorms(
            **{
                place: None if name is None else read_layer_norm(weights, f"{prefix}{name}.weight", c)
                for place, name in attrs.asdict(c.norms).items()
            }
        )
        attention = self._read_attention(weights, prefix + "self_attn.")
        if c.llama4 is not None and c.llama4.norms_heads and index not in c.unrotated:
            assert norms.before_attention is not None and isinstance(attention, Attention)
            ones_E = norms.before_attention.weight_D.new_ones(c.head_dim)
            attention = attrs.evolve(attention, norms=QueryKeyNorms(ones_E, ones_E))
        return Layer(
            norms=norms,
            attention=attention,
            mlp=self._read_mlp(weights, prefix, index),
            rope=rope,
            query_rope=query_rope,
            window=window,
        )

    def _read_attention(self, weights: Weights, prefix: str) -> Attention | LatentAttention:
        c = self.config
        if c.latent is None:
            return read_attention(weights, prefix, c)
        return read_latent_attention(weights, prefix, c, c.latent)

    def _read_mlp(self, weights: Weights, of_layer: str, index: int) -> Mlp | PlainMlp | Mixture:
        c, D, moe = self.config, self.config.hidden_size, self.config.moe
        prefix = f"{of_layer}{c.mlp_name}."
        if moe is None or index in moe.dense_layers:
            if not c.mlp_is_gated:
                return read_plain_mlp(weights, prefix, c)
            return read_mlp(weights, prefix, D, c.intermediate_size, c.mlp_names)
        of_experts, biased = (f"{prefix}experts.", D, moe.intermediate_size), moe.has_biases
        mlps = [
            read_mlp(weights, f"{prefix}experts.{x}.", D, moe.intermediate_size, moe.names)
            for x in range(moe.num_experts)
        ]
        return Mixture(
            router_XD=weights.tensor(f"{prefix}{moe.router_name}.weight", (moe.num_experts, D)),
            router_bias_X=weights.tensor(f"{prefix}{moe.router_name}.bias", (moe.num_experts,)) if biased else None,
            experts=Experts(
                gate_up_OD=[mlp.gate_up_OD for mlp in mlps],
                down_DF=[mlp.down_DF for mlp in mlps],
                num_chosen=moe.num_chosen,
                normalise=moe.normalise,
                biases=read_expert_biases(weights, *of_experts, moe.num_experts) if biased else None,
                clamp=moe.clamp,
                choice=self._read_choice(weights, prefix, moe),
            ),
            shared=self._read_shared(weights, of_layer, moe),
        )

    def _read_choice(self, weights: Weights, prefix: str, moe: MoeConfig) -> Choice:
        name, bias_X = "e_score_correction_bias", None
        if moe.choice.is_sigmoid and not moe.choice.scales_inputs:
            bias_X = weights.tensor(f"{prefix}gate.{name}", (moe.num_experts,))
        return Choice(**attrs.asdict(moe.choice), bias_X=bias_X)

    def _read_shared(self, weights: Weights, prefix: str, moe: MoeConfig) -> SharedExpert | None:
        F = moe.shared_intermediate_size
        if F is None:
            return None
        D, name = self.config.hidden_size, prefix + moe.shared_name
        return SharedExpert(
            score_1D=weights.tensor(f"{name}_gate.weight", (1, D)) if moe.scores_shared else None,
            mlp=read_mlp(weights, f"{name}.", D, F, moe.shared_names),
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c = self.config
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD, scale=c.embed_scale, is_exact=c.embed_scale_is_exact)
        for index, layer in enumerate(self.layers):
            h_ND = self._norm(x_ND, layer.norms.before_attention, ops)
            if c.is_parallel:
                attended_ND = self._attend(index, layer, h_ND, ops)
                x_ND = ops.add(ops.add(x_ND, attended_ND), self._run_mlp(layer.mlp, h_ND, ops))
                continue
            y_ND = self._norm(self._attend(index, layer, h_ND, ops), layer.norms.after_attention, ops)
            x_ND = ops.add(x_ND, y_ND)
            h_ND = self._norm(x_ND, layer.norms.before_mlp, ops)
            y_ND = self._norm(self._run_mlp(layer.mlp, h_ND, ops), layer.norms.after_mlp, ops)
            x_ND = ops.add(x_ND, y_ND)
        return x_ND

    def _norm(self, x_ND: torch.Tensor, norm: Norm | None, ops: Ops) -> torch.Tensor:
        if norm is None:
            return x_ND
        c = self.config
        if c.norms_center:
            return ops.layer_norm(x_ND, norm.weight_D, norm.bias_D, c.rms_norm_eps)
        return ops.rms_norm(x_ND, norm.weight_D, c.rms_norm_eps)

    def _attend(self, index: int, layer: Layer, h_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        c, attention = self.config, layer.attention
        if isinstance(attention, LatentAttention):
            return attend_latent(h_ND, attention, index, self.rope, c, ops)
        q_NHE, k_NKE, v_NKE = project_heads(h_ND, attention, c, ops)
        if layer.query_rope is not None:
            q_NHE = ops.rope(q_NHE, layer.query_rope)
        if layer.rope is not None:
            k_NKE = ops.rope(k_NKE, layer.rope)
        ops.write_kv(index, k_NKE, v_NKE)
        o_NHE = ops.attend(
            index,
            q_NHE,
            scale=c.attention_scale,
            window=layer.window,
            in_chunks=c.llama4 is not None,
            soft_cap=c.attention_soft_cap,
            sinks_H=attention.sinks_H,
        )
        return ops.linear(o_NHE.flatten(1), attention.o_DI, attention.o_bias_D)

    def _run_mlp(self, mlp: Mlp | PlainMlp | Mixture, h_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        if isinstance(mlp, Mixture):
            y_ND = ops.experts(h_ND, ops.linear(h_ND, mlp.router_XD, mlp.router_bias_X), mlp.experts)
            if (shared := mlp.shared) is None:
                return y_ND
            shared_ND = self._run_mlp(shared.mlp, h_ND, ops)
            if shared.score_1D is not None:
                shared_ND = ops.sigmoid_mul(shared_ND, ops.linear(h_ND, shared.score_1D))
            return ops.add(y_ND, shared_ND)
        if isinstance(mlp, PlainMlp):
            return ops.linear(ops.gelu(ops.linear(h_ND, mlp.up_FD, mlp.up_bias_F)), mlp.down_DF, mlp.down_bias_D)
        gate_up_N2F = ops.linear(h_ND, mlp.gate_up_OD)
        activated_NF = ops.silu_mul(gate_up_N2F) if self.config.activation == "silu" else ops.gelu_mul(gate_up_N2F)
        return ops.linear(activated_NF, mlp.down_DF)

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm; return the final hidden states, h_ND."""
        return self._norm(x_ND, self.norm, ops)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm, the output head and the soft cap; return logits_NV."""
        return make_logits(self._norm(x_ND, self.head_norm, ops), self.embeddings, self.config, ops)
