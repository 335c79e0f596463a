"""Tiny models whose sizes all differ, with weights and tokens that depend on their names alone.

Norm weights aren't one and biases aren't zero, so that a transpose or a forgotten term changes the logits. The values
come from a hash, not from a generator that a library may change: recorded results stay comparable.
"""

from __future__ import annotations

import hashlib
from typing import Any

import hf_bridge
import jax.numpy as jnp
import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.weights import Params

VOCAB = 101
Json = dict[str, Any]


def config_json(model_type: str = "qwen3", **changes: Any) -> Json:
    """A config.json in transformers' 4.x spelling: D 40, N 12, K 3, G 4, H 16 (N*H 192), F 56, V 101, three layers."""
    data: Json = {
        "model_type": model_type,
        "hidden_size": 40,
        "num_hidden_layers": 3,
        "num_attention_heads": 12,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "intermediate_size": 56,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return data | changes


def config(model_type: str = "qwen3", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(config_json(model_type, **changes))


def moe_json(model_type: str = "qwen3_moe", **changes: Any) -> Json:
    """The same with E 21, A 5, experts of F 24 and in Qwen2-MoE a shared one of F 36; a step of two rows gathers."""
    data = config_json(model_type, num_experts=21, num_experts_per_tok=5, moe_intermediate_size=24)
    if model_type == "qwen2_moe":
        data["shared_expert_intermediate_size"] = 36
    return data | changes


def moe_config(model_type: str = "qwen3_moe", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(moe_json(model_type, **changes))


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Values in [-1, 1) that depend on the name and the shape alone."""
    count = int(np.prod(shape))
    words = np.frombuffer(hashlib.shake_128(f"{name} {shape}".encode()).digest(4 * count), "<u4")
    return (words / 2.0**31 - 1).reshape(shape)


def tensor(key: str, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A checkpoint tensor: norms in [0.5, 1.5), biases in [-0.5, 0.5), matrices scaled to keep the variance."""
    values = uniform(key, shape)
    if "norm" in key:
        values = 1 + values / 2
    elif key.endswith(".bias"):
        values = values / 2
    elif "embed_tokens" not in key:
        values = values * (3 / shape[-1]) ** 0.5
    return values.astype(np.float32)


def state_dict(config: ModelConfig) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    return {item.key: tensor(item.key, item.stored_shape) for item in hf_bridge.tensors_of(config)}


def params(config: ModelConfig, dtype: str = "float32") -> Params:
    return hf_bridge.from_state_dict(config, state_dict(config), dtype)


def tokens(name: str, *shape: int, vocab: int = VOCAB) -> Any:
    """Token ids, an int32 array of this shape."""
    return jnp.asarray(((uniform(name, shape) + 1) / 2 * vocab).astype(np.int32))
