"""The fields of other servers' request schemas, as their sources list them. Read on 2026-11-27, vLLM's (0.32.0)
again on 2026-12-01.

vLLM: `vllm/entrypoints/*/*/protocol.py`, for embeddings without what only their chats have; SGLang:
`python/sglang/srt/entrypoints/openai/protocol.py`; LMDeploy: `lmdeploy/serve/openai/protocol.py`; llama.cpp:
`tools/server/server-task.cpp`, `server-common.cpp` and its README; Ollama: `openai/openai.go`, and `api/types.go` for
what its clients send along.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS, SCORE, RERANK = "/v1/messages", "/v1/embeddings", "/v1/score", "/v1/rerank"

_VLLM_SAMPLING = """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words
add_special_tokens structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params
ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget guided_json guided_regex
guided_choice guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag logits_processors best_of
early_stopping"""
_VLLM_POOLED = """model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
cache_salt use_activation"""
_VLLM_JUDGED = f"{_VLLM_POOLED} max_tokens_per_query max_tokens_per_doc instruction chat_template_kwargs"
_SGLANG = """return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
return_token_ids top_k min_p min_tokens regex ebnf repetition_penalty stop_token_ids stop_regex no_stop_trim
ignore_eos skip_special_tokens lora_path session_id session_params custom_params custom_logit_processor
images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank disagg_prefill_dp_rank data_parallel_rank rid
extra_key cache_salt ngram_corpus_id priority"""
_LMDEPLOY = """repetition_penalty session_id ignore_eos skip_special_tokens spaces_between_special_tokens top_k seed
min_p return_token_ids do_preprocess min_new_tokens include_stop_str_in_output adapter_name mm_processor_kwargs
return_routed_experts repetition_ngram_size repetition_ngram_threshold with_cache preserve_cache migration_request"""
_LLAMA = """timings_per_token cache_prompt return_tokens return_progress n_predict n_indent n_keep n_discard n_cmpl
n_cache_reuse t_max_predict_ms response_fields top_k top_p min_p top_n_sigma xtc_probability xtc_threshold typical_p
temperature dynatemp_range dynatemp_exponent repeat_last_n repeat_penalty frequency_penalty presence_penalty
dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta
adaptive_target adaptive_decay seed n_probs min_keep backend_sampling post_sampling_probs speculative.n_min
speculative.n_max speculative.p_min speculative.type speculative.ngram_size_n speculative.ngram_size_m
speculative.ngram_m_hits lora json_schema grammar_lazy grammar_triggers preserved_tokens chat_format
reasoning_format thinking_forced_open parse_tool_calls chat_parser reasoning_budget_tokens reasoning_budget_start_tag
reasoning_budget_end_tag reasoning_budget_message reasoning_budget_arm_immediately thinking_budget_tokens logit_bias
ignore_eos stop samplers id_slot input_prefix input_suffix input_extra generation_prompt sse_ping_interval tfs_z
penalize_nl"""
_OLLAMA = """keep_alive format think truncate shift raw template system context images options _debug_render_only
num_ctx num_batch num_gpu main_gpu use_mmap num_thread numa low_vram f16_kv logits_all vocab_only use_mlock num_keep
num_predict tfs_z typical_p repeat_last_n repeat_penalty mirostat mirostat_tau mirostat_eta penalize_newline"""

PEER_FIELDS: Mapping[tuple[str, str], frozenset[str]] = {
    key: frozenset(fields.split())
    for key, fields in {
        ("vLLM", COMPLETIONS): f"{_VLLM_SAMPLING} prompt_embeds response_format echo suffix",
        ("vLLM", CHAT): f"""{_VLLM_SAMPLING} reasoning_effort include_reasoning echo add_generation_prompt
            continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
            return_prompt_text""",
        ("vLLM", RESPONSES): """background include input instructions max_output_tokens max_tool_calls metadata model
            logit_bias parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature
            text tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens
            include_stop_str_in_output prompt_cache_key request_id mm_processor_kwargs priority cache_salt
            enable_response_messages previous_input_messages previous_response structured_outputs repetition_penalty
            seed stop stop_token_ids ignore_eos vllm_xargs presence_penalty frequency_penalty chat_template_kwargs
            include_reasoning min_p watermarking session_id media_io_kwargs mm_payload return_mm_kwargs
            kv_transfer_params ec_transfer_params""",
        ("vLLM", MESSAGES): """model messages max_tokens metadata output_config thinking stop_sequences stream system
            temperature tool_choice tools top_k top_p mm_payload return_mm_kwargs cache_salt watermarking
            kv_transfer_params ec_transfer_params vllm_xargs chat_template_kwargs""",
        ("vLLM", EMBEDDINGS): f"""{_VLLM_POOLED} input add_special_tokens messages chat_template encoding_format
            embed_dtype endianness dimensions normalize""",
        ("vLLM", SCORE): f"{_VLLM_JUDGED} text_1 text_2 queries documents items data_1 data_2",
        ("vLLM", RERANK): f"{_VLLM_JUDGED} query documents top_n",
        ("SGLang", COMPLETIONS): f"{_SGLANG} json_schema custom_labels echo suffix best_of response_format",
        ("SGLang", CHAT): f"""{_SGLANG} return_prompt_token_ids return_meta_info reasoning_effort reasoning task
            continue_final_message separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
            min_dynamic_patch use_audio_in_video input_ids""",
        ("SGLang", RESPONSES): """background include input instructions max_output_tokens max_tool_calls metadata
            conversation parallel_tool_calls previous_response_id reasoning service_tier store text tool_choice tools
            top_logprobs truncation user request_id priority extra_key cache_salt frequency_penalty presence_penalty
            stop top_k min_p repetition_penalty""",
        ("LMDeploy", COMPLETIONS): f"{_LMDEPLOY} suffix echo logprobs",
        ("LMDeploy", CHAT): f"{_LMDEPLOY} enable_thinking chat_template_kwargs reasoning_effort",
        ("llama.cpp", COMPLETIONS): _LLAMA,
        ("llama.cpp", CHAT): f"{_LLAMA} add_generation_prompt chat_template_kwargs continue_final_message",
        ("Ollama", COMPLETIONS): f"{_OLLAMA} suffix",
        ("Ollama", CHAT): f"{_OLLAMA} reasoning reasoning_effort",
    }.items()
}
