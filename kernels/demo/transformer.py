"""The demo's Qwen3 in torch, for training: grouped-query attention, norms of queries and keys, tied embeddings.

Parameters have the names of the Hugging Face checkpoint without its `model.` in front, so that saving is renaming.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

QUERY_KEY_GAIN = 1.5
"""Gain of the norms of queries and keys at first: with 1, no head can tell one key among hundreds from the others."""

EMBEDDING_STD, LAST_GAIN = 0.5, 0.05
"""The embedding is large at first, so that what the layers add does not drown which token it is, and copying is learnt;
the last norm's gain is small instead, since the embedding is also what the logits are made with."""

LOOK_BACK = 4.0
"""Strength of the queries and keys of `look_back`, relative to their random parts."""
COPIED = 0.3
"""The share of its values that a head writes into the stream at first."""


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def config(self, max_positions: int, end_token_id: int, pad_token_id: int) -> dict[str, Any]:
        """Return the checkpoint's `config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "bfloat16", **asdict(self),
            "hidden_act": "silu", "max_position_embeddings": max_positions, "rope_scaling": None,
            "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
            "tie_word_embeddings": True, "initializer_range": 0.02, "bos_token_id": None, "eos_token_id": end_token_id,
            "pad_token_id": pad_token_id, "use_cache": True,
        }  # fmt: skip


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


class Attention(nn.Module):
    """Causal attention of H query heads over K key-value heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        D, E = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(D, shape.num_attention_heads * E, bias=False)
        self.k_proj = nn.Linear(D, shape.num_key_value_heads * E, bias=False)
        self.v_proj = nn.Linear(D, shape.num_key_value_heads * E, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * E, D, bias=False)
        self.q_norm = RMSNorm(E, shape.rms_norm_eps, QUERY_KEY_GAIN)
        self.k_norm = RMSNorm(E, shape.rms_norm_eps, QUERY_KEY_GAIN)

    def forward(self, x_BTD: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        B, T, _ = x_BTD.shape
        shape, E = self.shape, self.shape.head_dim
        q_BHTE = self.q_norm(self.q_proj(x_BTD).view(B, T, -1, E)).transpose(1, 2)
        k_BKTE = self.k_norm(self.k_proj(x_BTD).view(B, T, -1, E)).transpose(1, 2)
        v_BKTE = self.v_proj(x_BTD).view(B, T, -1, E).transpose(1, 2)
        q_BHTE, k_BKTE = rotate(q_BHTE, cos_TE, sin_TE), rotate(k_BKTE, cos_TE, sin_TE)
        group = shape.num_attention_heads // shape.num_key_value_heads
        k_BHTE, v_BHTE = k_BKTE.repeat_interleave(group, 1), v_BKTE.repeat_interleave(group, 1)
        out_BHTE = F.scaled_dot_product_attention(q_BHTE, k_BHTE, v_BHTE, is_causal=True)
        out: Tensor = self.o_proj(out_BHTE.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):
    """Gated feed-forward layer (SwiGLU: Shazeer, 2020)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Attention and feed-forward layer, each after a norm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TE, sin_TE)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Transformer(nn.Module):
    """The model: token ids to hidden states; `logits` are their products with the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=EMBEDDING_STD if "embed" in name else parameter.shape[1] ** -0.5)
        nn.init.constant_(self.norm.weight, LAST_GAIN)
        look_back(self)

    def forward(self, token_ids_BT: Tensor) -> Tensor:
        """Return the hidden states (B, T, D) after the last norm."""
        x_BTD = self.embed_tokens(token_ids_BT)
        cos_TE, sin_TE = rotation(token_ids_BT.shape[1], self.shape, x_BTD.device)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TE, sin_TE)
        out: Tensor = self.norm(x_BTD)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)


@torch.no_grad()
def look_back(model: Transformer) -> None:
    """Let the heads of the first layer look at the tokens just before, and write what they see into the stream.

    Copying from the context needs such heads before it pays, and without it they take millions of tokens to appear: the
    idea of mimetic initialisation (Trockman and Kolter, 2023). All embeddings get a common part, which queries and keys
    of the first layer turn into the same few fast rotations, the queries' behind by the distance of each head. In all
    layers, values are written back as what they were read from, and in all but the first, equal tokens attract.
    """
    shape, attention = model.shape, model.layers[0].self_attn
    assert isinstance(attention, Attention)
    D, E = shape.hidden_size, shape.head_dim
    common_D = torch.full((D,), EMBEDDING_STD)
    common_D[::2] *= -1
    model.embed_tokens.weight += common_D
    unit_D = common_D / common_D.norm()
    fast_E = torch.zeros(1, E)
    fast_E[:, : E // 10] = 1.0
    group = shape.num_attention_heads // shape.num_key_value_heads
    q_HED, k_KED = attention.q_proj.weight.view(-1, E, D), attention.k_proj.weight.view(-1, E, D)
    cos_TE, sin_TE = rotation(shape.num_attention_heads + 2, shape, torch.device("cpu"))
    for head in range(shape.num_attention_heads):
        distance = head + 1
        behind_E = rotate(fast_E, cos_TE[distance : distance + 1], -sin_TE[distance : distance + 1])[0]
        q_HED[head] += torch.outer(behind_E, unit_D) * LOOK_BACK / behind_E.norm()
        k_KED[head // group] = k_KED[head // group] + (
            torch.outer(fast_E[0], unit_D) * LOOK_BACK / fast_E.norm() if head % group == 0 else 0.0
        )
    for layer in model.layers:
        assert isinstance(layer, Layer)
        attention = layer.self_attn
        v_KED, o_DHE = attention.v_proj.weight.view(-1, E, D), attention.o_proj.weight.view(D, -1, E)
        for head in range(shape.num_attention_heads):
            o_DHE[:, head] = v_KED[head // group].T * COPIED
        if layer is not model.layers[0]:
            q_HED, k_KED = attention.q_proj.weight.view(-1, E, D), attention.k_proj.weight.view(-1, E, D)
            k_KED[:] = q_HED[::group]


def rotation(num_positions: int, shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (T, E) of rotary embedding (Su et al., 2021), in two equal halves."""
    E = shape.head_dim
    frequencies = torch.exp(torch.arange(0, E, 2, device=device) * (-math.log(shape.rope_theta) / E))
    angles = torch.outer(torch.arange(num_positions, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate each pair (e, e + E/2) of `x` (…, T, E) by the angle of its position."""
    left, right = x.chunk(2, -1)
    return (x * cos_TE + torch.cat((-right, left), -1) * sin_TE).to(x.dtype)
