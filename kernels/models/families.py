"""Which family runs a checkpoint: the name in `architectures` decides, nothing is guessed.

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
    """A family's model with its weights. Holds no state between passes."""

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Embed tokens, run every layer and write its KV; return x_ND before the final norm."""
        ...

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head to the rows whose logits are needed; return logits_NV."""
        ...


@attrs.frozen
class Family:
    """How to build one architecture's model."""

    parse: Callable[[dict[str, Any]], DecoderConfig]
    build: Callable[[DecoderConfig, Weights, int], Model]
    """The last argument is the number of positions that rotary tables must cover."""


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
    """Return the family of a checkpoint. Raises ValueError for an unsupported architecture."""
    architectures = config_json.get("architectures") or []
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    named = ", ".join(map(str, architectures)) or "config.json names none"
    raise ValueError(f"unsupported architecture ({named}): quipu supports {', '.join(FAMILIES)}")
