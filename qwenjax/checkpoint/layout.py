"""A checkpoint's tensors: keys, shapes on disk and places in the parameter tree, from `qwenjax.ops.WEIGHTS`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, shape, size
from qwenjax.ops import Weight, leaf_letters, weights_of

PREFIX = "model."  # of every key but the head's; embedding models store their tensors without it
HEAD_KEY = "lm_head.weight"

# The experts of a layer in one tensor, as transformers 5 holds them: key after `model.layers.N.` and layout on disk.
# It has the order of the leaf itself, gate rows before up rows, so that it is copied as it lies.
FUSED_EXPERTS = {
    "experts_gate_up_proj": ("mlp.experts.gate_up_proj", "E,CF,D"),
    "experts_down_proj": ("mlp.experts.down_proj", "E,D,F"),
}


class Tensor(NamedTuple):
    """A checkpoint tensor: where it lies in the parameter tree, and its shape on disk."""

    key: str
    layer: int | None
    leaf: str
    place: tuple[slice | int, ...]  # index of its slice of the leaf
    slice_shape: tuple[int, ...]
    stored_shape: tuple[int, ...]


def tensors_of(config: ModelConfig, keys: Collection[str] = ()) -> Iterator[Tensor]:
    """Every tensor of the model's checkpoint, in the order of the inventory; a tied head is no tensor.

    Experts are a tensor each, except where `keys`, those of a checkpoint, name the fused tensor of their layer.
    """
    given: set[str] = set()
    for weight, start in _with_starts(config):
        if weight.scope == "model":
            key = weight.key if weight.leaf == "lm_head" else PREFIX + weight.key
            yield from _tensors(config, weight, start, key, None)
            continue
        for layer in _layers(config, weight):
            fused = _fused(config, weight, layer)
            if fused is None or fused.key not in keys:
                yield from _tensors(config, weight, start, f"{PREFIX}layers.{layer}.{weight.key}", layer)
            elif fused.key not in given:  # gate and up share one
                given.add(fused.key)
                yield fused


def _layers(config: ModelConfig, weight: Weight) -> list[int]:
    sparse = set(config.sparse_layers)
    layers = range(config.num_hidden_layers)
    return [i for i in layers if weight.scope == "layer" or (i in sparse) == (weight.scope == "sparse")]


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
        place = (expert, *index[1:])
        yield Tensor(key.format(expert=expert), layer, weight.leaf, place, slice_shape[1:], stored)


def _fused(config: ModelConfig, weight: Weight, layer: int) -> Tensor | None:
    if weight.leaf not in FUSED_EXPERTS:
        return None
    key, layout = FUSED_EXPERTS[weight.leaf]
    sizes = dims(config, block=weight.block)
    whole = shape(leaf_letters(weight.leaf), sizes)
    stored = tuple(size(letters, sizes) for letters in layout.split(","))
    everything = (slice(None),) * len(whole)
    return Tensor(f"{PREFIX}layers.{layer}.{key}", layer, weight.leaf, everything, whole, stored)
