"""The KV cache: one key and one value array a layer, a length for each row, donated and updated in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, shape
from qwenjax.ops import KV

Array = jax.Array


@struct.dataclass
class KVCache:
    """Keys after norm and RoPE, values as projected, for every layer.

    keys, values: tuples over layers of [B, K, S, H]; S is the capacity in tokens. lengths: [B] int32, the tokens that
    each row holds. What lies beyond a row's length is never attended.
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    lengths: Array

    @property
    def capacity(self) -> int:
        return int(self.keys[0].shape[2])


def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: str = "bfloat16") -> KVCache:
    """An empty cache for `batch` rows of up to `capacity` tokens."""
    shapes = cache_shapes(config, batch, capacity, dtype)
    empty: KVCache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return empty


def cache_shapes(config: ModelConfig, batch: int, capacity: int, dtype: str = "bfloat16") -> KVCache:
    """The same cache as shapes only, for tracing without memory."""
    sizes = dims(config, Step(batch, 1, capacity))
    layers = range(config.num_hidden_layers)
    keys, values = (tuple(jax.ShapeDtypeStruct(shape(tensor.letters, sizes), dtype) for _ in layers) for tensor in KV)
    return KVCache(keys, values, jax.ShapeDtypeStruct((batch,), jnp.int32))  # type: ignore[arg-type]


def append(cached_BKSH: Array, new_BTKH: Array, lengths_B: Array) -> Array:
    """Writes each row's T new vectors after its last; what has no place in a full row is dropped.

    Indexed by row and head: with one index a row, XLA turns a batch of one into a slice update that it duplicates into
    every reader, copying the whole cache four times a step (seen on CPU, JAX 0.10).
    """
    batch, heads = cached_BKSH.shape[:2]
    rows, columns = jnp.arange(batch)[:, None], jnp.arange(heads)[None, :]
    if new_BTKH.shape[1] == 1:
        return cached_BKSH.at[rows, columns, lengths_B[:, None]].set(new_BTKH[:, 0], mode="drop", unique_indices=True)
    places_BT = lengths_B[:, None] + jnp.arange(new_BTKH.shape[1])
    rows, columns, places = rows[..., None], columns[..., None], places_BT[:, None, :]
    return cached_BKSH.at[rows, columns, places].set(new_BTKH.swapaxes(1, 2), mode="drop", unique_indices=True)


def fill(cached_BKSH: Array, new_BKTH: Array) -> Array:
    """Writes a prompt's vectors from position 0 on."""
    return jax.lax.dynamic_update_slice(cached_BKSH, new_BKTH, (0, 0, 0, 0))
