"""What every endpoint makes of the fields that other servers' APIs add to OpenAI's, each decided once.

Read from the request schemas of vLLM, SGLang and LMDeploy, the parameters of llama.cpp's server, and Ollama's API and
options (`tests/web/api/peer_schemas.py`). Readers refuse by the table, `ignored_fields.py` names the rest, and `python
-m scripts.declared_tables` writes it into `docs/use/fields.md`. A field that is implemented leaves the table for the
shapes of its endpoints.

What must always hold: a field that would change the answer is refused, never ignored; a body with very many fields
costs no more than one with few.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from ..request.errors import unsupported_parameter
from .body_field import OFF

VLLM, SGLANG, LMDEPLOY, LLAMA, OLLAMA = "vLLM", "SGLang", "LMDeploy", "llama.cpp", "Ollama"
OTHERS = "others"
EITHER = (False, True)


@attrs.frozen
class ForeignField:
    """A field of other servers that has no effect here. Null always means absent."""

    name: str
    servers: tuple[str, ...]
    neutral: tuple[object, ...] = OFF
    """Values that are accepted in silence, since they ask for nothing."""
    is_refused: bool = attrs.field(default=True, kw_only=True)
    """Whether other values are refused, since they would change the answer, or only named in a header."""
    instead: str | None = attrs.field(default=None, kw_only=True)
    """The field of chat and completions that means the same."""
    only_with: Mapping[str, object] = attrs.field(factory=dict, kw_only=True)
    """Fields without which it has no effect, and their own neutral values. Empty: it has an effect by itself."""
    members: frozenset[str] = attrs.field(default=frozenset(), kw_only=True)
    """An object with no others than these is named, not refused."""


def _harmless(name: str, *servers: str, neutral: tuple[object, ...] = OFF) -> ForeignField:
    return ForeignField(name, servers, neutral, is_refused=False)


_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_XTC, _DRY, _MIROSTAT = {"xtc_probability": 0}, {"dry_multiplier": 0}, {"mirostat": 0}
_BUDGET = {"reasoning_budget_tokens": -1}
_RUNNER = frozenset(
    {
        *("f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread"),
        *("numa", "use_mlock", "use_mmap", "vocab_only"),
    }
)
"""Options of Ollama that say how a model is loaded."""

_REFUSED = (
    # other ways to choose tokens
    ForeignField("use_beam_search", (VLLM,)),
    ForeignField("length_penalty", (VLLM,), (1,)),
    ForeignField("early_stopping", (VLLM,)),
    ForeignField("watermarking", (VLLM,)),
    ForeignField("logits_processors", (VLLM,)),
    ForeignField("repetition_detection", (VLLM,)),
    ForeignField("repetition_ngram_size", (LMDEPLOY,)),
    ForeignField("repetition_ngram_threshold", (LMDEPLOY,), only_with={"repetition_ngram_size": 0}),
    ForeignField("custom_logit_processor", (SGLANG,)),
    ForeignField("custom_params", (SGLANG,)),
    ForeignField("samplers", (LLAMA,), ()),
    ForeignField("min_keep", (LLAMA,)),
    ForeignField("typical_p", (LLAMA, OLLAMA), (1,)),
    ForeignField("tfs_z", (LLAMA, OLLAMA), (1,)),
    ForeignField("top_n_sigma", (LLAMA,), (-1, 0)),
    ForeignField("xtc_probability", (LLAMA,)),
    ForeignField("xtc_threshold", (LLAMA,), only_with=_XTC),
    ForeignField("dynatemp_range", (LLAMA,)),
    ForeignField("dynatemp_exponent", (LLAMA,), only_with={"dynatemp_range": 0}),
    ForeignField("dry_multiplier", (LLAMA,)),
    ForeignField("dry_base", (LLAMA,), only_with=_DRY),
    ForeignField("dry_allowed_length", (LLAMA,), only_with=_DRY),
    ForeignField("dry_penalty_last_n", (LLAMA,), only_with=_DRY),
    ForeignField("dry_sequence_breakers", (LLAMA,), only_with=_DRY),
    ForeignField("mirostat", (LLAMA, OLLAMA)),
    ForeignField("mirostat_tau", (LLAMA, OLLAMA), only_with=_MIROSTAT),
    ForeignField("mirostat_eta", (LLAMA, OLLAMA), only_with=_MIROSTAT),
    ForeignField("adaptive_target", (LLAMA,), (-1,)),
    ForeignField("adaptive_decay", (LLAMA,), only_with={"adaptive_target": -1}),
    ForeignField("repeat_penalty", (LLAMA, OLLAMA), (1,), instead="repetition_penalty"),
    ForeignField("repeat_last_n", (LLAMA, OLLAMA), (-1,), only_with=_PENALTIES),
    ForeignField("penalize_nl", (LLAMA,), (True,), only_with=_PENALTIES),
    ForeignField("penalize_newline", (OLLAMA,), (True,), only_with=_PENALTIES),
    ForeignField("do_sample", (OTHERS,), (True,), instead="temperature"),
    ForeignField("num_beams", (OTHERS,), (1,)),
    ForeignField("top_a", (OTHERS,)),
    ForeignField("tfs", (OTHERS,), (1,)),
    ForeignField("epsilon_cutoff", (OTHERS,)),
    ForeignField("eta_cutoff", (OTHERS,)),
    ForeignField("smoothing_factor", (OTHERS,)),
    ForeignField("no_repeat_ngram_size", (OTHERS,)),
    ForeignField("mirostat_mode", (OTHERS,)),
    ForeignField("dynamic_temperature", (OTHERS,)),
    ForeignField("temperature_last", (OTHERS,)),
    ForeignField("guidance_scale", (OTHERS,), (1,)),
    ForeignField("negative_prompt", (OTHERS,)),
    ForeignField("ban_eos_token", (OTHERS,), instead="ignore_eos"),
    ForeignField("random_seed", (OTHERS,), (), instead="seed"),
    # other models
    ForeignField("lora", (LLAMA,)),
    ForeignField("lora_path", (SGLANG,)),
    ForeignField("adapter_name", (LMDEPLOY,)),
    # other ends of the output
    ForeignField("stop_regex", (SGLANG,)),
    ForeignField("no_stop_trim", (SGLANG,), instead="include_stop_str_in_output"),
    ForeignField("n_predict", (LLAMA,), (), instead="max_tokens"),
    ForeignField("num_predict", (OLLAMA,), (), instead="max_tokens"),
    ForeignField("max_new_tokens", (OTHERS,), (), instead="max_tokens"),
    ForeignField("min_new_tokens", (LMDEPLOY,), instead="min_tokens"),
    ForeignField("n_cmpl", (LLAMA,), (1,), instead="n"),
    ForeignField("n_indent", (LLAMA,)),
    ForeignField("t_max_predict_ms", (LLAMA,), (-1, 0)),
    ForeignField("reasoning_budget_tokens", (LLAMA,), (-1,)),
    ForeignField("reasoning_budget_start_tag", (LLAMA,), only_with=_BUDGET),
    ForeignField("reasoning_budget_end_tag", (LLAMA,), only_with=_BUDGET),
    ForeignField("reasoning_budget_message", (LLAMA,), only_with=_BUDGET),
    ForeignField("reasoning_budget_arm_immediately", (LLAMA,), only_with=_BUDGET),
    ForeignField("thinking_budget_tokens", (LLAMA,), (-1,)),
    # other prompts
    ForeignField("truncate_prompt_tokens", (VLLM,)),
    ForeignField("prompt_embeds", (VLLM,)),
    ForeignField("mm_processor_kwargs", (VLLM, LMDEPLOY)),
    ForeignField("media_io_kwargs", (VLLM,)),
    ForeignField("previous_input_messages", (VLLM,)),
    ForeignField("previous_response", (VLLM,)),
    ForeignField("vllm_xargs", (VLLM,)),
    ForeignField("input_ids", (SGLANG,)),
    ForeignField("session_params", (SGLANG,)),
    ForeignField("task", (SGLANG,)),
    ForeignField("do_preprocess", (LMDEPLOY,), (True,)),
    ForeignField("input_prefix", (LLAMA,)),
    ForeignField("input_suffix", (LLAMA,)),
    ForeignField("input_extra", (LLAMA,)),
    ForeignField("generation_prompt", (LLAMA,)),
    ForeignField("think", (OLLAMA,), ()),
    ForeignField("raw", (OLLAMA,)),
    ForeignField("template", (OLLAMA,)),
    ForeignField("context", (OLLAMA,)),
    ForeignField("images", (OLLAMA,)),
    ForeignField("options", (OLLAMA,), members=_RUNNER),
    ForeignField("_debug_render_only", (OLLAMA,)),
    # other answers to the same tokens
    ForeignField("regex", (SGLANG,)),
    ForeignField("ebnf", (SGLANG,)),
    ForeignField("structural_tag", (SGLANG,)),
    ForeignField("json_schema", (SGLANG, LLAMA)),
    ForeignField("format", (OLLAMA,), instead="response_format"),
    ForeignField("guided_whitespace_pattern", (VLLM,)),
    ForeignField("grammar_lazy", (LLAMA,)),
    ForeignField("grammar_triggers", (LLAMA,)),
    ForeignField("preserved_tokens", (LLAMA,)),
    ForeignField("spaces_between_special_tokens", (VLLM, SGLANG, LMDEPLOY), EITHER),
    ForeignField("separate_reasoning", (SGLANG,), (True,)),
    ForeignField("reasoning_format", (LLAMA,), ("auto", "deepseek")),
    ForeignField("parse_tool_calls", (LLAMA,), (True,)),
    ForeignField("thinking_forced_open", (LLAMA,)),
    ForeignField("chat_format", (LLAMA,)),
    ForeignField("chat_parser", (LLAMA,)),
    ForeignField("logprob_token_ids", (VLLM,), ()),
    ForeignField("n_probs", (LLAMA,), instead="logprobs"),
    ForeignField("post_sampling_probs", (LLAMA,)),
    ForeignField("return_hidden_states", (SGLANG,)),
    ForeignField("return_routed_experts", (SGLANG, LMDEPLOY)),
    ForeignField("return_prompt_token_ids", (SGLANG,), instead="return_token_ids"),
    ForeignField("return_tokens", (LLAMA,), instead="return_token_ids"),
    # other caches
    ForeignField("kv_transfer_params", (VLLM,)),
    ForeignField("ec_transfer_params", (VLLM,)),
    ForeignField("migration_request", (LMDEPLOY,)),
    ForeignField("extra_key", (SGLANG,), instead="cache_salt"),
)
_HARMLESS = (
    _harmless("request_id", VLLM),
    _harmless("rid", SGLANG),
    _harmless("session_id", VLLM, SGLANG, LMDEPLOY, neutral=(-1,)),
    _harmless("truncation_side", VLLM),
    _harmless("guided_decoding_backend", VLLM),
    _harmless("return_token_offsets", VLLM),
    _harmless("return_prompt_text", VLLM),
    _harmless("return_mm_kwargs", VLLM, neutral=EITHER),
    _harmless("routed_experts_prompt_start", VLLM),
    _harmless("routed_experts_start_len", SGLANG),
    _harmless("stream_interval", VLLM, neutral=(1,)),
    _harmless("enable_response_messages", VLLM),
    _harmless("return_meta_info", SGLANG),
    _harmless("stream_reasoning", SGLANG, neutral=(True,)),
    _harmless("images_config", SGLANG),
    _harmless("max_dynamic_patch", SGLANG),
    _harmless("min_dynamic_patch", SGLANG),
    _harmless("use_audio_in_video", SGLANG),
    _harmless("bootstrap_host", SGLANG),
    _harmless("bootstrap_port", SGLANG),
    _harmless("bootstrap_room", SGLANG),
    _harmless("routed_dp_rank", SGLANG),
    _harmless("disagg_prefill_dp_rank", SGLANG),
    _harmless("data_parallel_rank", SGLANG),
    _harmless("ngram_corpus_id", SGLANG),
    _harmless("custom_labels", SGLANG),
    _harmless("with_cache", LMDEPLOY),
    _harmless("preserve_cache", LMDEPLOY),
    _harmless("cache_prompt", LLAMA, neutral=(True,)),
    _harmless("id_slot", LLAMA, neutral=(-1,)),
    _harmless("n_keep", LLAMA),
    _harmless("n_discard", LLAMA),
    _harmless("n_cache_reuse", LLAMA),
    _harmless("response_fields", LLAMA),
    _harmless("timings_per_token", LLAMA),
    _harmless("return_progress", LLAMA),
    _harmless("sse_ping_interval", LLAMA),
    _harmless("backend_sampling", LLAMA, neutral=EITHER),
    *(
        _harmless(f"speculative.{name}", LLAMA)
        for name in ("n_max", "n_min", "p_min", "type", "ngram_size_n", "ngram_size_m", "ngram_m_hits")
    ),
    _harmless("keep_alive", OLLAMA),
    _harmless("truncate", OLLAMA, neutral=EITHER),
    _harmless("shift", OLLAMA, neutral=EITHER),
    *(_harmless(name, OLLAMA) for name in sorted(_RUNNER)),
)
FOREIGN: Mapping[str, ForeignField] = {field.name: field for field in (*_REFUSED, *_HARMLESS)}
"""In the order in which they are refused: a field before those that have an effect only with it."""
_PLACES = {name: place for place, name in enumerate(FOREIGN)}


def refuse_foreign(body: Mapping[str, Any], *, with_hints: bool = True) -> None:
    """Raise APIError for the first field of the table that would change the answer.

    `with_hints`: the error says which field means the same on chat and completions.
    """
    for field in _given(body):
        if field.is_refused and not _only_members(field, body[field.name]) and _has_effect(field, body):
            raise unsupported_parameter(field.name, field.instead if with_hints else None)


def ignored_foreign(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of the table that ask for something, and are not refused."""
    return tuple(field.name for field in _given(body) if not field.is_refused or _only_members(field, body[field.name]))


def _given(body: Mapping[str, Any]) -> Iterable[ForeignField]:
    """Return the fields that have other than neutral values, in the table's order."""
    for name in sorted(body.keys() & FOREIGN.keys(), key=_PLACES.__getitem__):
        field, value = FOREIGN[name], body[name]
        if value is not None and not _is_neutral(field, value):
            yield field


def _is_neutral(field: ForeignField, value: Any) -> bool:
    # Python takes true for 1
    return any(value == neutral and (value is True) == (neutral is True) for neutral in field.neutral)


def _only_members(field: ForeignField, value: Any) -> bool:
    return bool(field.members) and type(value) is dict and value.keys() <= field.members


def _has_effect(field: ForeignField, body: Mapping[str, Any]) -> bool:
    others = field.only_with
    return not others or any(body.get(name) not in (None, neutral) for name, neutral in others.items())
