"""Qwen decoders in JAX and Flax, from Hugging Face configs and checkpoints."""

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

__all__ = ["InputError", "ModelConfig"]
