"""Per-layer inputs of Gemma 3n and 4: what each layer gets beside its hidden state, of a token and its embedding.

`gemma3n_model.py` and `gemma4_model.py` call this; they differ in where a layer adds what it makes of its input.

What must always hold: as in `decoder_model.py`.
"""

from __future__ import annotations

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig
from .config_parts import InputConfig


@attrs.frozen
class LayerInput:
    """What a layer makes of its part of the per-layer inputs: P of them."""

    gate_PD: torch.Tensor
    out_DP: torch.Tensor
    after_D: torch.Tensor


@attrs.frozen
class LayerInputs:
    """What makes the per-layer inputs of all layers, of a token and of its embedding."""

    embed_VI: torch.Tensor
    projection_ID: torch.Tensor
    norm_P: torch.Tensor


def read_inputs(weights: Weights, c: DecoderConfig, inputs: InputConfig) -> LayerInputs:
    width = c.num_layers * inputs.width
    norm_P = weights.tensor("model.per_layer_projection_norm.weight", (inputs.width,))
    return LayerInputs(
        embed_VI=weights.tensor("model.embed_tokens_per_layer.weight", (inputs.vocab_size, width)),
        projection_ID=weights.tensor("model.per_layer_model_projection.weight", (width, c.hidden_size)),
        norm_P=norm_P.float() * 2**-0.5,
    )


def read_input(weights: Weights, prefix: str, c: DecoderConfig, inputs: InputConfig) -> LayerInput:
    D, P = c.hidden_size, inputs.width
    return LayerInput(
        gate_PD=weights.tensor(f"{prefix}per_layer_input_gate.weight", (P, D)),
        out_DP=weights.tensor(f"{prefix}per_layer_projection.weight", (D, P)),
        after_D=weights.tensor(f"{prefix}post_per_layer_input_norm.weight", (D,)),
    )


def make_inputs(
    token_ids_N: torch.Tensor, x_ND: torch.Tensor, inputs: LayerInputs, c: DecoderConfig, ops: Ops
) -> torch.Tensor:
    """Return the per-layer inputs of all layers side by side: those of a token, and of its embedding x.

    The latter are a product that is divided by the root of x's size, which the epsilon of its norm stands for.
    """
    width = len(inputs.norm_P)
    of_token_NI = ops.embed(token_ids_N, inputs.embed_VI, scale=(width / 2) ** 0.5, is_exact=True)
    of_embedding_NI = ops.linear(x_ND, inputs.projection_ID)
    heads_NLP = of_embedding_NI.view(of_embedding_NI.shape[0], c.num_layers, width)
    normed_NLP = ops.rms_norm(heads_NLP, inputs.norm_P, c.rms_norm_eps * c.hidden_size)
    return ops.add(of_token_NI, normed_NLP.flatten(1))


def gate_input(
    x_ND: torch.Tensor, inputs_NI: torch.Tensor, index: int, layer: LayerInput, eps: float, ops: Ops
) -> torch.Tensor:
    """Return what a layer makes of its input, gated by the hidden state: y_ND."""
    width = len(layer.gate_PD)
    input_NP = inputs_NI[:, index * width : (index + 1) * width]
    gated_NP = ops.mul(ops.gelu(ops.linear(x_ND, layer.gate_PD)), input_NP)
    return ops.rms_norm(ops.linear(gated_NP, layer.out_DP), layer.after_D, eps)
