"""What the kernels share: sizes that Triton takes, masked loads, the gate of an expert, a head's norm and rotation."""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.moe_blocks import TILE_ROWS

Array = jax.Array
Ref = Any  # JAX's annotations of its own references don't fit together
Halves = tuple[Array, Array]  # the first and the second half of the channels of each head, [R, H/2]
LOWEST: Final = -1e30  # below any score, and unlike -inf without NaN as a difference


def padded_rows(rows: int) -> int:
    """Rows of a Triton product that holds so many."""
    return max(TILE_ROWS, pl.next_power_of_2(rows))


def wide(mask: Array, width: int) -> Array:
    """A mask of rows for each of so many channels, as loads of both axes want it."""
    return jnp.broadcast_to(mask[:, None], (mask.size, width))


def load_tile(ref: Ref, row: Array, column: Array, mask_K: Array | None) -> Array:
    """Elements at all pairs of row and column; zero where the last axis is masked."""
    row, column = jnp.broadcast_arrays(row, column)
    if mask_K is None:
        loaded: Array = plt.load(ref.at[row, column])
    else:
        mask = jax.lax.broadcast_in_dim(mask_K, row.shape, (row.ndim - 1,))
        loaded = plt.load(ref.at[row, column], mask=mask, other=0)
    return loaded


def gated(gate: Array, up: Array) -> Array:
    """silu(gate) * up; Triton divides in float32 only."""
    return jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up


def normed(halves: Halves, weight_ref: Ref, eps: float) -> Halves:
    """`qwenjax.layers.rms_norm` of heads whose channels lie in two halves."""
    first, second = halves
    wide_1, wide_2 = first.astype(jnp.float32), second.astype(jnp.float32)
    squares = jnp.sum(wide_1 * wide_1, axis=-1, keepdims=True) + jnp.sum(wide_2 * wide_2, axis=-1, keepdims=True)
    half = first.shape[-1]
    scale = jax.lax.rsqrt(squares / (2 * half) + eps)
    return (
        weight_ref[pl.ds(0, half)] * (wide_1 * scale).astype(first.dtype),
        weight_ref[pl.ds(half, half)] * (wide_2 * scale).astype(first.dtype),
    )


def rotated(halves: Halves, cos: Array, sin: Array) -> Halves:
    """`qwenjax.layers.apply_rope` of the same."""
    first, second = halves
    return first * cos - second * sin, second * cos + first * sin
