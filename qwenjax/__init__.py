"""Qwen decoders in JAX and Flax, from Hugging Face configs and checkpoints.

JAX is imported with the first name that needs it, so that counting and estimating start without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

if TYPE_CHECKING:
    from qwenjax.cache import KVCache, init_cache
    from qwenjax.checkpoint.loading import load
    from qwenjax.checkpoint.saving import save
    from qwenjax.generation import generate
    from qwenjax.model import Decoder, decode_step, extend, forward, hidden_states, prefill
    from qwenjax.weights import init_params, param_shapes

_LAZY = {
    "Decoder": "model",
    "KVCache": "cache",
    "decode_step": "model",
    "extend": "model",
    "forward": "model",
    "generate": "generation",
    "hidden_states": "model",
    "init_cache": "cache",
    "init_params": "weights",
    "load": "checkpoint.loading",
    "param_shapes": "weights",
    "prefill": "model",
    "save": "checkpoint.saving",
}

__all__ = [
    "Decoder",
    "InputError",
    "KVCache",
    "ModelConfig",
    "decode_step",
    "extend",
    "forward",
    "generate",
    "hidden_states",
    "init_cache",
    "init_params",
    "load",
    "param_shapes",
    "prefill",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'qwenjax' has no attribute {name!r}")
    return getattr(import_module(f"qwenjax.{_LAZY[name]}"), name)
