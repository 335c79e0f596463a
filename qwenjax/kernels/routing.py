"""The router's choice of experts in one kernel, and the rows of each expert in one: XLA takes four and two to three."""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import Ref

Array = jax.Array
_MOST_EXPERTS: Final = 1024  # of a token's scores, which one program keeps in registers
_BLOCK_ROWS: Final = 1024  # that a program looks at together
_NONE: Final = 1 << 30  # larger than any expert's index


def fits_choose(logits_NE: Array, experts_per_token: int) -> bool:
    return is_narrow(logits_NE) and experts_per_token <= logits_NE.shape[-1] <= _MOST_EXPERTS


def choose(
    logits_NE: Array, *, experts_per_token: int, renormalise: bool, interpret: bool = False
) -> tuple[Array, Array]:
    """Weights and indices of the experts with the largest scores, both [N, A], as `qwenjax.moe.choose_experts`."""
    tokens, experts = logits_NE.shape
    shape = (tokens, experts_per_token)
    chosen = pl.BlockSpec((None, experts_per_token), lambda n: (n, 0))
    with jax.named_scope("top_k"):
        weights_NA, chosen_NA = pl.pallas_call(
            partial(_choose, renormalise=renormalise),
            grid=(tokens,),
            in_specs=[pl.BlockSpec((None, experts), lambda n: (n, 0))],
            out_specs=[chosen, chosen],
            out_shape=[jax.ShapeDtypeStruct(shape, logits_NE.dtype), jax.ShapeDtypeStruct(shape, jnp.int32)],
            compiler_params=plt.CompilerParams(num_warps=1, num_stages=1),
            interpret=interpret,
            name="choose_experts",
        )(logits_NE)
    return weights_NA, chosen_NA


def _choose(logits_ref: Ref, weights_ref: Ref, chosen_ref: Ref, *, renormalise: bool) -> None:
    (experts,), (per_token,) = logits_ref.shape, chosen_ref.shape
    index_E = jnp.arange(pl.next_power_of_2(experts))
    at_A = jnp.arange(pl.next_power_of_2(per_token))
    given = index_E < experts
    logits_E = plt.load(logits_ref.at[pl.ds(0, index_E.size)], mask=given, other=0).astype(jnp.float32)
    logits_E = jnp.where(given, logits_E, -jnp.inf)
    exp_E = jnp.exp(logits_E - jnp.max(logits_E))
    left_E = jnp.where(given, exp_E / jnp.sum(exp_E), -1.0)
    weights_A, chosen_A = jnp.zeros(at_A.size, jnp.float32), jnp.zeros(at_A.size, jnp.int32)
    for a in range(per_token):
        largest = jnp.max(left_E)
        first = jnp.min(jnp.where(left_E == largest, index_E, experts - 1))  # of equals the lower; NaN has an index too
        weights_A = jnp.where(at_A == a, largest, weights_A)
        chosen_A = jnp.where(at_A == a, first, chosen_A)
        left_E = jnp.where(index_E == first, -1.0, left_E)
    if renormalise:
        weights_A = weights_A / jnp.sum(weights_A)
    for ref, values_A in ((weights_ref, weights_A), (chosen_ref, chosen_A)):
        plt.store(ref.at[pl.ds(0, at_A.size)], values_A.astype(ref.dtype), mask=at_A < per_token)


def group(chosen_R: Array, num_experts: int, *, interpret: bool = False) -> tuple[Array, Array, Array]:
    """Rows in the order of their experts, [R], and where each expert's rows start and end in it, both [E].

    Rows of one expert keep their order. Each program counts the rows of the experts before its own, then places its own
    rows.
    """
    (rows,) = chosen_R.shape
    whole = pl.BlockSpec((rows,), lambda e: (0,))
    own = pl.BlockSpec((None,), lambda e: (e,))
    with jax.named_scope("top_k"):
        order_R, starts_E, ends_E = pl.pallas_call(
            _group,
            grid=(num_experts,),
            in_specs=[whole],
            out_specs=[whole, own, own],
            out_shape=[jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, num_experts, num_experts)],
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="group_rows",
        )(chosen_R)
    return order_R, starts_E, ends_E


def _group(chosen_ref: Ref, order_ref: Ref, start_ref: Ref, end_ref: Ref) -> None:
    (rows,) = chosen_ref.shape
    block = min(_BLOCK_ROWS, max(128, pl.next_power_of_2(rows)))
    blocks = pl.cdiv(rows, block)
    expert = pl.program_id(0)

    def chosen(i: Array) -> tuple[Array, Array]:
        row_M = i * block + jnp.arange(block)
        return row_M, plt.load(chosen_ref.at[row_M], mask=row_M < rows, other=_NONE)

    def count(i: Array, before_M: Array) -> Array:
        return before_M + (chosen(i)[1] < expert).astype(jnp.int32)

    def place(i: Array, filled: Array) -> Array:
        row_M, chosen_M = chosen(i)
        own_M = chosen_M == expert
        counts_M = own_M.astype(jnp.int32)
        to_M = jnp.where(own_M, filled + jnp.cumsum(counts_M) - 1, rows)  # the others' is outside, and not written
        plt.store(order_ref.at[to_M], row_M, mask=own_M)
        return filled + jnp.sum(counts_M)

    start = jnp.sum(jax.lax.fori_loop(0, blocks, count, jnp.zeros(block, jnp.int32)))
    start_ref[...] = start
    end_ref[...] = jax.lax.fori_loop(0, blocks, place, start)
