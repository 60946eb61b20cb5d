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
from functools import partial
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
    neutral: tuple[object, ...]
    """Values that are accepted in silence, since they ask for nothing."""
    is_refused: bool = True
    """Whether other values are refused, since they would change the answer, or only named in a header."""
    instead: str | None = None
    """The field of chat and completions that means the same."""
    only_with: Mapping[str, object] = attrs.field(factory=dict)
    """Fields without which it has no effect, and their own neutral values. Empty: it has an effect by itself."""
    members: frozenset[str] = frozenset()
    """An object with no others than these is named, not refused."""


def _fields(names: str, *servers: str, neutral: tuple[object, ...] = OFF, **declared: Any) -> tuple[ForeignField, ...]:
    """Declare fields that have everything but their names in common."""
    return tuple(ForeignField(name, servers, neutral, **declared) for name in names.split())


_PENALTIES = {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
_RUNNER = (
    "f16_kv logits_all low_vram main_gpu num_batch num_ctx num_gpu num_keep num_thread numa use_mlock use_mmap "
    "vocab_only"
)
"""Options of Ollama that say how a model is loaded."""

_REFUSED = (
    # other ways to choose tokens
    *_fields("use_beam_search early_stopping watermarking logits_processors repetition_detection", VLLM),
    *_fields("length_penalty", VLLM, neutral=(1,)),
    *_fields("repetition_ngram_size", LMDEPLOY),
    *_fields("repetition_ngram_threshold", LMDEPLOY, only_with={"repetition_ngram_size": 0}),
    *_fields("custom_logit_processor custom_params", SGLANG),
    *_fields("samplers", LLAMA, neutral=()),
    *_fields("min_keep", LLAMA),
    *_fields("typical_p tfs_z", LLAMA, OLLAMA, neutral=(1,)),
    *_fields("top_n_sigma", LLAMA, neutral=(-1, 0)),
    *_fields("xtc_probability dynatemp_range dry_multiplier", LLAMA),
    *_fields("xtc_threshold", LLAMA, only_with={"xtc_probability": 0}),
    *_fields("dynatemp_exponent", LLAMA, only_with={"dynatemp_range": 0}),
    *_fields(
        "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", LLAMA, only_with={"dry_multiplier": 0}
    ),
    *_fields("mirostat", LLAMA, OLLAMA),
    *_fields("mirostat_tau mirostat_eta", LLAMA, OLLAMA, only_with={"mirostat": 0}),
    *_fields("adaptive_target", LLAMA, neutral=(-1,)),
    *_fields("adaptive_decay", LLAMA, only_with={"adaptive_target": -1}),
    *_fields("repeat_penalty", LLAMA, OLLAMA, neutral=(1,), instead="repetition_penalty"),
    *_fields("repeat_last_n", LLAMA, OLLAMA, neutral=(-1,), only_with=_PENALTIES),
    *_fields("penalize_nl", LLAMA, neutral=(True,), only_with=_PENALTIES),
    *_fields("penalize_newline", OLLAMA, neutral=(True,), only_with=_PENALTIES),
    *_fields("do_sample", OTHERS, neutral=(True,), instead="temperature"),
    *_fields("num_beams tfs guidance_scale", OTHERS, neutral=(1,)),
    *_fields("top_a epsilon_cutoff eta_cutoff smoothing_factor no_repeat_ngram_size mirostat_mode", OTHERS),
    *_fields("dynamic_temperature temperature_last negative_prompt", OTHERS),
    *_fields("ban_eos_token", OTHERS, instead="ignore_eos"),
    *_fields("random_seed", OTHERS, neutral=(), instead="seed"),
    # other models
    *_fields("lora", LLAMA),
    *_fields("lora_path", SGLANG),
    *_fields("adapter_name", LMDEPLOY),
    # other ends of the output
    *_fields("stop_regex", SGLANG),
    *_fields("no_stop_trim", SGLANG, instead="include_stop_str_in_output"),
    *_fields("n_predict", LLAMA, neutral=(), instead="max_tokens"),
    *_fields("num_predict", OLLAMA, neutral=(), instead="max_tokens"),
    *_fields("max_new_tokens", OTHERS, neutral=(), instead="max_tokens"),
    *_fields("min_new_tokens", LMDEPLOY, instead="min_tokens"),
    *_fields("n_cmpl", LLAMA, neutral=(1,), instead="n"),
    *_fields("n_indent", LLAMA),
    *_fields("t_max_predict_ms", LLAMA, neutral=(-1, 0)),
    *_fields("reasoning_budget_tokens thinking_budget_tokens", LLAMA, neutral=(-1,)),
    *_fields(
        "reasoning_budget_start_tag reasoning_budget_end_tag reasoning_budget_message reasoning_budget_arm_immediately",
        LLAMA,
        only_with={"reasoning_budget_tokens": -1},
    ),
    # other prompts
    *_fields("prompt_embeds media_io_kwargs previous_input_messages previous_response", VLLM),
    *_fields("vllm_xargs", VLLM),
    *_fields("mm_processor_kwargs", VLLM, LMDEPLOY),
    *_fields("input_ids session_params task input_embeds video_data audio_data", SGLANG),
    *_fields("image_data", SGLANG, LLAMA),
    *_fields("do_preprocess", LMDEPLOY, neutral=(True,)),
    *_fields("input_prefix input_suffix input_extra generation_prompt", LLAMA),
    *_fields("think", OLLAMA, neutral=()),
    *_fields("raw template context images _debug_render_only", OLLAMA),
    *_fields("options", OLLAMA, members=frozenset(_RUNNER.split())),
    # other answers to the same tokens
    *_fields("regex ebnf structural_tag", SGLANG),
    *_fields("json_schema", SGLANG, LLAMA),
    *_fields("format", OLLAMA, instead="response_format"),
    *_fields("guided_whitespace_pattern", VLLM),
    *_fields("grammar_lazy grammar_triggers preserved_tokens", LLAMA),
    *_fields("spaces_between_special_tokens", VLLM, SGLANG, LMDEPLOY, neutral=EITHER),
    *_fields("separate_reasoning", SGLANG, neutral=(True,)),
    *_fields("reasoning_format", LLAMA, neutral=("auto", "deepseek")),
    *_fields("parse_tool_calls", LLAMA, neutral=(True,)),
    *_fields("thinking_forced_open chat_format chat_parser post_sampling_probs", LLAMA),
    *_fields("logprob_token_ids", VLLM, neutral=()),
    *_fields("token_ids_logprob", SGLANG),
    *_fields("n_probs", LLAMA, instead="logprobs"),
    *_fields("return_hidden_states", SGLANG),
    *_fields("return_routed_experts", SGLANG, LMDEPLOY),
    *_fields("return_prompt_token_ids", SGLANG, instead="return_token_ids"),
    *_fields("return_tokens", LLAMA, instead="return_token_ids"),
    # other caches
    *_fields("kv_transfer_params ec_transfer_params", VLLM),
    *_fields("migration_request", LMDEPLOY),
    *_fields("extra_key", SGLANG, instead="cache_salt"),
)
_harmless = partial(_fields, is_refused=False)
_HARMLESS = (
    *_harmless("request_id guided_decoding_backend return_token_offsets return_prompt_text", VLLM),
    *_harmless("routed_experts_prompt_start enable_response_messages", VLLM),
    *_harmless("return_mm_kwargs", VLLM, neutral=EITHER),
    *_harmless("mm_payload", VLLM, neutral=("tensors", "none")),
    *_harmless("stream_interval", VLLM, neutral=(1,)),
    *_harmless("session_id", VLLM, SGLANG, LMDEPLOY, neutral=(-1,)),
    *_harmless("rid routed_experts_start_len return_meta_info images_config max_dynamic_patch", SGLANG),
    *_harmless("min_dynamic_patch use_audio_in_video bootstrap_host bootstrap_port bootstrap_room", SGLANG),
    *_harmless("routed_dp_rank disagg_prefill_dp_rank data_parallel_rank ngram_corpus_id custom_labels", SGLANG),
    *_harmless("stream_reasoning", SGLANG, neutral=(True,)),
    *_harmless("with_cache preserve_cache", LMDEPLOY),
    *_harmless("cache_prompt", LLAMA, neutral=(True,)),
    *_harmless("id_slot", LLAMA, neutral=(-1,)),
    *_harmless("n_keep n_discard n_cache_reuse response_fields timings_per_token return_progress", LLAMA),
    *_harmless("sse_ping_interval speculative.n_max speculative.n_min speculative.p_min speculative.type", LLAMA),
    *_harmless("speculative.ngram_size_n speculative.ngram_size_m speculative.ngram_m_hits", LLAMA),
    *_harmless("backend_sampling", LLAMA, neutral=EITHER),
    *_harmless("keep_alive", OLLAMA),
    *_harmless("truncate shift", OLLAMA, neutral=EITHER),
    *_harmless(_RUNNER, OLLAMA),
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
