"""The kernel between the projection and attention: QK norm, RoPE, and the cache written where it lies."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import Halves, Ref, normed, rotated

Array = jax.Array
_BLOCK_TOKENS = 32


def rope_fill(
    qkv_BTKJH: Array,
    q_norm_H: Array | None,
    k_norm_H: Array | None,
    cos_BTH: Array,
    sin_BTH: Array,
    starts_B: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Queries [B, T, K, G, H], normed where there are weights and rotated, and the caches with the T new positions.

    J is G queries, the key, the value. Row b's token t goes to position starts[b] + t, or nowhere if that is beyond the
    capacity; the caches are updated in place if the caller donates them.
    """
    batch, tokens, kv_heads, packed, head_dim = qkv_BTKJH.shape
    capacity = keys_BKSH.shape[2]
    block = min(_BLOCK_TOKENS, pl.next_power_of_2(tokens))
    norms = () if q_norm_H is None or k_norm_H is None else (q_norm_H, k_norm_H)
    # Each program takes some tokens of one packed head. Those of keys and values have no queries to write, and name
    # the block of the last ones.
    head = pl.BlockSpec((None, block, None, None, head_dim), lambda t, n, b: (b, t, n // packed, n % packed, 0))
    queries = pl.BlockSpec(
        (None, block, None, None, head_dim),
        lambda t, n, b: (b, t, n // packed, jnp.minimum(n % packed, packed - 3), 0),
    )
    angles = pl.BlockSpec((None, block, head_dim // 2), lambda t, n, b: (b, t, 0))
    cached = pl.BlockSpec((None, None, capacity, head_dim), lambda t, n, b: (b, n // packed, 0, 0))
    weight = pl.BlockSpec((head_dim,), lambda t, n, b: (0,))
    q_shape = (batch, tokens, kv_heads, packed - 2, head_dim)
    with jax.named_scope("rope"):
        q_BTKGH, keys_BKSH, values_BKSH = pl.pallas_call(
            partial(_kernel, tokens=tokens, packed=packed, eps=eps),
            grid=(pl.cdiv(tokens, block), kv_heads * packed, batch),
            in_specs=[
                *(head, angles, angles, pl.BlockSpec((None,), lambda t, n, b: (b,))),
                *(cached, cached, *(weight for _ in norms)),
            ],
            out_specs=[queries, cached, cached],
            out_shape=[jax.ShapeDtypeStruct(x, qkv_BTKJH.dtype) for x in (q_shape, keys_BKSH.shape, values_BKSH.shape)],
            input_output_aliases={4: 1, 5: 2},
            compiler_params=plt.CompilerParams(num_warps=4 if block == _BLOCK_TOKENS else 1, num_stages=1),
            interpret=interpret,
            name="rope_fill",
        )(qkv_BTKJH, cos_BTH, sin_BTH, starts_B, keys_BKSH, values_BKSH, *norms)
    return q_BTKGH, keys_BKSH, values_BKSH


def fits(qkv_BTKJH: Array, keys_BKSH: Array, values_BKSH: Array) -> bool:
    """Whether the kernel takes these: one 16-bit dtype, and a head that halves into powers of two."""
    head_dim = qkv_BTKJH.shape[-1]
    return is_narrow(qkv_BTKJH, keys_BKSH, values_BKSH) and 16 <= head_dim == pl.next_power_of_2(head_dim)


def _kernel(
    qkv_ref: Ref,
    cos_ref: Ref,
    sin_ref: Ref,
    start_ref: Ref,
    keys_in_ref: Ref,
    values_in_ref: Ref,
    *refs: Ref,
    tokens: int,
    packed: int,
    eps: float,
) -> None:
    del keys_in_ref, values_in_ref  # the same memory as the caches to write
    *norm_refs, q_ref, keys_ref, values_ref = refs
    block, head_dim = qkv_ref.shape
    capacity = keys_ref.shape[0]
    channels = pl.ds(0, head_dim // 2), pl.ds(head_dim // 2, head_dim // 2)
    j = pl.program_id(1) % packed
    offset = pl.program_id(0) * block
    given = (offset + jnp.arange(block) < tokens)[:, None]
    place = start_ref[...] + offset
    kept = given & (place + jnp.arange(block) < capacity)[:, None]

    def head() -> Halves:
        first, second = (plt.load(qkv_ref.at[:, half], mask=given, other=0) for half in channels)
        return first, second

    def turned(weight_ref: Ref | None) -> Halves:
        halves = head() if weight_ref is None else normed(head(), weight_ref, eps)
        cos, sin = (plt.load(ref, mask=given, other=0) for ref in (cos_ref, sin_ref))
        return rotated(halves, cos, sin)

    def keep(cache_ref: Ref, halves: Halves) -> None:
        for half, vectors in zip(channels, halves, strict=True):
            plt.store(cache_ref.at[pl.ds(place, block), half], vectors, mask=kept)

    q_norm_ref, k_norm_ref = norm_refs or (None, None)

    @pl.when(j < packed - 2)
    def _() -> None:
        for half, vectors in zip(channels, turned(q_norm_ref), strict=True):
            plt.store(q_ref.at[:, half], vectors, mask=given)

    @pl.when(j == packed - 2)
    def _() -> None:
        keep(keys_ref, turned(k_norm_ref))

    @pl.when(j == packed - 1)
    def _() -> None:
        keep(values_ref, head())
