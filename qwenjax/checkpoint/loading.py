"""`load`: a checkpoint folder or hub id as a config and its parameter tree."""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from qwenjax.checkpoint import quantised
from qwenjax.checkpoint.hub import SMALL_FILES, local_folder
from qwenjax.checkpoint.layout import Tensor
from qwenjax.checkpoint.plan import Plan, Source, plan_loading, stored_bytes
from qwenjax.checkpoint.reading import aligned_empty, equal, fill
from qwenjax.checkpoint.shards import find_tensors
from qwenjax.config import ModelConfig, check_architecture
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from qwenjax.hf_reader import DTYPES
from qwenjax.ops import Scope
from qwenjax.progress import Progress, silent
from qwenjax.weights import Params, layer_scopes, leaves_of

_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def load(
    source: str | os.PathLike[str], dtype: Any = None, *, lm_head: bool = True, progress: Progress = silent
) -> tuple[ModelConfig, Params]:
    """The config and the parameters of a checkpoint: a folder, or a Hugging Face id that is downloaded.

    dtype: float32, bfloat16 or float16 for all arrays; by default what config.json says (to run on a CPU, take
    `running_dtype`). Tensors that don't match the config's architecture one to one are an InputError that lists them
    all, before any is read. Each is copied from its memory-mapped file straight to its slice; FP8 block-scale weights
    are dequantised in float32, and the config that comes back is then that of the plain weights. GPTQ, AWQ and modelopt
    are refused.
    With lm_head=False an untied output head is neither asked for nor read, as embedding models have none: the
    parameters then serve `hidden_states`, and whatever needs logits is an InputError.
    """
    chosen = None if dtype is None else _dtype_name(dtype)
    config = _read_config(source)
    folder = local_folder(source)
    plan = plan_loading(folder, config, find_tensors(folder), lm_head=lm_head)
    target = np.dtype(chosen or config.dtype or _common_dtype(plan))
    embedding = next(source for tensor, source in plan.steps if tensor.leaf == "embed_tokens")
    if plan.tied_head and not equal(plan.tied_head, embedding):
        raise InputError(
            plan.tied_head.key,
            None,
            f"differs from {embedding.key}, although tie_word_embeddings is true",
            "Set tie_word_embeddings to false in config.json if the head is its own matrix, or remove the tensor.",
        )
    params = _read(config, plan, target, progress)
    return _plain(config), params


def running_dtype() -> str | None:
    """The dtype to load a checkpoint in to run it here, None for its own: on a CPU 16 bits are widened to float32.

    XLA's 16-bit matrix products are more than 20 times slower there (bench/results, JAX 0.10).
    """
    return "float32" if jax.default_backend() == "cpu" else None


def _read_config(source: str | os.PathLike[str]) -> ModelConfig:
    """The config, read and judged before any weights are downloaded."""
    folder = local_folder(source, SMALL_FILES)
    config = check_architecture(ModelConfig.from_hf(folder))
    quantised.check_stated(config)
    return config if os.path.isdir(source) else replace(config, name=os.fspath(source).rpartition("/")[2])


def _dtype_name(dtype: Any) -> str:
    try:
        name = str(np.dtype(dtype))
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise InputError("dtype", dtype, "is not a dtype that weights are loaded as", f"Known: {', '.join(DTYPES)}.")
    return name


def _common_dtype(plan: Plan) -> str:
    """The dtype of the files, for a config that states none."""
    found = sorted({_NAMES[source.stored.dtype] for _, source in plan.steps if source.scales is None})
    if len(found) > 1:
        problem = f"isn't in config.json, and the files hold {' and '.join(found)}"
        raise InputError("dtype", None, problem, "Say which: load(..., dtype=...).")
    return found[0]


def _read(config: ModelConfig, plan: Plan, dtype: np.dtype[Any], progress: Progress) -> Params:
    """The parameter tree, one array after another."""
    steps: dict[tuple[int | None, str], list[tuple[Tensor, Source]]] = defaultdict(list)
    for tensor, source in plan.steps:
        steps[tensor.layer, tensor.leaf].append((tensor, source))
    total = sum(stored_bytes(source) for _, source in plan.steps)
    behind = 0

    def array(layer: int | None, leaf: str, shape: tuple[int, ...]) -> jax.Array:
        nonlocal behind
        values = aligned_empty(shape, dtype)
        for tensor, source in steps[layer, leaf]:
            fill(values[tensor.place], source)
            behind += stored_bytes(source)
        progress(leaf if layer is None else f"layer {layer} {leaf}", behind / total)
        # Waiting keeps one host copy alive at a time where the device has its own memory.
        placed: jax.Array = jax.device_put(values).block_until_ready()
        return placed

    def built(layer: int | None, scopes: tuple[Scope, ...]) -> Params:
        leaves = leaves_of(config, scopes).items()
        return {leaf: array(layer, leaf, shape) for leaf, (shape, _) in leaves if (layer, leaf) in steps}

    layers = {i: built(i, layer_scopes(config, i)) for i in range(config.num_hidden_layers)}
    return {**built(None, ("model",)), "layers": layers}


def _plain(config: ModelConfig) -> ModelConfig:
    """The config of the weights as they are after loading."""
    if config.quantization is None:
        return config
    note = Note("ignored", "quantization_config", "the FP8 weights were dequantised as they were loaded")
    return replace(config, quantization=None, notes=(*config.notes, note))
