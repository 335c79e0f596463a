"""Writes a ModelConfig as a Hugging Face config.json, in the spelling of transformers 4.x or 5.x."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Literal

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.quantization import Quantization
from qwenjax.rope_config import RopeScaling

Spelling = Literal["4.x", "5.x"]
SPELLINGS: tuple[Spelling, ...] = ("4.x", "5.x")
_SAME_IN_BOTH = (  # fields that every config.json of these architectures names as ModelConfig does
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "initializer_range",
    "bos_token_id",
    "pad_token_id",
)


def to_hf(config: ModelConfig, spelling: Spelling = "4.x") -> dict[str, Any]:
    """The object of a config.json from which `ModelConfig.from_hf` reads an equal config.

    Raises InputError for the fields of a config that no config.json of its model_type can say.
    """
    if spelling not in SPELLINGS:
        raise InputError("spelling", spelling, "is not a spelling of config.json", f"Known: {', '.join(SPELLINGS)}.")
    modern = spelling == "5.x"
    name = "".join(part.capitalize() for part in config.model_type.split("_"))
    data: dict[str, Any] = {field: getattr(config, field) for field in _SAME_IN_BOTH}
    data |= {"architectures": [f"{name}ForCausalLM"], "hidden_act": "silu", "attention_dropout": 0.0, "use_cache": True}
    data |= _attention(config) | _windows(config, modern) | _rope(config, modern) | _experts(config, modern)
    if config.dtype:
        data["dtype" if modern else "torch_dtype"] = config.dtype
    if config.eos_token_id:
        data["eos_token_id"] = config.eos_token_id[0] if len(config.eos_token_id) == 1 else [*config.eos_token_id]
    if config.quantization:
        data["quantization_config"] = _quantization(config.quantization)
    _check_same(config, ModelConfig.from_hf(data))
    return dict(sorted(data.items()))


def _check_same(config: ModelConfig, again: ModelConfig) -> None:
    names = [field.name for field in fields(config) if field.compare]
    lost = [name for name in names if getattr(config, name) != getattr(again, name)]
    if lost:
        told = ", ".join(f"{name} {getattr(config, name)!r}" for name in lost)
        problem = f"no config.json of {config.model_type} can say {told}"
        raise InputError("config", None, problem, "Use values that this architecture has.")


def _attention(config: ModelConfig) -> dict[str, Any]:
    data: dict[str, Any] = {}
    if config.model_type.startswith("qwen3"):
        data["attention_bias"] = config.attention_o_bias
    elif config.model_type == "qwen2_moe":
        data["qkv_bias"] = config.qkv_bias
    # Published Qwen2 files state head_dim nowhere; it stands where it isn't what its absence says.
    if config.qk_norm or config.head_dim * config.num_attention_heads != config.hidden_size:
        data["head_dim"] = config.head_dim
    return data


def _windows(config: ModelConfig, modern: bool) -> dict[str, Any]:
    windows = config.sliding_windows
    used = [i for i, window in enumerate(windows) if window is not None]
    data: dict[str, Any] = {"use_sliding_window": bool(used), "max_window_layers": config.num_hidden_layers}
    data["sliding_window"] = windows[used[0]] if used else 0 if modern and config.model_type == "qwen2_moe" else None
    if config.model_type == "qwen3_moe":  # has no layer_types: it windows every layer or none
        return data
    if used:
        data["max_window_layers"] = used[-1] + 1 if config.model_type == "qwen2_moe" else used[0]
    if used or modern:
        data["layer_types"] = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return data


def _rope(config: ModelConfig, modern: bool) -> dict[str, Any]:
    block = _scaling(config.rope_scaling, config.max_position_embeddings) if config.rope_scaling else None
    if modern:
        return {"rope_parameters": (block or {"rope_type": "default"}) | {"rope_theta": config.rope_theta}}
    return {"rope_theta": config.rope_theta, "rope_scaling": block}


def _scaling(scaling: RopeScaling, positions: int) -> dict[str, Any]:
    """The block of a scaling; values that its absence says are left out."""
    block: dict[str, Any] = {"rope_type": scaling.rope_type, "factor": scaling.factor}
    if scaling.rope_type == "yarn" or scaling.original_max_position_embeddings != positions:
        block["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    for field in fields(scaling):
        value = getattr(scaling, field.name)
        if field.name not in ("rope_type", "factor", "original_max_position_embeddings") and value != field.default:
            block[field.name] = value
    return block


def _experts(config: ModelConfig, modern: bool) -> dict[str, Any]:
    if not config.model_type.endswith("_moe"):
        return {}
    data: dict[str, Any] = {
        "num_experts_per_tok": config.num_experts_per_tok,
        "moe_intermediate_size": config.moe_intermediate_size,
        "norm_topk_prob": config.norm_topk_prob,
        "decoder_sparse_step": config.decoder_sparse_step,
        "mlp_only_layers": list(config.mlp_only_layers),
        "router_aux_loss_coef": config.router_aux_loss_coef,
        "output_router_logits": False,
    }
    if config.model_type == "qwen2_moe":
        data["shared_expert_intermediate_size"] = config.shared_expert_intermediate_size
    key = "num_local_experts" if modern and config.model_type == "qwen3_moe" else "num_experts"
    return data | {key: config.num_experts}


def _quantization(stored: Quantization) -> dict[str, Any]:
    kept = list(stored.modules_to_not_convert)
    if stored.method == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": stored.algorithm, "ignore": kept}
    data: dict[str, Any] = {"quant_method": stored.method, "modules_to_not_convert": kept}
    if stored.method == "fp8":
        return data | {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(stored.block or ())}
    return data | {"bits": stored.bits, "group_size": -1 if stored.group_size is None else stored.group_size}
