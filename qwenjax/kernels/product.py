"""Matrix products of few rows, a decode step's: each weight is read once, and nothing but the result is written.

XLA cuts the sum of such a product over several programs, to fill the GPU, and writes their partial results in float32;
for two to 64 rows these are a few percent of the weights. Here the outputs alone are split. The gated product also
joins what follows it, silu(gate) * up, and doesn't write the two.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from qwenjax.kernels.choice import is_narrow

Array = jax.Array
_COLUMNS: Final = 32  # of the result, of one program
_SUMMED: Final = 128  # channels that a program takes at once
_FEWEST_ROWS: Final = 16  # of a Triton product; fewer are padded
_MOST_ROWS: Final = 64


def fits(x_MD: Array, weight: Array) -> bool:
    """Two to 64 rows: one alone needs no product's tiles, and more are XLA's to tile."""
    return is_narrow(x_MD, weight) and 2 <= x_MD.shape[0] <= _MOST_ROWS and x_MD.shape[1] % _SUMMED == 0


def product(x_MD: Array, weight_FD: Array, *, interpret: bool = False) -> Array:
    """x times the transposed weight, [M, F]."""
    return _call("narrow_product", x_MD, weight_FD[None], interpret)


def gated(x_MD: Array, gate_up_CFD: Array, *, interpret: bool = False) -> Array:
    """silu(x times gate) * (x times up), [M, F]; both products are rounded to the dtype first, as in the plain one."""
    return _call("narrow_gated", x_MD, gate_up_CFD, interpret)


def _call(name: str, x_MD: Array, weight_CFD: Array, interpret: bool) -> Array:
    (rows, summed), (factors, columns, _) = x_MD.shape, weight_CFD.shape
    made: Array = pl.pallas_call(
        partial(_multiply, columns=columns),
        grid=(pl.cdiv(columns, _COLUMNS),),
        in_specs=[pl.BlockSpec((rows, summed), lambda i: (0, 0))]
        + [pl.BlockSpec((None, columns, summed), lambda i, c=c: (c, 0, 0)) for c in range(factors)],
        out_specs=pl.BlockSpec((rows, columns), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x_MD.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=4),
        interpret=interpret,
        name=name,
    )(x_MD, *[weight_CFD] * factors)
    return made


def _multiply(x_ref: Any, *refs: Any, columns: int) -> None:
    *weight_refs, result_ref = refs
    rows, summed = x_ref.shape
    padded = max(_FEWEST_ROWS, pl.next_power_of_2(rows))
    start = pl.program_id(0) * _COLUMNS
    row_mask = jnp.arange(padded) < rows
    column_mask = start + jnp.arange(_COLUMNS) < columns

    def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        at = pl.ds(i * _SUMMED, _SUMMED)
        x_MD = pltriton.load(x_ref.at[pl.ds(0, padded), at], mask=_wide(row_mask), other=0.0)
        loaded = [
            pltriton.load(ref.at[pl.ds(start, _COLUMNS), at], mask=_wide(column_mask), other=0.0) for ref in weight_refs
        ]
        return tuple(total + pltriton.dot(x_MD, w.T) for total, w in zip(sums, loaded, strict=True))

    zeros = tuple(jnp.zeros((padded, _COLUMNS), jnp.float32) for _ in weight_refs)
    sums = jax.lax.fori_loop(0, summed // _SUMMED, add, zeros)
    result, *up = [total.astype(result_ref.dtype) for total in sums]
    if up:
        result = jax.nn.silu(result.astype(jnp.float32)).astype(result.dtype) * up[0]
    pltriton.store(
        result_ref.at[pl.ds(0, padded), pl.ds(start, _COLUMNS)], result, mask=row_mask[:, None] & column_mask[None]
    )


def _wide(mask: Array) -> Array:
    return jnp.broadcast_to(mask[:, None], (mask.size, _SUMMED))
