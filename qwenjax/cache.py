"""The KV cache: one key and one value array a layer, a length for each row, donated and updated in place.

Its dtype may be narrower than the model's. Vectors are rounded once, as they are written, and attention reads them
back in the model's dtype: a prompt attends its own keys and values rounded too, so that pieces equal the whole.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, shape
from qwenjax.errors import InputError
from qwenjax.ops import KV

Array = jax.Array
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@struct.dataclass
class KVCache:
    """Keys after norm and RoPE, values as projected, for every layer.

    keys, values: tuples over layers of [B, K, S, H]; S is the capacity in tokens. lengths: [B] int32, the tokens that
    each row holds, at most S. What lies beyond a row's length is never attended.
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
    check_cache_dtype(dtype)
    sizes = dims(config, Step(batch, 1, capacity))
    layers = range(config.num_hidden_layers)
    keys, values = (tuple(jax.ShapeDtypeStruct(shape(tensor.letters, sizes), dtype) for _ in layers) for tensor in KV)
    return KVCache(keys, values, jax.ShapeDtypeStruct((batch,), jnp.int32))  # type: ignore[arg-type]


def check_cache_dtype(dtype: str, field: str = "dtype") -> None:
    """Refuses what can't hold keys and values as they are: integers, quantised forms, and what JAX would truncate."""
    if dtype not in KV_DTYPES:
        raise InputError(field, dtype, "is no dtype of keys and values", f"Known: {', '.join(KV_DTYPES)}.")


def rounded(new: Array, dtype: jax.typing.DTypeLike) -> Array:
    """Keys or values as a cache of that dtype holds them; beyond the range of a narrower one its greatest value.

    float8_e4m3fn has no infinity and would make NaN of what a plain cast finds too large.
    """
    if jnp.dtype(dtype) == new.dtype:
        return new
    limit, own = (float(jnp.finfo(kind).max) for kind in (dtype, new.dtype))  # type: ignore[no-untyped-call]
    return (jnp.clip(new, -limit, limit) if limit < own else new).astype(dtype)


def advanced(cache: KVCache, counts: Array | int) -> Array:
    """Lengths after so many more tokens of each row; a full row stays full, as nothing of its tokens was kept."""
    with jax.named_scope("cache"):
        return jnp.minimum(cache.lengths + jnp.asarray(counts, jnp.int32), cache.capacity)


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
    check_room(new_BKTH.shape[0], new_BKTH.shape[2], cached_BKSH)
    return jax.lax.dynamic_update_slice(cached_BKSH, new_BKTH, (0, 0, 0, 0))


def check_room(rows: int, tokens: int, cached_BKSH: Array) -> None:
    """Refuses prompts that an empty cache doesn't fit: other rows than its own, or more tokens than it holds."""
    for given, room, what in ((rows, cached_BKSH.shape[0], "rows"), (tokens, cached_BKSH.shape[2], "tokens")):
        if given > room if what == "tokens" else given != room:
            problem = f"holds {room} {what}, and the prompts have {given}, padding included"
            raise InputError("cache", None, problem, "Make one with init_cache that fits them.")
