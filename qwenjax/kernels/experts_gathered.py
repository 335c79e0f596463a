"""A single token's experts: two kernels, bound by the bandwidth at which they read those experts' weights once.

No tensor cores: a program takes a few rows of weights, keeps the sums of each thread's channels apart and adds them up
at its end. What the rows are multiplied with is loaded as often as there are rows, in the same layout, from L1: a
broadcast would go through shared memory, with barriers between the loads.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.tiles import Ref, gated, load_tile

Array = jax.Array
_UP_ROWS: Final = 4  # of gate and of up that a program of the first kernel reads
_UP_SUMMED: Final = 256  # channels of them at a time
_DOWN_ROWS: Final = 32  # of all experts that a program of the second kernel reads
_DOWN_SUMMED: Final = 128
_PARAMS: Final = plt.CompilerParams(num_warps=4, num_stages=1)


def gathered(
    x_1D: Array, weights_1A: Array, chosen_1A: Array, gate_up_ECFD: Array, down_EDF: Array, interpret: bool
) -> Array:
    """The weighted sum over one token's experts, [1, D]."""
    (_, hidden), (_, per_token) = x_1D.shape, chosen_1A.shape
    experts, _, width, _ = gate_up_ECFD.shape
    with jax.named_scope("experts_gate_up_proj"):
        hidden_AF = pl.pallas_call(
            _gate_up,
            grid=(pl.cdiv(width, _UP_ROWS), per_token),
            in_specs=[
                pl.BlockSpec((1, hidden), lambda f, a: (0, 0)),
                pl.BlockSpec((None, None), lambda f, a: (0, a)),
                pl.BlockSpec((2 * experts * width, hidden), lambda f, a: (0, 0)),
            ],
            out_specs=pl.BlockSpec((None, width), lambda f, a: (a, 0)),
            out_shape=jax.ShapeDtypeStruct((per_token, width), x_1D.dtype),
            compiler_params=_PARAMS,
            interpret=interpret,
            name="gathered_gate_up",
        )(x_1D, chosen_1A, gate_up_ECFD.reshape(-1, hidden))
    one_token = pl.BlockSpec((None, per_token), lambda d: (0, 0))
    with jax.named_scope("experts_down_proj"):
        out_1D: Array = pl.pallas_call(
            _down,
            grid=(pl.cdiv(hidden, _down_rows(per_token)),),
            in_specs=[
                pl.BlockSpec((per_token, width), lambda d: (0, 0)),
                one_token,
                one_token,
                pl.BlockSpec((experts * hidden, width), lambda d: (0, 0)),
            ],
            out_specs=pl.BlockSpec((None, hidden), lambda d: (0, 0)),
            out_shape=jax.ShapeDtypeStruct(x_1D.shape, x_1D.dtype),
            compiler_params=_PARAMS,
            interpret=interpret,
            name="gathered_down",
        )(hidden_AF, weights_1A, chosen_1A, down_EDF.reshape(-1, width))
    return out_1D


def _gate_up(x_ref: Ref, expert_ref: Ref, gate_up_ref: Ref, hidden_ref: Ref) -> None:
    (_, summed), (width,) = x_ref.shape, hidden_ref.shape
    column_M = pl.program_id(0) * _UP_ROWS + jnp.arange(_UP_ROWS)
    gate_M = expert_ref[...] * (2 * width) + jnp.minimum(column_M, width - 1)
    sums = [jnp.zeros((_UP_ROWS, _UP_SUMMED), jnp.float32)] * 2
    for start in range(0, summed, _UP_SUMMED):
        at_K = start + jnp.arange(_UP_SUMMED)
        mask = None if start + _UP_SUMMED <= summed else at_K < summed
        x_MK = _tile(x_ref, jnp.zeros_like(column_M)[:, None], at_K[None], mask)
        for i, row_M in enumerate((gate_M, gate_M + width)):
            sums[i] += _tile(gate_up_ref, row_M[:, None], at_K[None], mask) * x_MK
    gate_M, up_M = (jnp.sum(total, axis=1).astype(hidden_ref.dtype) for total in sums)
    plt.store(hidden_ref.at[column_M], gated(gate_M, up_M), mask=column_M < width)


def _down(hidden_ref: Ref, weights_ref: Ref, chosen_ref: Ref, down_ref: Ref, out_ref: Ref) -> None:
    (per_token, width), (hidden,) = hidden_ref.shape, out_ref.shape
    padded, rows = pl.next_power_of_2(per_token), _down_rows(per_token)
    at_A = jnp.arange(padded)
    source_A = jnp.minimum(at_A, per_token - 1)  # padding is the last expert again, with no weight
    expert_A = plt.load(chosen_ref.at[source_A])
    weights_A = plt.load(weights_ref.at[at_A], mask=at_A < per_token, other=0)
    column_M = pl.program_id(0) * rows + jnp.arange(rows)
    row_AM = expert_A[:, None] * hidden + jnp.minimum(column_M, hidden - 1)[None]
    source_AM = jnp.broadcast_to(source_A[:, None], row_AM.shape)
    total_AMK = jnp.zeros((padded, rows, _DOWN_SUMMED), jnp.float32)
    for start in range(0, width, _DOWN_SUMMED):
        at_K = start + jnp.arange(_DOWN_SUMMED)
        mask = None if start + _DOWN_SUMMED <= width else at_K < width
        hidden_AMK = _tile(hidden_ref, source_AM[:, :, None], at_K[None, None], mask)
        total_AMK += _tile(down_ref, row_AM[:, :, None], at_K[None, None], mask) * hidden_AMK
    out_AM = jnp.sum(total_AMK, axis=2).astype(out_ref.dtype) * weights_A[:, None]
    out_M = jnp.sum(out_AM.astype(jnp.float32), axis=0)
    plt.store(out_ref.at[column_M], out_M.astype(out_ref.dtype), mask=column_M < hidden)


def _down_rows(per_token: int) -> int:
    return max(1, _DOWN_ROWS // pl.next_power_of_2(per_token))


def _tile(ref: Ref, row: Array, column: Array, mask_K: Array | None) -> Array:
    return load_tile(ref, row, column, mask_K).astype(jnp.float32)
