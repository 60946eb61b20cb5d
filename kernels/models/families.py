"""Which family runs a checkpoint: the name in `architectures` decides, and nothing is guessed.

A backend calls `find_family`, then the family's `parse` and its constructor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig
from .gemma2 import Gemma2, parse_gemma2
from .gemma3 import Gemma3, parse_gemma3
from .llama import Llama, parse_llama
from .mistral import Mistral, parse_mistral
from .phi3 import Phi3, parse_phi3
from .qwen2 import Qwen2, parse_qwen2
from .qwen3 import Qwen3, parse_qwen3
from .qwen3_moe import Qwen3Moe, parse_qwen3_moe


class Model(Protocol):
    """A family's network with its weights. Holds no state between passes."""

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Embed, run every layer, write their KV: x_ND before the final norm."""
        ...

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Final norm and output head for the rows that want logits: logits_NV."""
        ...


@attrs.frozen
class Family:
    """How to make one architecture's model."""

    parse: Callable[[dict[str, Any]], DecoderConfig]
    build: Callable[[DecoderConfig, Weights, int], Model]
    """Takes the number of positions that the rotary tables must cover, last."""


FAMILIES = {
    "Gemma2ForCausalLM": Family(parse_gemma2, Gemma2),
    "Gemma3ForCausalLM": Family(parse_gemma3, Gemma3),
    "LlamaForCausalLM": Family(parse_llama, Llama),
    "MistralForCausalLM": Family(parse_mistral, Mistral),
    "Phi3ForCausalLM": Family(parse_phi3, Phi3),
    "Qwen2ForCausalLM": Family(parse_qwen2, Qwen2),
    "Qwen3ForCausalLM": Family(parse_qwen3, Qwen3),
    "Qwen3MoeForCausalLM": Family(parse_qwen3_moe, Qwen3Moe),
}


def find_family(config_json: dict[str, Any]) -> Family:
    """The family of a checkpoint. Raises ValueError naming an architecture that we do not run."""
    architectures = config_json.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    named = ", ".join(map(str, architectures)) or "none named"
    raise ValueError(f"unsupported architecture ({named}): quipu runs {', '.join(FAMILIES)}")
