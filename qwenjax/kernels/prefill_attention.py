"""Attention of many new tokens over the cache: FlashAttention-2's forward pass (arXiv 2307.08691), never a [T, S]."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import LOWEST, Ref, padded_rows

Array = jax.Array
Carry = tuple[Array, Array, Array]
_LARGEST_HEAD = 128  # with larger ones a block of keys and one of values don't fit an RTX 4090's shared memory


def prefill_attention(
    q_BTKGH: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    starts_B: Array,
    *,
    window: int | None,
    interpret: bool = False,
) -> Array:
    """Mixed values [B, T, K, G, H]: the query at position starts[b] + t attends what is cached up to that position.

    With a window, only the last `window` positions, its own included. The cache holds the new positions already. Scores
    and softmax are float32 throughout, where the plain version rounds scores to the model's dtype.
    """
    batch, tokens, kv_heads, group, head_dim = q_BTKGH.shape
    capacity = keys_BKSH.shape[2]
    block_q, block_k, num_warps = _blocks(tokens)
    blocks = pl.cdiv(tokens, block_q)

    def own(t: Array, n: Array, b: Array) -> tuple[Array | int, ...]:
        return b, blocks - 1 - t, n // group, n % group, 0  # the last queries attend most: they start first

    queries = pl.BlockSpec((None, block_q, None, None, head_dim), own)
    cached = pl.BlockSpec((None, None, capacity, head_dim), lambda t, n, b: (b, n // group, 0, 0))
    with jax.named_scope("scores"):
        mixed_BTKGH: Array = pl.pallas_call(
            partial(_kernel, tokens=tokens, block_k=block_k, window=window),
            grid=(blocks, kv_heads * group, batch),
            in_specs=[queries, cached, cached, pl.BlockSpec((None,), lambda t, n, b: (b,))],
            out_specs=queries,
            out_shape=jax.ShapeDtypeStruct(q_BTKGH.shape, q_BTKGH.dtype),
            compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=2),
            interpret=interpret,
            name="prefill_attention",
        )(q_BTKGH, keys_BKSH, values_BKSH, starts_B)
    return mixed_BTKGH


def fits(q_BTKGH: Array, keys_BKSH: Array, values_BKSH: Array) -> bool:
    """Whether the kernel takes these: one 16-bit dtype, and a head of 16 to 128 channels, a power of two."""
    head_dim = q_BTKGH.shape[-1]
    sizes = 16 <= head_dim <= _LARGEST_HEAD and head_dim == pl.next_power_of_2(head_dim)
    return sizes and is_narrow(q_BTKGH, keys_BKSH, values_BKSH)


def _blocks(tokens: int) -> tuple[int, int, int]:
    """Queries and keys of a block, and the warps that share it.

    A block of few queries is small enough for two to share a multiprocessor of an RTX 4090.
    """
    if tokens > 256:
        return 128, 64, 8
    return min(padded_rows(tokens), 64), 32, 4


def _kernel(
    q_ref: Ref,
    keys_ref: Ref,
    values_ref: Ref,
    start_ref: Ref,
    out_ref: Ref,
    *,
    tokens: int,
    block_k: int,
    window: int | None,
) -> None:
    block_q, head_dim = q_ref.shape
    capacity = keys_ref.shape[0]
    offset = (pl.cdiv(tokens, block_q) - 1 - pl.program_id(0)) * block_q
    given = (offset + jnp.arange(block_q) < tokens)[:, None]
    start = start_ref[...]
    first = start + offset  # position of the first query
    q = plt.load(q_ref, mask=given, other=0)
    positions = first + jnp.arange(block_q)
    # exp2 is what the hardware has: scores count in powers of two.
    scale = head_dim**-0.5 * math.log2(math.e)

    def attend(at_edge: bool, i: Array, carry: Carry) -> Carry:
        """One block of keys; at an edge some are out of sight of some queries, or beyond the capacity."""
        mixed, total, highest = carry
        places = i * block_k + jnp.arange(block_k)
        load = partial(plt.load, mask=(places < capacity)[:, None], other=0) if at_edge else plt.load
        rows = pl.ds(i * block_k, block_k)
        scores = plt.dot(q, load(keys_ref.at[rows, :]), trans_b=True) * scale
        if at_edge:
            ahead = positions[:, None] - places[None, :]
            seen = (ahead >= 0) & (places < capacity)[None, :]
            scores = jnp.where(seen if window is None else seen & (ahead < window), scores, LOWEST)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        faded = jnp.exp2(highest - new_highest)
        parts = jnp.exp2(scores - new_highest[:, None])
        mixed = mixed * faded[:, None] + plt.dot(parts.astype(q.dtype), load(values_ref.at[rows, :]))
        return mixed, total * faded + jnp.sum(parts, axis=-1), new_highest

    carry: Carry = (
        jnp.zeros((block_q, head_dim), jnp.float32),
        jnp.zeros((block_q,), jnp.float32),
        jnp.full((block_q,), LOWEST, jnp.float32),
    )
    end = jnp.minimum(start + tokens, capacity)
    lower, whole_lower, whole_upper, upper = _bounds(first, end, block_q, block_k, window)
    if window is not None:
        carry = jax.lax.fori_loop(lower, whole_lower, partial(attend, True), carry)
    carry = jax.lax.fori_loop(whole_lower, whole_upper, partial(attend, False), carry)
    carry = jax.lax.fori_loop(whole_upper, upper, partial(attend, True), carry)
    mixed, total, _ = carry
    total = jnp.maximum(total, 1)  # the highest score alone adds 1; padding beyond the capacity may see no key
    plt.store(out_ref, (mixed / total[:, None]).astype(out_ref.dtype), mask=given)


def _bounds(
    first: Array, end: Array, block_q: int, block_k: int, window: int | None
) -> tuple[Array, Array, Array, Array]:
    """Blocks of keys from which on: some queries see some, all see all, again some see some, none sees any."""

    def floor(x: Array) -> Array:
        return jax.lax.div(x, jnp.int32(block_k))  # none is negative

    upper = floor(jnp.minimum(first + block_q, end) + block_k - 1)
    whole_upper = floor(jnp.minimum(first + 1, end))
    lower = whole_lower = jnp.int32(0)
    if window is not None:
        lower = jnp.minimum(floor(jnp.maximum(first - window + 1, 0)), upper)
        whole_lower = jnp.minimum(floor(jnp.maximum(first + block_q - window, 0) + block_k - 1), upper)
    return lower, whole_lower, jnp.maximum(whole_upper, whole_lower), upper
