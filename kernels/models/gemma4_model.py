"""The model of Gemma 4's text part, from config to logits. Other families are in `decoder_model.py`.

Layers without a window have heads of their own, whose values may be their keys before the norm; the last layers attend
to the keys of earlier ones. Values are normed. Beside a layer's MLP there may be experts. Each layer adds a vector that
depends on the token and on its embedding (per-layer inputs), and ends with a factor.

What must always hold: as in `decoder_model.py`.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Choice, Experts, Ops, RopeTable
from .config import DecoderConfig
from .config_parts import MlpNames
from .gemma_attention import GemmaAttention, attend_heads, read_heads
from .layer_inputs import LayerInput, gate_input, make_inputs, read_input, read_inputs
from .parts import Mlp, make_logits, read_embeddings, read_mlp, read_norm
from .rope import make_rope_table


@attrs.frozen
class Mixture:
    """The experts beside a layer's MLP, their router, and the norms around each."""

    router_norm_D: torch.Tensor
    """With the router's own factors."""
    router_XD: torch.Tensor
    experts: Experts
    before_D: torch.Tensor
    after_D: torch.Tensor
    after_mlp_D: torch.Tensor


@attrs.frozen
class Layer:
    """Weights of one layer, its rotary embedding and its window."""

    before_attention_D: torch.Tensor
    after_attention_D: torch.Tensor
    before_mlp_D: torch.Tensor
    after_mlp_D: torch.Tensor
    attention: GemmaAttention
    mlp: Mlp
    mixture: Mixture | None
    input: LayerInput | None
    factor_1: torch.Tensor
    rope: RopeTable
    window: int | None


class Gemma4:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        assert config.gemma4 is not None, "the configuration of another family"
        self.config, self.gemma4 = config, config.gemma4
        self.rope = make_rope_table(config.rope, num_positions)
        self.local_rope = make_rope_table(config.local_rope, num_positions)
        self.embeddings = read_embeddings(weights, config)
        inputs = self.gemma4.inputs
        self.inputs = None if inputs is None else read_inputs(weights, config, inputs)
        self.layers = [self._read_layer(weights, index) for index in range(config.num_layers)]
        self.norm_D = read_norm(weights, "model.norm.weight", config.hidden_size, config)

    def _read_layer(self, weights: Weights, index: int) -> Layer:
        c, g, prefix = self.config, self.gemma4, f"model.layers.{index}."
        before_attention, after_attention, before_mlp, after_mlp = (
            read_norm(weights, f"{prefix}{name}layernorm.weight", c.hidden_size, c)
            for name in ("input_", "post_attention_", "pre_feedforward_", "post_feedforward_")
        )
        return Layer(
            before_attention_D=before_attention,
            after_attention_D=after_attention,
            before_mlp_D=before_mlp,
            after_mlp_D=after_mlp,
            attention=read_heads(
                weights,
                f"{prefix}self_attn.",
                c,
                index,
                g.heads[index],
                values_are_keys=g.values_are_keys and c.windows[index] is None,
            ),
            mlp=read_mlp(weights, f"{prefix}mlp.", c.hidden_size, g.mlp_widths[index], MlpNames()),
            mixture=_read_mixture(weights, prefix, c),
            input=None if g.inputs is None else read_input(weights, prefix, c, g.inputs),
            factor_1=weights.tensor(f"{prefix}layer_scalar", (1,)),
            rope=self.rope if c.windows[index] is None else self.local_rope,
            window=c.windows[index],
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c, eps = self.config, self.config.rms_norm_eps
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD, scale=c.embed_scale)
        inputs_NI = None if self.inputs is None else make_inputs(token_ids_N, x_ND, self.inputs, c, ops)
        for index, layer in enumerate(self.layers):
            h_ND = ops.rms_norm(x_ND, layer.before_attention_D, eps)
            y_ND = attend_heads(h_ND, layer.attention, layer.rope, layer.window, c, ops)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.after_attention_D, eps))
            y_ND = self._run_mlp(layer.mlp, ops.rms_norm(x_ND, layer.before_mlp_D, eps), ops)
            if layer.mixture is not None:
                y_ND = self._mix(x_ND, y_ND, layer.mixture, ops)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.after_mlp_D, eps))
            if inputs_NI is not None and layer.input is not None:
                x_ND = ops.add(x_ND, gate_input(x_ND, inputs_NI, index, layer.input, eps, ops))
            x_ND = ops.scale(x_ND, layer.factor_1)
        return x_ND

    def _run_mlp(self, mlp: Mlp, h_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        return ops.linear(ops.gelu_mul(ops.linear(h_ND, mlp.gate_up_OD)), mlp.down_DF)

    def _mix(self, x_ND: torch.Tensor, y_ND: torch.Tensor, mixture: Mixture, ops: Ops) -> torch.Tensor:
        """Return the normed results of the MLP, y, and of the experts, added."""
        eps = self.config.rms_norm_eps
        router_NX = ops.linear(ops.rms_norm(x_ND, mixture.router_norm_D, eps), mixture.router_XD)
        mixed_ND = ops.experts(ops.rms_norm(x_ND, mixture.before_D, eps), router_NX, mixture.experts)
        return ops.add(ops.rms_norm(y_ND, mixture.after_mlp_D, eps), ops.rms_norm(mixed_ND, mixture.after_D, eps))

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm; return the final hidden states, h_ND."""
        return ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm, the output head and the soft cap; return logits_NV."""
        return make_logits(self.states(x_ND, ops), self.embeddings, self.config, ops)


def _read_mixture(weights: Weights, prefix: str, c: DecoderConfig) -> Mixture | None:
    if (moe := c.moe) is None:
        return None
    D, X = c.hidden_size, moe.num_experts
    mlps = [read_mlp(weights, f"{prefix}experts.{x}.", D, moe.intermediate_size, moe.names) for x in range(X)]
    after_mlp, after, before = (
        weights.tensor(f"{prefix}{name}.weight", (D,))
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    )
    return Mixture(
        router_norm_D=weights.tensor(f"{prefix}router.scale", (D,)).float() * D**-0.5,
        router_XD=weights.tensor(f"{prefix}router.proj.weight", (X, D)),
        experts=Experts(
            gate_up_OD=[mlp.gate_up_OD for mlp in mlps],
            down_DF=[mlp.down_DF for mlp in mlps],
            num_chosen=moe.num_chosen,
            normalise=moe.normalise,
            choice=Choice(scale_X=weights.tensor(f"{prefix}router.per_expert_scale", (X,))),
            is_gelu=True,
        ),
        before_D=before,
        after_D=after,
        after_mlp_D=after_mlp,
    )
