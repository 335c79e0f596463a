"""Matrix products of few rows, a decode step's: each weight is read once, and nothing but the result is written.

XLA cuts the sum of such a product over several programs, to fill the GPU, writes their partial results in float32 and
adds them up in a kernel more; for a few rows these are some percent of the weights. Here the outputs alone are split,
thin enough to fill the GPU. The gated product also joins what follows it, silu(gate) * up, and doesn't write the two.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels import tiles
from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import Ref, padded_rows, wide

Array = jax.Array
_MANY_COLUMNS: Final = 8192  # of a result, from which on a program takes 32 of them in place of 16
_SUMMED: Final = 128  # channels that a program takes at once, or twice as many of 16 columns
_MOST_ROWS: Final = 64
_SHARED_BYTES: Final = 80_000  # of a program's operands at all stages together; an RTX 4090 has 101,376


def fits(x_MD: Array, weight: Array) -> bool:
    """Up to 64 rows: more are XLA's to tile."""
    return is_narrow(x_MD, weight) and 1 <= x_MD.shape[0] <= _MOST_ROWS and x_MD.shape[1] % _SUMMED == 0


def product(x_MD: Array, weight_FD: Array, *, interpret: bool = False) -> Array:
    """x times the transposed weight, [M, F]."""
    return _call("narrow_product", x_MD, weight_FD[None], interpret)


def gated(x_MD: Array, gate_up_CFD: Array, *, interpret: bool = False) -> Array:
    """silu(x times gate) * (x times up), [M, F]; both products are rounded to the dtype first, as in the plain one."""
    return _call("narrow_gated", x_MD, gate_up_CFD, interpret)


def _call(name: str, x_MD: Array, weight_CFD: Array, interpret: bool) -> Array:
    (rows, summed), (factors, columns, _) = x_MD.shape, weight_CFD.shape
    width = 32 if columns > _MANY_COLUMNS else 16
    step = 2 * _SUMMED if width == 16 and summed % (2 * _SUMMED) == 0 else _SUMMED
    stage_bytes = x_MD.dtype.itemsize * step * (padded_rows(rows) + factors * width)
    made: Array = pl.pallas_call(
        partial(_multiply, width=width, step=step),
        grid=(pl.cdiv(columns, width),),
        in_specs=[pl.BlockSpec((rows, summed), lambda i: (0, 0))]
        + [pl.BlockSpec((None, columns, summed), lambda i, c=c: (c, 0, 0)) for c in range(factors)],
        out_specs=pl.BlockSpec((rows, columns), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x_MD.dtype),
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=max(2, min(4, _SHARED_BYTES // stage_bytes))),
        interpret=interpret,
        name=name,
    )(x_MD, *[weight_CFD] * factors)
    return made


def _multiply(x_ref: Ref, *refs: Ref, width: int, step: int) -> None:
    """`width` columns of the result, `step` channels at a time."""
    *weight_refs, result_ref = refs
    (rows, summed), columns = x_ref.shape, result_ref.shape[1]
    padded = padded_rows(rows)
    start = pl.program_id(0) * width
    row_mask = jnp.arange(padded) < rows
    column_mask = start + jnp.arange(width) < columns

    def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        at = pl.ds(i * step, step)
        x_MD = plt.load(x_ref.at[pl.ds(0, padded), at], mask=wide(row_mask, step), other=0.0)
        mask = wide(column_mask, step)
        loaded = [plt.load(ref.at[pl.ds(start, width), at], mask=mask, other=0.0) for ref in weight_refs]
        return tuple(total + plt.dot(x_MD, w.T) for total, w in zip(sums, loaded, strict=True))

    zeros = tuple(jnp.zeros((padded, width), jnp.float32) for _ in weight_refs)
    sums = jax.lax.fori_loop(0, summed // step, add, zeros)
    result, *up = [total.astype(result_ref.dtype) for total in sums]
    if up:
        result = tiles.gated(result, up[0])
    plt.store(result_ref.at[pl.ds(0, padded), pl.ds(start, width)], result, mask=row_mask[:, None] & column_mask[None])
