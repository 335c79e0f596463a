"""The keys that a Hugging Face config.json may hold, each used, harmless, or refused by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class Note(NamedTuple):
    """A remark about a reading: kind is default (taken because missing), ignored, or warning."""

    kind: str
    field: str
    text: str


# Above these a size is a slip of the pen, not a model; they also keep every count below 2^63.
LARGEST = 2**31
LIMITS = {
    "num_hidden_layers": 4096,
    "hidden_size": 2**20,
    "vocab_size": 2**26,
    "intermediate_size": 2**24,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "num_experts": 2**16,
    "num_experts_per_tok": 2**16,
    "moe_intermediate_size": 2**24,
    "shared_expert_intermediate_size": 2**24,
    "max_position_embeddings": LARGEST,
}

MODEL_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
# Decoders of which only the costs are known: the same operations, and weights that no model here loads.
COST_TYPES = ("llama", "mistral", "mixtral")
# The first Qwen generation: known sizes only, since its config.json has keys of its own.
FIRST_QWEN = "qwen"
MOE_TYPES = ("qwen2_moe", "qwen3_moe", "mixtral")

# Keys that ModelConfig reads. One spelling per concept; the other spellings are in ALIASES.
USED = frozenset(
    {
        "model_type",
        "architectures",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "tie_word_embeddings",
        "attention_bias",
        "qkv_bias",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
        "output_router_logits",
        "router_aux_loss_coef",
        "dtype",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "initializer_range",
        "attention_dropout",
        "quantization_config",
    }
)

# transformers 5 renamed torch_dtype to dtype and writes num_local_experts; DeepSeek-style files say n_routed_experts.
ALIASES: dict[str, tuple[str, ...]] = {
    "dtype": ("dtype", "torch_dtype"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}

# Keys without any effect on shapes, costs or logits of a causal decoder: bookkeeping, generation defaults that
# transformers 4 wrote into config.json, and the switches of its output objects.
HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "_attn_implementation_internal",
        "attn_implementation",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "chunk_size_feed_forward",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "label2id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "prefix",
        "problem_type",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
        "use_qk_norm",  # checked against the architecture
        "_from_model_config",
    }
)

# Harmless in the configs of Llama, Mistral and Mixtral: how a matrix was cut in pretraining, training noise, and names
# that conversion scripts left.
LLAMA_HARMLESS = frozenset({"pretraining_tp", "router_jitter_noise", "max_sequence_length"})


class Only(NamedTuple):
    """A key that is harmless at one value and changes the model at any other."""

    value: Any
    meaning: str


HARMLESS_ONLY: dict[str, Only] = {
    "add_cross_attention": Only(False, "cross attention"),
    "is_decoder": Only(False, "an encoder-decoder stack"),
    "is_encoder_decoder": Only(False, "an encoder-decoder stack"),
    "cross_attention_hidden_size": Only(None, "cross attention"),
    "tie_encoder_decoder": Only(False, "an encoder-decoder stack"),
    "pruned_heads": Only({}, "pruning of attention heads"),
    "use_mrope": Only(False, "multimodal rotary embedding"),
    "mlp_bias": Only(False, "a bias in the MLP"),
    "pretraining_tp": Only(1, "a layout of tensor-parallel pretraining"),
    "partial_rotary_factor": Only(1, "rotary embedding of a part of each head"),
}

# Keys of architectures or features that nothing here implements, with the reason that the refusal gives. At null,
# false, 0 or empty they say that the feature is absent.
REFUSED: dict[str, str] = {
    "dual_chunk_attention_config": "dual chunk attention is not plain causal attention and is not implemented",
    "vision_config": "vision models are not implemented",
    "audio_config": "audio models are not implemented",
    "text_config": "the decoder's fields are nested in a multimodal config; multimodal models are not implemented",
    "thinker_config": "omni models (vision and audio) are not implemented",
    "talker_config": "omni models (vision and audio) are not implemented",
    "full_attention_interval": "hybrid linear attention is not implemented",
    "linear_num_key_heads": "hybrid linear attention is not implemented",
    "linear_num_value_heads": "hybrid linear attention is not implemented",
    "linear_key_head_dim": "hybrid linear attention is not implemented",
    "linear_value_head_dim": "hybrid linear attention is not implemented",
    "linear_conv_kernel_dim": "hybrid linear attention is not implemented",
    "attn_output_gate": "gated attention output is not implemented",
    "quantization": "weights quantised by MLX are not implemented",
    "num_nextn_predict_layers": "multi-token prediction layers are not implemented",
    "mtp_num_hidden_layers": "multi-token prediction layers are not implemented",
    "n_shared_experts": "shared experts in the DeepSeek spelling are not implemented",
    "num_shared_experts": "shared experts in the DeepSeek spelling are not implemented",
}

# Why a model_type outside MODEL_TYPES is refused; the first matching prefix answers.
FOREIGN_TYPES: tuple[tuple[str, str], ...] = (
    ("qwen2_vl", "vision models are not implemented"),
    ("qwen2_5_vl", "vision models are not implemented"),
    ("qwen2_5_omni", "omni models (vision and audio) are not implemented"),
    ("qwen2_audio", "audio models are not implemented"),
    ("qwen3_vl", "vision models are not implemented"),
    ("qwen3_asr", "audio models are not implemented"),
    ("qwen3_omni", "omni models (vision and audio) are not implemented"),
    ("qwen3_next", "hybrid linear attention is not implemented"),
    ("qwen3_5", "hybrid linear attention is not implemented"),
    ("qwen", "the first Qwen generation runs custom code and is not implemented"),
)

# Other JSON files of a checkpoint folder, by a key that gives them away.
OTHER_FILES: dict[str, str] = {
    "weight_map": "the index of a sharded checkpoint",
    "quantization": "modelopt's hf_quant_config.json",
    "added_tokens_decoder": "a tokenizer_config.json",
    "temperature": "a generation_config.json",
    "do_sample": "a generation_config.json",
}
