"""One new token of each row against its cache, as flash decoding: norm, rotation, cache update and attention in one
kernel, whose partial results a second one adds up.

A row's cached positions are cut into parts that run side by side (arXiv 2311.01282 splits the same way), as one row has
too few KV heads to fill a GPU. The new key and value go from registers into the part that holds their place, so that no
part reads what another one writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import LOWEST, Halves, Ref, normed, padded_rows, rotated, wide

Array = jax.Array
_BLOCK: Final = 64  # cached positions that a program attends at once
_PROGRAMS: Final = 128  # to aim at: about one for each multiprocessor of an RTX 4090 or H100


@dataclass(frozen=True)
class _Plan:
    """Sizes of one call: group G, head_dim H, capacity S, and the cached positions of each of `parts`."""

    group: int
    head_dim: int
    capacity: int
    parts: int
    positions: int
    window: int | None
    eps: float | None  # of the norm over queries and keys, None without one

    @property
    def rows(self) -> int:
        return padded_rows(self.group)


def fits(qkv_BKJH: Array, keys_BKSH: Array, values_BKSH: Array) -> bool:
    """16-bit floats throughout, and heads of a power of two from 32 channels on."""
    head_dim = qkv_BKJH.shape[-1]
    return is_narrow(qkv_BKJH, keys_BKSH, values_BKSH) and head_dim >= 32 and head_dim & (head_dim - 1) == 0


def num_parts(batch: int, kv_heads: int, capacity: int) -> int:
    """Parts of a row's cache that run side by side: enough to fill a GPU, none below one block of positions."""
    return max(1, min(_PROGRAMS // (batch * kv_heads), -(-capacity // _BLOCK)))


def decode_attention(
    qkv_BKJH: Array,
    cos_BH: Array,
    sin_BH: Array,
    lengths_B: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    *norms_H: Array,
    window: int | None,
    eps: float | None,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Attention of one token a row, [B, K, G, H], and the caches with its key and value at position `lengths`.

    qkv holds G queries, a key and a value of each KV head as projected; cos and sin hold H/2 channels; `norms_H` are
    the weights of the norms over queries and keys if `eps` is given. A full row's caches stay as they are.
    """
    batch, kv_heads, packed, head_dim = qkv_BKJH.shape
    capacity = keys_BKSH.shape[2]
    parts = num_parts(batch, kv_heads, capacity)
    positions = -(-capacity // (parts * _BLOCK)) * _BLOCK
    plan = _Plan(packed - 2, head_dim, capacity, -(-capacity // positions), positions, window, eps)
    head = (batch, kv_heads, plan.parts, plan.group)
    dtype = qkv_BKJH.dtype if plan.parts == 1 else jnp.float32
    mixed, tops, sums, keys, values = pl.pallas_call(
        partial(_attend, plan=plan),
        grid=(batch, kv_heads, plan.parts),
        in_specs=[
            pl.BlockSpec((None, None, packed, head_dim), lambda b, k, p: (b, k, 0, 0)),
            *[pl.BlockSpec((None, head_dim // 2), lambda b, k, p: (b, 0))] * 2,
            pl.BlockSpec((None,), lambda b, k, p: (b,)),
            *[pl.BlockSpec((None, None, capacity, head_dim), lambda b, k, p: (b, k, 0, 0))] * 2,
            *[pl.BlockSpec((head_dim,), lambda b, k, p: (0,)) for _ in norms_H],
        ],
        out_specs=[
            pl.BlockSpec((None, None, None, plan.group, head_dim), lambda b, k, p: (b, k, p, 0, 0)),
            *[pl.BlockSpec((None, None, None, plan.group), lambda b, k, p: (b, k, p, 0))] * 2,
            *[pl.BlockSpec((None, None, capacity, head_dim), lambda b, k, p: (b, k, 0, 0))] * 2,
        ],
        out_shape=[
            jax.ShapeDtypeStruct((*head, head_dim), dtype),
            *[jax.ShapeDtypeStruct(head, jnp.float32)] * 2,
            *[jax.ShapeDtypeStruct(cached.shape, cached.dtype) for cached in (keys_BKSH, values_BKSH)],
        ],
        input_output_aliases={4: 3, 5: 4},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="decode_attention",
    )(qkv_BKJH, cos_BH, sin_BH, lengths_B, keys_BKSH, values_BKSH, *norms_H)
    if plan.parts == 1:
        return mixed[:, :, 0], keys, values
    return _combined(mixed, tops, sums, qkv_BKJH.dtype, interpret), keys, values


def _attend(
    qkv_ref: Ref, cos_ref: Ref, sin_ref: Ref, length_ref: Ref, keys_ref: Ref, values_ref: Ref, *refs: Ref, plan: _Plan
) -> None:
    """One part of one KV head of one row."""
    norm_refs = refs[:-5]
    mixed_ref, top_ref, sum_ref, new_keys_ref, new_values_ref = refs[-5:]
    length = length_ref[...]
    heads = jnp.arange(plan.rows)
    cos, sin = cos_ref[...], sin_ref[...]
    present = heads < plan.group
    query = _prepared(qkv_ref, 0, present, cos, sin, norm_refs[:1], plan)
    key = _prepared(qkv_ref, plan.group, jnp.ones(1, bool), cos, sin, norm_refs[1:], plan)
    value_1H = qkv_ref[pl.ds(plan.group + 1, 1)]

    start = pl.program_id(2) * plan.positions
    first = jnp.maximum(length + 1 - plan.window, 0) if plan.window else 0
    low, high = jnp.maximum(start, first // _BLOCK * _BLOCK), jnp.minimum(start + plan.positions, length)
    scale = plan.head_dim**-0.5

    def block(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        place = low + i * _BLOCK
        at = place + jnp.arange(_BLOCK)
        seen = (at >= first) & (at < high)
        halves = (_half(keys_ref, place, seen, half, plan) for half in (0, 1))
        scores_RS = sum(plt.dot(q, k.T) for q, k in zip(query, halves, strict=True)) * scale
        value_SH = plt.load(values_ref.at[pl.ds(place, _BLOCK)], mask=wide(seen, plan.head_dim), other=0.0)
        top, total, mixed = state
        new_top = jnp.maximum(top, jnp.max(jnp.where(seen[None], scores_RS, LOWEST), axis=1))
        probs_RS = jnp.where(seen[None], jnp.exp(scores_RS - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        added = plt.dot(probs_RS.astype(value_SH.dtype), value_SH)
        return new_top, total * shrink + probs_RS.sum(axis=1), mixed * shrink[:, None] + added

    rows = jnp.zeros(plan.rows, jnp.float32)
    empty = rows + LOWEST, rows, jnp.zeros((plan.rows, plan.head_dim), jnp.float32)
    top, total, mixed = jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(high - low, 0), _BLOCK), block, empty)

    # The new token itself, in the part that holds its place; a full row has none.
    own = (length >= start) & (length < start + plan.positions) & (length < plan.capacity)
    score_R = sum((q.astype(jnp.float32) * k.astype(jnp.float32)).sum(axis=1) for q, k in zip(query, key, strict=True))
    score_R = jnp.where(own, score_R * scale, LOWEST)
    new_top = jnp.maximum(top, score_R)
    prob_R, shrink = jnp.where(own, jnp.exp(score_R - new_top), 0.0), jnp.exp(top - new_top)
    total = total * shrink + prob_R
    mixed = mixed * shrink[:, None] + prob_R[:, None] * value_1H.astype(jnp.float32)
    if plan.parts == 1:
        mixed = mixed / jnp.maximum(total, 1e-30)[:, None]
    plt.store(mixed_ref.at[pl.ds(0, plan.rows)], mixed.astype(mixed_ref.dtype), mask=wide(present, plan.head_dim))
    plt.store(top_ref.at[pl.ds(0, plan.rows)], new_top, mask=present)
    plt.store(sum_ref.at[pl.ds(0, plan.rows)], total, mask=present)
    _keep(new_keys_ref, new_values_ref, key, value_1H, jnp.where(own, length, 0), own, plan)


def _prepared(
    qkv_ref: Ref, row: int, present: Array, cos: Array, sin: Array, norm_refs: tuple[Ref, ...], plan: _Plan
) -> Halves:
    """Both halves, [R, H/2], of the rows from `row` on of the packed projection, normed and rotated."""
    half = plan.head_dim // 2
    first, second = (
        plt.load(qkv_ref.at[pl.ds(row, present.size), pl.ds(i * half, half)], mask=wide(present, half), other=0.0)
        for i in (0, 1)
    )
    halves = first, second
    if norm_refs and plan.eps is not None:
        halves = normed(halves, norm_refs[0], plan.eps)
    return rotated(halves, cos, sin)


def _half(keys_ref: Ref, place: Array, seen: Array, half: int, plan: _Plan) -> Array:
    """Half of the channels of a block of cached keys, [S, H/2]."""
    width = plan.head_dim // 2
    at = keys_ref.at[pl.ds(place, _BLOCK), pl.ds(half * width, width)]
    loaded: Array = plt.load(at, mask=wide(seen, width), other=0.0)
    return loaded


def _keep(keys_ref: Ref, values_ref: Ref, key: Halves, value_1H: Array, place: Array, own: Array, plan: _Plan) -> None:
    """Writes the new key and value, in the part that holds their place."""
    half = plan.head_dim // 2
    writes = wide(own[None], half)
    for i, part in enumerate(key):
        plt.store(keys_ref.at[pl.ds(place, 1), pl.ds(i * half, half)], part, mask=writes)
    plt.store(values_ref.at[pl.ds(place, 1)], value_1H, mask=wide(own[None], plan.head_dim))


def _combined(parts_BKPGH: Array, tops_BKPG: Array, sums_BKPG: Array, dtype: Any, interpret: bool) -> Array:
    """The parts of each head, each weighted by its share of the softmax's sum: [B, K, G, H]."""
    batch, kv_heads, parts, group, head_dim = parts_BKPGH.shape
    mixed: Array = pl.pallas_call(
        _combine,
        grid=(batch, kv_heads, group),
        in_specs=[
            pl.BlockSpec((None, None, parts, None, head_dim), lambda b, k, g: (b, k, 0, g, 0)),
            *[pl.BlockSpec((None, None, parts, None), lambda b, k, g: (b, k, 0, g))] * 2,
        ],
        out_specs=pl.BlockSpec((None, None, None, head_dim), lambda b, k, g: (b, k, g, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, kv_heads, group, head_dim), dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="combine_parts",
    )(parts_BKPGH, tops_BKPG, sums_BKPG)
    return mixed


def _combine(parts_ref: Ref, tops_ref: Ref, sums_ref: Ref, mixed_ref: Ref) -> None:
    count = parts_ref.shape[0]
    rows = pl.next_power_of_2(count)
    present = jnp.arange(rows) < count
    tops = plt.load(tops_ref.at[pl.ds(0, rows)], mask=present, other=LOWEST)
    sums = plt.load(sums_ref.at[pl.ds(0, rows)], mask=present, other=0.0)
    parts_PH = plt.load(parts_ref.at[pl.ds(0, rows)], mask=wide(present, parts_ref.shape[1]), other=0.0)
    shares = jnp.exp(tops - jnp.max(tops))
    total = jnp.maximum((sums * shares).sum(), 1e-30)
    mixed_ref[...] = ((parts_PH * shares[:, None]).sum(axis=0) / total).astype(mixed_ref.dtype)
