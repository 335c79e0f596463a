"""Training text as bytes, and batches that follow from the seed and the step alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

Tokens = np.ndarray[Any, np.dtype[Any]]
NUM_BYTES = 256
LONGEST_TEXT = 2**31 - 1  # places are drawn as int32


def read_bytes(config: ModelConfig, path: str | os.PathLike[str], sequence_len: int) -> Tokens:
    """A file's bytes as token ids 0 to 255, one array that stays in the file's memory map."""
    if config.vocab_size < NUM_BYTES:
        remedy = f"Use a config with at least {NUM_BYTES}."
        raise InputError("vocab_size", config.vocab_size, "has no row for every byte", remedy)
    path = Path(path)
    try:
        size = path.stat().st_size
        if size < sequence_len:
            problem = f"holds {size} bytes, fewer than one sequence of {sequence_len}"
            raise InputError(str(path), None, problem, "Use a longer text or shorter sequences.")
        if size > LONGEST_TEXT:
            raise InputError(str(path), None, f"holds {size} bytes, more than {LONGEST_TEXT}", "Split the text.")
        return np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise InputError(str(path), None, f"can't be read ({error.strerror})", "Name a file of text.") from error


def sample_batch(tokens: Tokens, rng: Any, step: int, batch_size: int, sequence_len: int) -> Tokens:
    """[B, T] int32: windows at random places of the text, the same ones for the same rng (a key's data) and step."""
    key = jax.random.fold_in(jax.random.wrap_key_data(rng, impl="threefry2x32"), step)
    starts = np.asarray(jax.random.randint(key, (batch_size,), 0, len(tokens) - sequence_len + 1))
    return np.stack([tokens[start : start + sequence_len] for start in starts]).astype(np.int32)
