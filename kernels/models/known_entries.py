"""Names of entries of `config.json` that change nothing that is computed, by the reason. No torch.

`refusals.py` lets them pass with any value; an entry is added here only if the reason holds for every family.
"""

from __future__ import annotations


def words(*names: str) -> frozenset[str]:
    return frozenset(" ".join(names).split())


_ORIGIN = """
    _name_or_path name_or_path _commit_hash architectures auto_map model_type transformers_version custom_pipelines
    unsloth_version unsloth_fixed model_name for_llm_compressor transformers.js_config
"""
"""What the checkpoint is, who wrote it, and what other programs do with it."""
_TOKENS = """
    bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id mask_token_id unk_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id tokenizer_class processor_class prefix
    model_max_length max_sequence_length max_seq_length
"""
"""Of the tokenizer and its tokens: the tokenizer's own files decide, and for lengths `max_position_embeddings`."""
_GENERATION = """
    max_length max_new_tokens min_length min_new_tokens do_sample use_cache early_stopping num_beams num_beam_groups
    temperature top_k top_p min_p typical_p epsilon_cutoff eta_cutoff repetition_penalty encoder_repetition_penalty
    length_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate remove_invalid_values exponential_decay_length_penalty
    suppress_tokens begin_suppress_tokens cache_implementation num_assistant_tokens num_assistant_tokens_schedule
    assistant_confidence_threshold assistant_lookbehind target_lookbehind
"""
"""Defaults of generation, which transformers, too, takes from `generation_config.json` alone, and requests set."""
_TRAINING = """
    attention_dropout attn_pdrop embd_pdrop embedding_dropout hidden_dropout resid_pdrop residual_dropout
    activation_dropout classifier_dropout initializer_range initializer_factor init_method neftune_noise_alpha
    gradient_checkpointing router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux input_jitter_noise
    altup_coef_clip altup_lr_multiplier pretraining_tp ep_size
"""
"""Of training, and how it was divided among devices."""
_OUTPUTS = """
    id2label label2id num_labels problem_type task_specific_params finetuning_task classifier_from_token
    is_original_qwen3_reranker is_matryoshka matryoshka_dimensions sentence_transformers
    sbert_ce_default_activation_function
    output_attentions output_hidden_states output_router_logits return_dict tie_last_hidden_states
    keys_to_ignore_at_inference
"""
"""What is made of the last states (`actors/shared/pooling_files.py` reads it), and what Python callers are handed."""
_COMPUTING = """
    dtype torch_dtype torchscript tf_legacy_loss use_bfloat16 xla_device chunk_size_feed_forward
    attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
    experts_implementation _experts_implementation _experts_implementation_internal _flash_attn_2_enabled
    is_decoder tie_encoder_decoder qk_head_dim quantization_config
"""
"""How it is computed: `checkpoints/` reads data types and `quantization_config`, or refuses them; the width of heads
with latents follows from its parts, and a decoder is one."""
NEUTRAL = words(_ORIGIN, _TOKENS, _GENERATION, _TRAINING, _OUTPUTS, _COMPUTING)
BESIDE_DECODER = words(
    """
    text_config vision_config audio_config
    image_token_id image_token_index video_token_id video_token_index audio_token_id audio_token_index
    boi_token_id boi_token_index eoi_token_id eoi_token_index boa_token_id boa_token_index eoa_token_id eoa_token_index
    mm_tokens_per_image vision_soft_tokens_per_image audio_soft_tokens_per_image
    multimodal_projector_bias projector_hidden_act spatial_merge_size vision_feature_layer
    """
)
"""Entries of a model that also reads images or sound, which its decoder does not need for text."""
