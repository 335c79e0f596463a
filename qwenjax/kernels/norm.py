"""Residual and norm in one kernel, x + delta and its RMSNorm: XLA takes two or three, a sum apart from its use."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from qwenjax.kernels.choice import is_narrow
from qwenjax.kernels.tiles import Ref

Array = jax.Array
_MOST_CHANNELS: Final = 16384  # of a row, which one program keeps in registers


def fits(x_ND: Array, weight_D: Array) -> bool:
    return is_narrow(x_ND, weight_D) and x_ND.shape[-1] <= _MOST_CHANNELS


def norm(x_ND: Array, weight_D: Array, *, eps: float, interpret: bool = False) -> Array:
    """RMSNorm of [N, D], as `qwenjax.layers.rms_norm`."""
    (normed_ND,) = _call(partial(_norm_row, eps=eps), 1, x_ND, (x_ND, weight_D), interpret)
    return normed_ND


def add_norm(
    x_ND: Array, delta_ND: Array, weight_D: Array, *, eps: float, interpret: bool = False
) -> tuple[Array, Array]:
    """The sum of [N, D] and [N, D], rounded to their dtype, and its RMSNorm."""
    sum_ND, normed_ND = _call(partial(_add_norm_row, eps=eps), 2, x_ND, (x_ND, delta_ND, weight_D), interpret)
    return sum_ND, normed_ND


def _call(kernel: Any, results: int, like: Array, arrays: tuple[Array, ...], interpret: bool) -> tuple[Array, ...]:
    rows, channels = like.shape
    row = pl.BlockSpec((None, channels), lambda i: (i, 0))
    whole = pl.BlockSpec((channels,), lambda i: (0,))
    made: tuple[Array, ...] = pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[whole if array.ndim == 1 else row for array in arrays],
        out_specs=[row] * results,
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype)] * results,
        compiler_params=plt.CompilerParams(num_warps=8 if channels > 2048 else 4, num_stages=1),
        interpret=interpret,
        name="rms_norm",
    )(*arrays)
    return made


def _norm_row(x_ref: Ref, weight_ref: Ref, normed_ref: Ref, *, eps: float) -> None:
    channels = _channels(x_ref)
    _write_normed(_load(x_ref, channels), weight_ref, normed_ref, channels, eps)


def _add_norm_row(x_ref: Ref, delta_ref: Ref, weight_ref: Ref, sum_ref: Ref, normed_ref: Ref, *, eps: float) -> None:
    channels = _channels(x_ref)
    total = _load(x_ref, channels) + _load(delta_ref, channels)
    _store(sum_ref, total, channels)
    _write_normed(total, weight_ref, normed_ref, channels, eps)


def _write_normed(x: Array, weight_ref: Ref, normed_ref: Ref, channels: Array, eps: float) -> None:
    wide = x.astype(jnp.float32)
    mean_square = jnp.sum(wide * wide) / _size(normed_ref)
    scaled = (wide * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)
    _store(normed_ref, _load(weight_ref, channels) * scaled, channels)


def _size(ref: Ref) -> int:
    return int(ref.shape[-1])


def _channels(ref: Ref) -> Array:
    """Indices of a row's channels, padded to the power of two that Triton wants."""
    return jnp.arange(pl.next_power_of_2(_size(ref)))


def _load(ref: Ref, channels: Array) -> Array:
    loaded: Array = plt.load(ref.at[pl.ds(0, channels.size)], mask=channels < _size(ref), other=0.0)
    return loaded


def _store(ref: Ref, values: Array, channels: Array) -> None:
    plt.store(ref.at[pl.ds(0, channels.size)], values, mask=channels < _size(ref))
