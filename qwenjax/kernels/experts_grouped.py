"""Many tokens' experts: rows in the order of their experts, and two kernels of products over each expert's own rows.

A program takes an expert and some of its columns, and goes through the expert's rows in tiles: the largest while they
are full, then one of each smaller size that is needed, so that at most 15 rows of an expert are padding. Programs of
experts without rows end at once: only chosen experts' weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.routing import group
from qwenjax.kernels.tiles import Ref, gated, load_tile
from qwenjax.moe_blocks import TILE_ROWS

Array = jax.Array


class _Tiling(NamedTuple):
    rows: tuple[int, ...]  # of the tiles, descending to the smallest
    columns: int  # of gate and of up; twice as many of down
    summed: int  # channels at a time
    params: plt.CompilerParams


def _tiling(num_rows: int, num_experts: int) -> _Tiling:
    """Small tiles for a decode step, bound by bandwidth; large ones where an expert has many rows on average.

    Each tile reads the program's weights again, and 50 kB of shared memory leave room for two programs or three.
    """
    average = num_rows // num_experts
    four_warps = plt.CompilerParams(num_warps=4, num_stages=4)
    if average < 8:
        return _Tiling((TILE_ROWS,), 32, 64, four_warps)
    if average < 32:
        return _Tiling((64, 32, TILE_ROWS), 32, 64, four_warps)
    if average < 128:
        return _Tiling((64, 32, TILE_ROWS), 64, 32, four_warps)
    return _Tiling((128, 64, 32, TILE_ROWS), 64, 32, plt.CompilerParams(num_warps=8, num_stages=4))


def grouped(
    x_ND: Array, weights_NA: Array, chosen_NA: Array, gate_up_ECFD: Array, down_EDF: Array, interpret: bool
) -> Array:
    """The weighted sum over each token's experts, [N, D]."""
    (tokens, per_token), (experts, _, width, hidden) = chosen_NA.shape, gate_up_ECFD.shape
    rows = tokens * per_token
    tiling = _tiling(rows, experts)
    order_R, starts_E, ends_E = group(chosen_NA.reshape(-1), experts, interpret=interpret)
    whole, own = pl.BlockSpec((rows,), lambda e, f: (0,)), pl.BlockSpec((None,), lambda e, f: (e,))

    def matrix(rows: int, columns: int) -> pl.BlockSpec:
        return pl.BlockSpec((rows, columns), lambda e, f: (0, 0))

    def call(kernel: Any, columns: int, blocks: int, specs: list[Any], name: str) -> Callable[..., Array]:
        called: Callable[..., Array] = pl.pallas_call(
            kernel,
            grid=(experts, blocks),
            in_specs=[own, own, whole, *specs],
            out_specs=matrix(rows, columns),
            out_shape=jax.ShapeDtypeStruct((rows, columns), x_ND.dtype),
            compiler_params=tiling.params,
            interpret=interpret,
            name=name,
        )
        return called

    with jax.named_scope("experts_gate_up_proj"):
        hidden_RF = call(
            partial(_gate_up, tiling=tiling, per_token=per_token),
            width,
            pl.cdiv(width, tiling.columns),
            [matrix(tokens, hidden), matrix(2 * experts * width, hidden)],
            "grouped_gate_up",
        )(starts_E, ends_E, order_R, x_ND, gate_up_ECFD.reshape(-1, hidden))
    with jax.named_scope("experts_down_proj"):
        out_RD = call(
            partial(_down, tiling=tiling),
            hidden,
            pl.cdiv(hidden, 2 * tiling.columns),
            [whole, matrix(rows, width), matrix(experts * hidden, width)],
            "grouped_down",
        )(starts_E, ends_E, order_R, weights_NA.reshape(-1), hidden_RF, down_EDF.reshape(-1, width))
    with jax.named_scope("combine"):
        return out_RD.reshape(tokens, per_token, hidden).sum(axis=1)


def _gate_up(
    start_ref: Ref,
    end_ref: Ref,
    order_ref: Ref,
    x_ref: Ref,
    gate_up_ref: Ref,
    hidden_ref: Ref,
    *,
    tiling: _Tiling,
    per_token: int,
) -> None:
    """hidden = silu(gate) * up of the expert's rows, in sorted order; rows of x are gathered as they are read."""
    width = hidden_ref.shape[1]
    column_F = pl.program_id(1) * tiling.columns + jnp.arange(tiling.columns)
    gate_F = pl.program_id(0) * (2 * width) + _within(column_F, width, tiling.columns)
    end = end_ref[...]

    def tile(first: Array, size: int) -> None:
        row_M = first + jnp.arange(size)
        source_M = plt.load(order_ref.at[row_M], mask=row_M < end, other=0) // per_token
        gate_MF, up_MF = _products(x_ref, source_M, gate_up_ref, (gate_F, gate_F + width), tiling.summed)
        _store(hidden_ref, row_M, column_F, gated(gate_MF, up_MF), row_M < end)

    _for_tiles(start_ref[...], end, tiling.rows, tile)


def _down(
    start_ref: Ref,
    end_ref: Ref,
    order_ref: Ref,
    weights_ref: Ref,
    hidden_ref: Ref,
    down_ref: Ref,
    out_ref: Ref,
    *,
    tiling: _Tiling,
) -> None:
    """The expert's rows of hidden times down and the row's weight, back at the row's place."""
    rows, hidden = out_ref.shape
    column_D = pl.program_id(1) * (2 * tiling.columns) + jnp.arange(2 * tiling.columns)
    down_D = pl.program_id(0) * hidden + _within(column_D, hidden, 2 * tiling.columns)
    end = end_ref[...]

    def tile(first: Array, size: int) -> None:
        row_M = first + jnp.arange(size)
        given_M = row_M < end
        place_M = plt.load(order_ref.at[row_M], mask=given_M, other=rows)  # of others outside, and not written
        weight_M = plt.load(weights_ref.at[place_M], mask=given_M, other=0)
        (out_MD,) = _products(hidden_ref, jnp.minimum(row_M, rows - 1), down_ref, (down_D,), tiling.summed)
        _store(out_ref, place_M, column_D, out_MD * weight_M[:, None], given_M)

    _for_tiles(start_ref[...], end, tiling.rows, tile)


def _for_tiles(start: Array, end: Array, sizes: tuple[int, ...], tile: Callable[[Array, int], None]) -> None:
    """tile(first row, size) over the rows from start to end, the last of them padded to the smallest size."""
    left = (end - start + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for size in sizes:
        number = left // size

        def step(i: Array, _: None, start: Array = start, size: int = size) -> None:
            tile(start + i * size, size)

        jax.lax.fori_loop(0, number, step, None)
        start, left = start + number * size, left - number * size


def _products(
    x_ref: Ref, x_row_M: Array, weight_ref: Ref, weight_rows: tuple[Array, ...], block: int
) -> tuple[Array, ...]:
    """Rows of x times each of the sets of rows of the weights, [M, F], summed in float32 and rounded to their dtype."""
    summed = weight_ref.shape[1]

    def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        at_K = i * block + jnp.arange(block)
        mask_K = None if summed % block == 0 else at_K < summed
        x_MK = load_tile(x_ref, x_row_M[:, None], at_K[None], mask_K)
        return tuple(
            total_MF + plt.dot(x_MK, load_tile(weight_ref, row_F[:, None], at_K[None], mask_K).T)
            for total_MF, row_F in zip(sums, weight_rows, strict=True)
        )

    zeros = tuple(jnp.zeros((x_row_M.size, row_F.size), jnp.float32) for row_F in weight_rows)
    sums = jax.lax.fori_loop(0, pl.cdiv(summed, block), add, zeros)
    return tuple(total.astype(weight_ref.dtype) for total in sums)


def _within(column: Array, size: int, block: int) -> Array:
    """Columns past the end, which are computed and not stored, are the last one."""
    return column if size % block == 0 else jnp.minimum(column, size - 1)


def _store(ref: Ref, row_M: Array, column_F: Array, values_MF: Array, given_M: Array) -> None:
    row_MF, column_MF = jnp.broadcast_arrays(row_M[:, None], column_F[None])
    mask = given_M[:, None] & (column_F < ref.shape[1])[None]
    # Where nothing is written the index is outside: the interpreter writes back what it read there, in no order.
    row_MF = jnp.where(given_M[:, None], row_MF, ref.shape[0])
    plt.store(ref.at[row_MF, column_MF], values_MF, mask=mask)
