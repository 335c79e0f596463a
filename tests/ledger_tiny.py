"""Tiny models with every size different, and one way to run one layer of them with its switches: for ledger
properties.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.block import Block
from qwenjax.config import ModelConfig
from qwenjax.layers import apply_rope, attention, causal_mask, contract, rope_tables
from qwenjax.ops import leaf_letters
from qwenjax.weights import Params, layer_scopes, param_shapes

Array = jax.Array

QWEN2 = ModelConfig(
    model_type="qwen2", vocab_size=97, hidden_size=40, intermediate_size=56, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, head_dim=8, qkv_bias=True, rope_theta=1e4,
)  # fmt: skip
QWEN3 = replace(QWEN2, model_type="qwen3", qkv_bias=False)
TOKENS = np.random.default_rng(5).integers(0, 97, size=(2, 12))


@cache
def random_params(config: ModelConfig, seed: int = 0, dtype: str = "float32") -> Params:
    """Every tensor random, norms around one and biases not zero, so that a forgotten one shows."""
    rng = np.random.default_rng(seed)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        values = rng.standard_normal(leaf.shape) * 0.3
        return jnp.asarray(values + 1 if "norm" in str(path[-1]) else values, dtype)

    tree: Params = jax.tree_util.tree_map_with_path(draw, param_shapes(config, dtype))
    return tree


def laid(leaf: str, letters: str, values: Any) -> Array:
    """An array with its axes named by letters, laid out as the model keeps that leaf."""
    return jnp.einsum(f"{letters}->{leaf_letters(leaf)}", jnp.asarray(values))


def read(leaf: str, letters: str, array: Array) -> Array:
    """A leaf of the parameter tree with its axes in the order of the letters."""
    return jnp.einsum(f"{leaf_letters(leaf)}->{letters}", array)


def block_of(config: ModelConfig, layer: Params) -> Block:
    return Block(config, layer_scopes(config, 0), layer)


def no_rotation(config: ModelConfig, batch: int, tokens: int) -> tuple[Array, Array]:
    return jnp.ones((batch, tokens, config.head_dim // 2)), jnp.zeros((batch, tokens, config.head_dim // 2))


def residual_stream(config: ModelConfig, tokens: int = 7, batch: int = 1, seed: int = 1) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, tokens, config.hidden_size)), jnp.float32)


def run_block(
    config: ModelConfig,
    params: Params,
    x_BTD: Array,
    *,
    positions: tuple[int, ...] | None = None,
    mask: bool = True,
    rope: bool = True,
) -> Array:
    """One decoder layer of the model, with the causal mask and RoPE on or off."""
    batch, tokens, _ = x_BTD.shape
    positions_BT = jnp.broadcast_to(jnp.asarray(positions or tuple(range(tokens))), (batch, tokens))
    tables = rope_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, x_BTD.dtype)
    if not rope:
        tables = jnp.ones_like(tables[0]), jnp.zeros_like(tables[1])
    steps = jnp.arange(tokens)
    seen_BTS = causal_mask(jnp.broadcast_to(steps, (batch, tokens)), steps, None)
    seen_BTS = seen_BTS if mask else jnp.ones_like(seen_BTS)
    y_BTD, _ = block_of(config, params)(x_BTD, tables, seen_BTS, None, None)
    return y_BTD


def first_layer(config: ModelConfig, seed: int = 0) -> Params:
    layer: Params = random_params(config, seed)["layers"][0]
    return layer


def without(params: Params, *names: str) -> Params:
    """The same layer with some matrices zero."""
    return {name: jnp.zeros_like(leaf) if name in names else leaf for name, leaf in params.items()}


def gap(one: Any, other: Any) -> float:
    """Greatest absolute difference."""
    return float(jnp.max(jnp.abs(jnp.asarray(one) - jnp.asarray(other))))


def close(one: Any, other: Any, tolerance: float = 2e-5) -> bool:
    return gap(one, other) <= tolerance * max(1.0, float(jnp.max(jnp.abs(jnp.asarray(other)))))


def normal(*shape: int, seed: int = 3) -> Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def matmul(x: object, y: object) -> Array:
    """[m, k] @ [k, n] as the model's down projection computes it."""
    return apply_down(jnp.asarray(x)[None], jnp.asarray(y))[0]


def apply_down(x_BTF: Array, w_FD: Array) -> Array:
    return contract("down_proj", x_BTF, laid("down_proj", "FD", w_FD))


def kv_heads_read(heads: int, kv_heads: int, asked: tuple[int, ...]) -> list[int]:
    """Which KV head each query head attends: every KV head's one value vector holds its own number."""
    numbers = jnp.arange(kv_heads, dtype=jnp.float32)
    q, k = jnp.ones((1, 1, kv_heads, heads // kv_heads, 2)), jnp.ones((1, kv_heads, 1, 2))
    v = jnp.broadcast_to(numbers[None, :, None, None], k.shape)
    out_BTKGH = attention(q, k, v, jnp.ones((1, 1, 1), bool))
    return [int(out_BTKGH.reshape(heads, 2)[head, 0]) for head in asked]


def rope_partners(head_dim: int, components: tuple[int, ...]) -> list[list[int]]:
    """The two channels that RoPE mixes, for each of some channels: where a turned unit vector is not zero."""
    tables = rope_tables(jnp.asarray([[1000]]), head_dim, 1e6, None, jnp.dtype("float32"))
    units = jnp.eye(head_dim)[:, None, None, :]
    return [np.flatnonzero(apply_rope(units[i : i + 1], *tables)).tolist() for i in components]
