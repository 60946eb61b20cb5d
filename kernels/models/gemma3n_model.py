"""The model of Gemma 3n's text part, from config to logits. Other families are in `decoder_model.py`.

The hidden state has several copies (`altup.py`), of which attention and MLP compute one. Beside attention there is a
product of low rank (LAuReL: Menghani et al., arXiv:2411.07501), and most gates of the first layers are 0. Each layer
gets an input that depends on the token and its embedding (`layer_inputs.py`); the last ones attend to the keys of
others.

What must always hold: as in `decoder_model.py`.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops, RopeTable
from .altup import AltUp, correct, merge_copies, predict, read_altup, read_projections, start_copies
from .config import DecoderConfig
from .config_parts import HeadShape, MlpNames
from .gemma_attention import GemmaAttention, attend_heads, read_heads
from .layer_inputs import LayerInput, gate_input, make_inputs, read_input, read_inputs
from .parts import Mlp, make_logits, read_embeddings, read_mlp, read_norm
from .rope import make_rope_table


@attrs.frozen
class Laurel:
    """The product of low rank beside attention: R of them."""

    left_RD: torch.Tensor
    right_DR: torch.Tensor
    after_D: torch.Tensor


@attrs.frozen
class Layer:
    """Weights of one layer, its rotary embedding and its window."""

    altup: AltUp
    before_attention_D: torch.Tensor
    after_attention_D: torch.Tensor
    before_mlp_D: torch.Tensor
    after_mlp_D: torch.Tensor
    attention: GemmaAttention
    laurel: Laurel
    mlp: Mlp
    deviations: float | None
    """Of the cutoff of gates."""
    input: LayerInput
    input_scale_D: torch.Tensor
    """Of what is gated with the input."""
    rope: RopeTable
    window: int | None


class Gemma3n:
    """The model."""

    def __init__(self, config: DecoderConfig, weights: Weights, num_positions: int) -> None:
        """Read every tensor. Raises ValueError naming one that is missing or does not fit the config."""
        assert config.gemma3n is not None, "the configuration of another family"
        self.config, self.gemma3n = config, config.gemma3n
        self.rope = make_rope_table(config.rope, num_positions)
        self.local_rope = make_rope_table(config.local_rope, num_positions)
        self.embeddings = read_embeddings(weights, config)
        self.inputs = read_inputs(weights, config, self.gemma3n.inputs)
        self.norm_D = read_norm(weights, "model.norm.weight", config.hidden_size, config)
        self.projections = read_projections(weights, config, self.gemma3n, self.norm_D)
        self.layers = [self._read_layer(weights, index) for index in range(config.num_layers)]
        is_added = [[float(copy > 0)] for copy in range(self.gemma3n.num_copies)]
        self.others_C1 = torch.tensor(is_added, dtype=torch.float32, device=self.norm_D.device)
        self.half_1 = torch.full((1,), 2**-0.5, dtype=torch.float32, device=self.norm_D.device)

    def _read_layer(self, weights: Weights, index: int) -> Layer:
        c, g, prefix = self.config, self.gemma3n, f"model.layers.{index}."
        D, R = c.hidden_size, g.laurel_rank
        before_attention, after_attention, before_mlp, after_mlp, after_laurel = (
            read_norm(weights, f"{prefix}{name}.weight", D, c)
            for name in (
                *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
                *("post_feedforward_layernorm", "laurel.post_laurel_norm"),
            )
        )
        return Layer(
            altup=read_altup(weights, f"{prefix}altup.", c, g),
            before_attention_D=before_attention,
            after_attention_D=after_attention,
            before_mlp_D=before_mlp,
            after_mlp_D=after_mlp,
            attention=read_heads(weights, f"{prefix}self_attn.", c, index, HeadShape(c.num_kv_heads, c.head_dim)),
            laurel=Laurel(
                left_RD=weights.tensor(f"{prefix}laurel.linear_left.weight", (R, D)),
                right_DR=weights.tensor(f"{prefix}laurel.linear_right.weight", (D, R)),
                after_D=after_laurel,
            ),
            mlp=read_mlp(weights, f"{prefix}mlp.", D, g.mlp_widths[index], MlpNames()),
            deviations=g.deviations[index],
            input=read_input(weights, prefix, c, g.inputs),
            input_scale_D=weights.tensor(f"{prefix}altup.correct_output_scale", (D,)),
            rope=self.rope if c.windows[index] is None else self.local_rope,
            window=c.windows[index],
        )

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Run all layers; return x_ND before the final norm."""
        c, g, eps = self.config, self.gemma3n, self.config.rms_norm_eps
        x_ND = ops.embed(token_ids_N, self.embeddings.embed_VD, scale=c.embed_scale)
        inputs_NI = make_inputs(token_ids_N, x_ND, self.inputs, c, ops)
        x_NCD = start_copies(x_ND, self.projections, ops)
        for index, layer in enumerate(self.layers):
            predicted_NCD = predict(x_NCD, layer.altup, g.active, eps, ops)
            x_ND = self._attend(predicted_NCD[:, g.active], layer, ops)
            y_ND = self._run_mlp(ops.rms_norm(x_ND, layer.before_mlp_D, eps), layer, ops)
            x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.after_mlp_D, eps))
            x_NCD = correct(predicted_NCD, x_ND, layer.altup, g.active, eps, ops)
            gating_ND = x_NCD[:, g.active]
            if g.scales_active:
                gating_ND = ops.scale(gating_ND, layer.input_scale_D)
            y_ND = gate_input(gating_ND, inputs_NI, index, layer.input, eps, ops)
            x_NCD = ops.mix_copies(x_NCD, self.others_C1, y_ND.unsqueeze(1))
        return merge_copies(x_NCD, self.projections, ops)

    def _attend(self, x_ND: torch.Tensor, layer: Layer, ops: Ops) -> torch.Tensor:
        """Return the sum of x, of attention, and of LAuReL, which is a residual of its own: x_ND."""
        c, eps, laurel = self.config, self.config.rms_norm_eps, layer.laurel
        h_ND = ops.rms_norm(x_ND, layer.before_attention_D, eps)
        y_ND = ops.linear(ops.linear(h_ND, laurel.left_RD), laurel.right_DR)
        laurel_ND = ops.add(h_ND, ops.rms_norm(y_ND, laurel.after_D, eps))
        y_ND = attend_heads(h_ND, layer.attention, layer.rope, layer.window, c, ops)
        x_ND = ops.add(x_ND, ops.rms_norm(y_ND, layer.after_attention_D, eps))
        return ops.scale(ops.add(x_ND, laurel_ND), self.half_1)

    def _run_mlp(self, h_ND: torch.Tensor, layer: Layer, ops: Ops) -> torch.Tensor:
        gate_up_N2F = ops.linear(h_ND, layer.mlp.gate_up_OD)
        if layer.deviations is None:
            return ops.linear(ops.gelu_mul(gate_up_N2F), layer.mlp.down_DF)
        return ops.linear(ops.sparse_gelu_mul(gate_up_N2F, layer.deviations), layer.mlp.down_DF)

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm; return the final hidden states, h_ND."""
        return ops.rms_norm(x_ND, self.norm_D, self.config.rms_norm_eps)

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm, the output head and the soft cap; return logits_NV."""
        return make_logits(self.states(x_ND, ops), self.embeddings, self.config, ops)
