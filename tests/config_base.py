"""Small valid config.json objects of the four architectures, and how the tests change them."""

from __future__ import annotations

import copy
from typing import Any

from qwenjax.config import ModelConfig

Json = dict[str, Any]
DROP: Any = object()  # as a value: the key is left out

_DENSE: Json = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SPARSE: Json = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}

QWEN2: Json = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **_DENSE}
QWEN3: Json = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_DENSE, "head_dim": 32}
QWEN2_MOE: Json = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    **_DENSE,
    **_SPARSE,
    "shared_expert_intermediate_size": 48,
}
QWEN3_MOE: Json = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    **_DENSE,
    **_SPARSE,
    "head_dim": 32,
}
BASES: dict[str, Json] = {"qwen2": QWEN2, "qwen3": QWEN3, "qwen2_moe": QWEN2_MOE, "qwen3_moe": QWEN3_MOE}


def changed(base: Json, **changes: Any) -> Json:
    """A config of its own, down to its blocks: transformers writes into those that it is given."""
    return copy.deepcopy({key: value for key, value in (base | changes).items() if value is not DROP})


def read(base: Json, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(changed(base, **changes))


def notes(config: ModelConfig) -> dict[tuple[str, str], str]:
    return {(note.kind, note.field): note.text for note in config.notes}
