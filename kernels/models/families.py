"""Which family runs a checkpoint: the name in `architectures` decides, nothing is guessed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection
from typing import Any, Protocol

import attrs
import torch

from ..checkpoints.weights import Weights
from ..ops import Ops
from .config import DecoderConfig
from .decoder_model import Decoder
from .deepseek import parse_deepseek_v2, parse_deepseek_v3
from .gemma import parse_gemma2, parse_gemma3, parse_gemma4
from .gemma3n import parse_gemma3n
from .gemma3n_model import Gemma3n
from .gemma4_model import Gemma4
from .glm import parse_glm, parse_glm4, parse_glm4_moe
from .gpt_oss import parse_gpt_oss
from .granite import parse_granite, parse_granite_hybrid, parse_granite_moe
from .known_entries import words
from .layer_normed import parse_cohere2, parse_phimoe, parse_stablelm, parse_starcoder2
from .llama import (
    parse_llama,
    parse_ministral,
    parse_ministral3,
    parse_mistral,
    parse_phi3,
    parse_seed_oss,
    parse_smollm3,
)
from .llama4 import parse_llama4
from .olmo import parse_exaone4, parse_olmo2, parse_olmo3, parse_olmoe
from .qwen import parse_qwen2, parse_qwen2_moe, parse_qwen3, parse_qwen3_moe
from .refusals import check_entries, refuse_unknown, unknown_beside
from .text_part import find_decoder, text_part


class Model(Protocol):
    """A family's model with its weights. Holds no state between passes."""

    def forward(self, token_ids_N: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Embed tokens, run every layer and write its KV; return x_ND before the final norm."""
        ...

    def states(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm to the rows whose final hidden states are needed; return h_ND."""
        ...

    def logits(self, x_ND: torch.Tensor, ops: Ops) -> torch.Tensor:
        """Apply the final norm and the output head to the rows whose logits are needed; return logits_NV."""
        ...


@attrs.frozen
class Family:
    """How to read one architecture's configuration and build its model."""

    parse_supported: Callable[[dict[str, Any]], DecoderConfig]
    """Parses a `config.json` that has no entry to refuse. Raises ValueError for one that is missing or wrong."""
    reads: str
    """Entries that it reads besides those that every family reads, separated by spaces."""
    activation: str = "silu"
    build: Callable[[DecoderConfig, Weights, int], Model] = Decoder
    """The last argument is the number of positions that rotary tables must cover."""

    def parse(self, data: dict[str, Any], *, ignored: Collection[str] | None = ()) -> DecoderConfig:
        """Parse `config.json`. Raises ValueError for an entry that is missing, not supported or not understood.

        `ignored`: entries that need not be understood, of a decoder within a model with towers as `text_config.NAME`;
        None: all of them.
        """
        decoder = text_part(data)
        unknown = check_entries(decoder, read=self.reads, activation=self.activation)
        if decoder is not data:
            unknown = unknown_beside(data, decoder, unknown)
        if ignored is not None:
            refuse_unknown(unknown, ignored)
        return self.parse_supported(decoder)


_GEMMA = "attention_bias query_pre_attn_scalar sliding_window final_logit_softcapping"
_GEMMA3N = (
    f"{_GEMMA} rope_local_base_freq num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input "
    "activation_sparsity_pattern altup_num_inputs altup_active_idx altup_correct_scale laurel_rank"
)
_GEMMA4 = (
    "attention_bias sliding_window final_logit_softcapping use_bidirectional_attention global_head_dim "
    "num_global_key_value_heads per_layer_config attention_k_eq_v num_kv_shared_layers use_double_wide_mlp "
    "hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts top_k_experts "
    "moe_intermediate_size"
)
_QWEN = "sliding_window use_sliding_window max_window_layers"
_FEW_EXPERTS = "num_experts num_local_experts num_experts_per_tok"
_CHOICE = f"{_FEW_EXPERTS} norm_topk_prob"
_EXPERTS = f"{_CHOICE} moe_intermediate_size decoder_sparse_step mlp_only_layers"
_GELU = "gelu_pytorch_tanh"
_GRANITE = "embedding_multiplier residual_multiplier attention_multiplier logits_scaling"
_HYBRID = (
    "shared_intermediate_size position_embedding_type normalization_function layers_block_type mamba_n_heads "
    "mamba_n_groups mamba_d_state mamba_d_head mamba_d_conv mamba_expand mamba_chunk_size mamba_conv_bias "
    "mamba_proj_bias time_step_limit"
)
_GPT_OSS = (
    "num_experts num_local_experts num_experts_per_tok experts_per_token initial_context_length "
    "swiglu_alpha swiglu_limit"
)
_LLAMA4 = (
    "intermediate_size_mlp moe_layers interleave_moe_layer_step use_qk_norm no_rope_layers no_rope_layer_interval "
    "attention_chunk_size attn_temperature_tuning floor_scale attn_scale num_local_experts num_experts_per_tok "
    "router_jitter_noise"
)
_SMOLLM = f"{_QWEN} no_rope_layers no_rope_layer_interval"
_LATENT = "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"
_GROUPED = (
    "n_routed_experts n_shared_experts num_experts_per_tok norm_topk_prob moe_intermediate_size moe_layer_freq "
    "first_k_dense_replace routed_scaling_factor scoring_func topk_method n_group topk_group"
)
_PREDICTED = "num_nextn_predict_layers num_mtp_layers"
_COHERE = (
    "layer_norm_eps logit_scale use_parallel_block use_parallel_embedding use_gated_activation use_embedding_sharing "
    "order_of_interleaved_layers layer_switch position_embedding_type"
)
FAMILIES = {
    "Cohere2ForCausalLM": Family(parse_cohere2, f"attention_bias sliding_window sliding_window_pattern {_COHERE}"),
    "DeepseekV2ForCausalLM": Family(parse_deepseek_v2, f"{_LATENT} {_GROUPED}"),
    "DeepseekV3ForCausalLM": Family(parse_deepseek_v3, f"{_LATENT} {_GROUPED} {_PREDICTED} rope_interleave"),
    "Exaone4ForCausalLM": Family(parse_exaone4, "sliding_window sliding_window_pattern"),
    "Gemma2ForCausalLM": Family(parse_gemma2, f"{_GEMMA} attn_logit_softcapping", _GELU),
    "Gemma3ForCausalLM": Family(
        parse_gemma3, f"{_GEMMA} sliding_window_pattern _sliding_window_pattern rope_local_base_freq", _GELU
    ),
    "Gemma3nForCausalLM": Family(parse_gemma3n, _GEMMA3N, _GELU, Gemma3n),
    "Gemma4ForCausalLM": Family(parse_gemma4, _GEMMA4, _GELU, Gemma4),
    "Glm4ForCausalLM": Family(parse_glm4, "attention_bias"),
    "Glm4MoeForCausalLM": Family(parse_glm4_moe, f"attention_bias use_qk_norm {_GROUPED} {_PREDICTED}"),
    "GlmForCausalLM": Family(parse_glm, "attention_bias"),
    "GptOssForCausalLM": Family(parse_gpt_oss, f"attention_bias sliding_window {_GPT_OSS}"),
    "GraniteForCausalLM": Family(parse_granite, f"attention_bias {_GRANITE}"),
    "GraniteMoeForCausalLM": Family(parse_granite_moe, f"attention_bias {_FEW_EXPERTS} {_GRANITE}"),
    "GraniteMoeHybridForCausalLM": Family(parse_granite_hybrid, f"attention_bias {_FEW_EXPERTS} {_GRANITE} {_HYBRID}"),
    "Llama4ForCausalLM": Family(parse_llama4, f"attention_bias {_LLAMA4}"),
    "LlamaForCausalLM": Family(parse_llama, "attention_bias"),
    "Ministral3ForCausalLM": Family(parse_ministral3, "sliding_window"),
    "MinistralForCausalLM": Family(parse_ministral, "sliding_window"),
    "MistralForCausalLM": Family(parse_mistral, "sliding_window"),
    "Olmo2ForCausalLM": Family(parse_olmo2, "attention_bias"),
    "Olmo3ForCausalLM": Family(parse_olmo3, "attention_bias sliding_window"),
    "OlmoeForCausalLM": Family(parse_olmoe, f"attention_bias {_CHOICE}"),
    "Phi3ForCausalLM": Family(parse_phi3, "sliding_window"),
    "PhimoeForCausalLM": Family(
        parse_phimoe, f"attention_bias sliding_window lm_head_bias router_jitter_noise {_FEW_EXPERTS}"
    ),
    "Qwen2ForCausalLM": Family(parse_qwen2, _QWEN),
    "Qwen2MoeForCausalLM": Family(parse_qwen2_moe, f"qkv_bias shared_expert_intermediate_size {_QWEN} {_EXPERTS}"),
    "Qwen3ForCausalLM": Family(parse_qwen3, f"attention_bias {_QWEN}"),
    "Qwen3MoeForCausalLM": Family(parse_qwen3_moe, f"attention_bias {_QWEN} {_EXPERTS}"),
    "SeedOssForCausalLM": Family(parse_seed_oss, "attention_bias attention_out_bias"),
    "SmolLM3ForCausalLM": Family(parse_smollm3, f"attention_bias {_SMOLLM}"),
    "StableLmForCausalLM": Family(parse_stablelm, "layer_norm_eps use_qkv_bias use_parallel_residual"),
    "Starcoder2ForCausalLM": Family(parse_starcoder2, "norm_epsilon use_bias sliding_window mlp_type norm_type", _GELU),
}
SPELLINGS = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Other spellings, as published checkpoints have them, beside transformers' own."""
DRAFT_HEADS = ("eagle", "medusa", "mtp", "mlpspeculator")
"""In the names of architectures that are no models: they compute from a model's states what it may draw next."""
_WITH_STATES = {
    "short convolutions": words("Lfm2ForCausalLM Lfm2MoeForCausalLM Lfm2VlForConditionalGeneration"),
    "linear attention": words(
        "Qwen3NextForCausalLM Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
        "Qwen3_5MoeForConditionalGeneration KimiLinearForCausalLM MiniMaxForCausalLM OlmoHybridForCausalLM"
    ),
    "recurrence": words("RecurrentGemmaForCausalLM RwkvForCausalLM xLSTMForCausalLM"),
    "Mamba": words(
        "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM FalconH1ForCausalLM JambaForCausalLM "
        "BambaForCausalLM NemotronHForCausalLM ZambaForCausalLM Zamba2ForCausalLM"
    ),
}
"""Architectures with layers that keep a state of each sequence, by what these compute."""
SPECULATION = "docs/operate/speculative-decoding.md"


def find_family(config_json: dict[str, Any], *, headless: bool = False) -> Family:
    """Return the family of a checkpoint. Raises ValueError for an unsupported architecture.

    `headless`: models without an output head will do, too, such as `Qwen3Model`, or with another one, such as
    `Qwen3ForSequenceClassification`. A reranker that vLLM would make a classifier of (`is_original_qwen3_reranker`) has
    the weights of the model that generates.
    """
    listed = config_json.get("architectures")
    architectures = [str(name) for name in listed] if isinstance(listed, list) else []
    if (decoder := find_decoder(config_json)) is not None:
        return FAMILIES[decoder.architecture]
    for architecture in (SPELLINGS.get(name, name) for name in architectures):
        if headless or config_json.get("is_original_qwen3_reranker"):
            architecture = architecture.replace("ForSequenceClassification", "ForCausalLM")
        if headless and architecture.endswith("Model"):
            architecture = architecture.removesuffix("Model") + "ForCausalLM"
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    named = ", ".join(architectures) or "config.json names none"
    if any(head in named.lower() for head in DRAFT_HEADS):
        raise ValueError(f"{named} is a head that drafts for another model, which is not loaded ({SPECULATION})")
    if kind := next((kind for kind, names in _WITH_STATES.items() if not names.isdisjoint(architectures)), None):
        raise ValueError(
            f"unsupported architecture ({named}): it has layers of {kind}, each of which keeps a state of the sequence "
            "beside the KV blocks, which no executor does; run vLLM with it, and serve it by --upstream "
            "(docs/operate/upstreams.md)"
        )
    raise ValueError(
        f"unsupported architecture ({named}): quipu supports {', '.join(FAMILIES)}; {_others()} "
        f"(docs/operate/executors.md)"
    )


def _others() -> str:
    """Return what serves other architectures: transformers if it is installed, which is then the shortest way."""
    if importlib.util.find_spec("transformers") is not None:
        return "transformers is installed, with which --executor transformers serves most others, more slowly"
    return "where vLLM or transformers is installed, --executor vllm or --executor transformers serves most others"
