"""Between a parameter tree and a checkpoint's tensors, by the rows of `qwenjax.ops.WEIGHTS`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, shape, size
from qwenjax.ops import Weight, leaf_letters, weights_of
from qwenjax.weights import Params, layer_scopes, param_shapes


class Tensor(NamedTuple):
    """A checkpoint tensor: where it lies in the parameter tree, and its shape on disk."""

    key: str
    layer: int | None
    leaf: str
    index: tuple[slice | int, ...]
    slice_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]


def tensors_of(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the model's checkpoint, in the order of the inventory; a tied head is no tensor."""
    for weight, start in _with_starts(config):
        if weight.scope == "model":
            key = weight.key if weight.leaf == "lm_head" else f"model.{weight.key}"
            yield from _tensors(config, weight, start, key, None)
            continue
        for layer in range(config.num_hidden_layers):
            if weight.scope in layer_scopes(config, layer):
                yield from _tensors(config, weight, start, f"model.layers.{layer}.{weight.key}", layer)


def _with_starts(config: ModelConfig) -> Iterator[tuple[Weight, int]]:
    """Each weight with its offset on the joined axis of its leaf: weights of one leaf follow each other there."""
    ends: dict[str, int] = {}
    for weight in weights_of(config):
        start = ends.get(weight.leaf, 0)
        axis = _joined_axis(weight)
        if axis is not None:
            ends[weight.leaf] = start + dims(config, block=weight.block)[weight.letters[axis]]
        yield weight, start


def _joined_axis(weight: Weight) -> int | None:
    pairs = zip(weight.letters, leaf_letters(weight.leaf), strict=True)
    return next((axis for axis, (own, whole) in enumerate(pairs) if own != whole), None)


def _tensors(config: ModelConfig, weight: Weight, start: int, key: str, layer: int | None) -> Iterator[Tensor]:
    sizes = dims(config, block=weight.block)
    slice_shape = shape(weight.letters, sizes)
    stored = tuple(size(letters, sizes) for letters in weight.stored.split(","))
    axis = _joined_axis(weight)
    index: list[slice | int] = [slice(None)] * len(slice_shape)
    if axis is not None:
        index[axis] = slice(start, start + slice_shape[axis])
    if "{expert}" not in key:
        yield Tensor(key, layer, weight.leaf, tuple(index), slice_shape, stored)
        return
    for expert in range(slice_shape[0]):
        yield Tensor(
            key.format(expert=expert), layer, weight.leaf, (expert, *index[1:]), slice_shape[1:], stored
        )  # fmt: skip


def to_state_dict(config: ModelConfig, params: Params) -> dict[str, np.ndarray[Any, Any]]:
    """The tree's arrays under their checkpoint keys, in the layout on disk."""
    return {
        tensor.key: np.asarray(_branch(params, tensor)[tensor.leaf])[tensor.index].reshape(tensor.stored_shape)
        for tensor in tensors_of(config)
    }


def from_state_dict(
    config: ModelConfig, state: Mapping[str, np.ndarray[Any, Any]], dtype: str = "float32"
) -> Params:  # fmt: skip
    """The parameter tree of a checkpoint's tensors. Anything but the model's own keys and shapes is an error."""
    tensors = {tensor.key: tensor for tensor in tensors_of(config)}
    if set(tensors) != set(state):
        raise KeyError(f"missing {sorted(set(tensors) - set(state))}, unknown {sorted(set(state) - set(tensors))}")
    params = _map_leaves(param_shapes(config, dtype), lambda leaf: np.full(leaf.shape, np.nan, np.float32))
    for key, tensor in tensors.items():
        if state[key].shape != tensor.stored_shape:
            raise ValueError(f"{key} has shape {state[key].shape}, not {tensor.stored_shape}")
        _branch(params, tensor)[tensor.leaf][tensor.index] = state[key].reshape(tensor.slice_shape)
    return _map_leaves(params, lambda leaf: jnp.asarray(leaf, dtype))


def _branch(params: Params, tensor: Tensor) -> Any:
    return params if tensor.layer is None else params["layers"][tensor.layer]


def _map_leaves(tree: Any, function: Any) -> Any:
    return {k: _map_leaves(v, function) for k, v in tree.items()} if isinstance(tree, dict) else function(tree)


def reference_model(
    data: Mapping[str, Any],
    state: Mapping[str, np.ndarray[Any, Any]],
    dtype: str = "float32",
    attention: str = "eager",
) -> Any:
    """transformers' model of this config.json with these weights, ready for inference; needs torch."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**copy.deepcopy(dict(data)))  # it writes into nested blocks
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=getattr(torch, dtype))
    missing, unknown = model.load_state_dict({key: torch.tensor(value) for key, value in state.items()}, strict=False)
    tied_head = ["lm_head.weight"] if config.tie_word_embeddings else []
    if missing != tied_head or unknown:
        raise KeyError(f"missing {missing}, unknown {unknown}")
    return model.eval()
