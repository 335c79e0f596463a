"""The parameter tree, driven by the inventory: its shapes, and random values for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from qwenjax.config import ModelConfig
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


def _build(config: ModelConfig, make: Callable[[int, tuple[int, ...], str], Any]) -> Params:
    """The parameter tree with `make(running number, shape, kind of initial value)` at each leaf."""
    numbers = count()

    def built(scopes: tuple[Scope, ...]) -> Params:
        return {name: make(next(numbers), *leaf) for name, leaf in leaves_of(config, scopes).items()}

    return {**built(("model",)), "layers": {i: built(layer_scopes(config, i)) for i in range(config.num_hidden_layers)}}


def param_shapes(config: ModelConfig, dtype: str = "bfloat16") -> Params:
    """The parameter tree as shapes only: {"embed_tokens", "layers": {0: {...}, ...}, "final_norm", "lm_head"?}."""
    return _build(config, lambda _, sizes, init: jax.ShapeDtypeStruct(sizes, dtype))


def init_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Random parameters: normal with the config's initializer_range, norms one, biases zero. Same seed, same values."""
    key = jax.random.key(seed, impl="rbg")  # several times faster than threefry on every backend

    def make(number: int, sizes: tuple[int, ...], init: str) -> jax.Array:
        if init != "normal":
            return jnp.full(sizes, 1 if init == "ones" else 0, dtype)
        values: jax.Array = _normal(jax.random.fold_in(key, number), sizes, config.initializer_range, dtype)
        return values

    return _build(config, make)


@partial(jax.jit, static_argnums=(1, 3))
def _normal(key: jax.Array, sizes: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    values: jax.Array = jax.random.normal(key, sizes, jnp.float32) * scale
    return values.astype(dtype)
