"""The parameter tree, driven by the inventory: its shapes, and random values for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax.config import ModelConfig, check_architecture
from qwenjax.dims import dims, shape
from qwenjax.ops import Scope, leaf_letters, weights_of

Params = dict[str, Any]


def leaves_of(config: ModelConfig, scopes: tuple[Scope, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind of initial value of each array that stands once in these scopes, by leaf name."""
    return {
        weight.leaf: (shape(leaf_letters(weight.leaf), dims(config, block=weight.block)), weight.init)
        for weight in weights_of(config)
        if weight.scope in scopes
    }


def layer_scopes(config: ModelConfig, layer: int) -> tuple[Scope, ...]:
    return ("layer", "sparse") if layer in config.sparse_layers else ("layer", "dense")


def tree_of(config: ModelConfig, make: Callable[[int | None, str], Any]) -> Params:
    """The parameter tree with `make(layer, leaf)` at each place; the layer is None for what stands once."""

    def built(layer: int | None, scopes: tuple[Scope, ...]) -> Params:
        return {leaf: make(layer, leaf) for leaf in leaves_of(config, scopes)}

    layers = {i: built(i, layer_scopes(config, i)) for i in range(config.num_hidden_layers)}
    return {**built(None, ("model",)), "layers": layers}


def _places(config: ModelConfig) -> dict[tuple[int | None, str], tuple[tuple[int, ...], str]]:
    """Shape and kind of initial value of every array, by its layer and leaf, in one order."""
    check_architecture(config)
    scopes: list[tuple[int | None, tuple[Scope, ...]]] = [(None, ("model",))]
    scopes += [(i, layer_scopes(config, i)) for i in range(config.num_hidden_layers)]
    return {(i, leaf): kind for i, of_layer in scopes for leaf, kind in leaves_of(config, of_layer).items()}


def param_shapes(config: ModelConfig, dtype: str = "bfloat16") -> Params:
    """The parameter tree as shapes only: {"embed_tokens", "layers": {0: {...}, ...}, "final_norm", "lm_head"?}."""
    places = _places(config)
    return tree_of(config, lambda layer, leaf: jax.ShapeDtypeStruct(places[layer, leaf][0], dtype))


def init_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Random parameters: normal with the config's initializer_range, norms one, biases zero. Same seed, same values."""
    return tree_of(config, random_leaves(config, seed, dtype))


def random_leaves(config: ModelConfig, seed: int, dtype: str) -> Callable[[int | None, str], jax.Array]:
    """Makes any one array of `init_params` alone, from its layer and leaf: its values don't depend on the others."""
    key = jax.random.key(seed, impl="rbg")  # several times faster than threefry on every backend
    places = _places(config)
    numbers = {place: number for number, place in enumerate(places)}

    def make(layer: int | None, leaf: str) -> jax.Array:
        sizes, init = places[layer, leaf]
        if init != "normal":
            return jnp.full(sizes, 1 if init == "ones" else 0, dtype)
        own = jax.random.fold_in(key, numbers[layer, leaf])
        values: jax.Array = _normal(own, sizes, config.initializer_range, dtype)
        return values

    return make


@partial(jax.jit, static_argnums=(1, 3))
def _normal(key: jax.Array, sizes: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    values: jax.Array = jax.random.normal(key, sizes, jnp.float32) * scale
    return values.astype(dtype)
