"""What a config.json of Llama, Mistral or Mixtral says where it differs from Qwen's: the same decoder, other defaults.

Only costs are known of these models. Defaults are those of transformers' LlamaConfig, MistralConfig and MixtralConfig.
"""

from __future__ import annotations

from typing import Any

from qwenjax.errors import InputError
from qwenjax.field_reader import REQUIRED, FieldReader

POSITIONS_DEFAULT = {"llama": 2048, "mistral": 131072, "mixtral": 131072}
_KV_HEADS_DEFAULT = {"mistral": 8, "mixtral": 8}
_WINDOW_DEFAULT = 4096  # MistralConfig's, where the key is missing; null means none


def read_kv_heads(reader: FieldReader, model_type: str, heads: int) -> int:
    """num_key_value_heads; Llama's first checkpoints don't state it, and each head then has its own."""
    key, default = "num_key_value_heads", _KV_HEADS_DEFAULT.get(model_type, heads)
    if reader.stated(key):
        value: int = reader.integer(key)
        return value
    taken = heads if key in reader.data else default
    absent = "null" if key in reader.data else "missing"
    reader.note("default", key, f"{absent}; {taken} taken, as transformers takes it")
    return taken


def read_biases(reader: FieldReader, model_type: str) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether o has one: attention_bias gives all four of Llama's."""
    for key in ("qkv_bias", *(() if model_type == "llama" else ("attention_bias",))):
        if reader.boolean(key, False):
            raise InputError(key, True, f"{model_type} has no biases in attention", "Remove the key.")
    bias = model_type == "llama" and reader.boolean("attention_bias", False)
    return bias, bias


def read_windows(reader: FieldReader, model_type: str, layers: int) -> tuple[int | None, ...]:
    """One window for each layer: Mistral's and Mixtral's sliding_window holds for all of them, Llama has none."""
    for key in ("use_sliding_window", "max_window_layers", "layer_types"):
        if reader.stated(key):
            reader.note("ignored", key, f"not a key of {model_type}")
    window = reader.integer("sliding_window") if reader.stated("sliding_window") else None
    if model_type == "llama" and window is not None:
        reader.note("ignored", "sliding_window", f"{window} has no effect: llama attends everything")
        window = None
    if model_type == "mistral" and "sliding_window" not in reader.data:
        window = _WINDOW_DEFAULT
        reader.note("default", "sliding_window", f"missing; the class default {window} taken")
    return (window,) * layers


def read_mixtral(reader: FieldReader, width: int) -> dict[str, Any]:
    """Mixtral's experts: every layer is sparse, intermediate_size is an expert's width, weights are renormalised."""
    for key in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if reader.data.get(key):
            problem = "isn't a field of mixtral, whose experts are intermediate_size wide"
            raise InputError(key, reader.data[key], problem, "Remove the field.")
    return {
        "num_experts": reader.integer("num_experts", REQUIRED),
        "num_experts_per_tok": reader.integer("num_experts_per_tok", REQUIRED),
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
        "router_aux_loss_coef": reader.number("router_aux_loss_coef", 0.001, positive=False),
    }
