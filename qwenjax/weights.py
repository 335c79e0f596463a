"""The parameter tree, driven by the inventory: its shapes, and random values for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, shape
from qwenjax.ops import Scope, leaf_letters, weights_of

Params = dict[str, Any]


def leaves_of(config: ModelConfig, scopes: tuple[Scope, ...]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and kind of initial value of each array that stands once in these scopes, by leaf name."""
    return {weight.leaf: (shape(leaf_letters(weight.leaf), dims(config, block=weight.block)), weight.init)
            for weight in weights_of(config) if weight.scope in scopes}  # fmt: skip


def layer_scopes(config: ModelConfig, layer: int) -> tuple[Scope, ...]:
    return ("layer", "sparse") if layer in config.sparse_layers else ("layer", "dense")


def _tree(config: ModelConfig) -> Params:
    layers = {i: leaves_of(config, layer_scopes(config, i)) for i in range(config.num_hidden_layers)}
    return {**leaves_of(config, ("model",)), "layers": layers}


def _is_leaf(node: Any) -> bool:
    return isinstance(node, tuple)


def param_shapes(config: ModelConfig, dtype: str = "bfloat16") -> Params:
    """The parameter tree as shapes only: {"embed_tokens", "layers": {0: {...}, ...}, "final_norm", "lm_head"?}."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf[0], dtype), _tree(config), is_leaf=_is_leaf)


def init_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Random parameters: normal with the config's initializer_range, norms one, biases zero. Same seed, same values."""
    leaves, treedef = jax.tree.flatten(_tree(config), is_leaf=_is_leaf)
    key = jax.random.key(seed, impl="rbg")  # several times faster than threefry on every backend
    made = [_init_leaf(jax.random.fold_in(key, i), *leaf, config.initializer_range, dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, made)


def _init_leaf(key: jax.Array, sizes: tuple[int, ...], init: str, scale: float, dtype: str) -> jax.Array:
    if init != "normal":
        return jnp.full(sizes, 1 if init == "ones" else 0, dtype)
    return _normal(key, sizes, scale, dtype)


def _normal_values(key: jax.Array, sizes: tuple[int, ...], scale: float, dtype: str) -> jax.Array:
    return (jax.random.normal(key, sizes, jnp.float32) * scale).astype(dtype)


_normal = jax.jit(_normal_values, static_argnums=(1, 3))
