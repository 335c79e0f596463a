"""Copies stored tensors into arrays, memory-mapped and a piece at a time, converting as it goes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from qwenjax.checkpoint.plan import Source
from qwenjax.checkpoint.shards import StoredTensor
from qwenjax.errors import InputError

Array = np.ndarray[Any, np.dtype[Any]]
PIECE = 2**23  # elements that are mapped and converted at once
_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
}


def fill(target: Array, source: Source) -> None:
    """Writes a stored tensor into an array of as many elements in the same order, often a slice of a leaf."""
    read = _reader(source)
    while target.ndim > 1 and target.shape[0] == 1:
        target = target[0]
    each = target[0].size
    step = max(1, PIECE // each)
    for first in range(0, target.shape[0], step):
        part = target[first : first + step]
        with np.errstate(over="ignore", invalid="ignore"):  # what a cast makes infinite is found below
            values = read(first * each, part.size).reshape(part.shape)
            part[...] = values
        if part.dtype == np.float16 and not np.array_equal(np.isfinite(part), np.isfinite(values)):
            limit = np.finfo(np.float16).max
            problem = f"has values beyond the range of float16 ({limit:g})"
            raise InputError(source.key, None, problem, "Load it as bfloat16 or float32.")


def equal(one: Source, other: Source) -> bool:
    """Whether two matrices of one shape hold the same values."""
    read_one, read_other = _reader(one), _reader(other)
    rows, columns = one.stored.shape
    step = max(1, PIECE // columns)
    pieces = ((row * columns, min(step, rows - row) * columns) for row in range(0, rows, step))
    return all(
        np.array_equal(
            read_one(*piece).astype(np.float32).ravel(), read_other(*piece).astype(np.float32).ravel(), equal_nan=True
        )
        for piece in pieces
    )


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array whose memory JAX can take over on a CPU without a copy, which needs 64-byte alignment."""
    size = prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _reader(source: Source) -> Callable[[int, int], Array]:
    """A function of (first element, how many) over the flat tensor; FP8 comes as float32, in whole rows only."""
    if source.scales is None:
        return lambda start, count: _mapped(source.stored, start, count)
    *_, rows, columns = source.stored.shape
    high, wide = source.block
    scales = _mapped(source.scales, 0, prod(source.scales.shape)).astype(np.float32)
    scales = scales.reshape(-1, source.scales.shape[-1])
    blocks = source.scales.shape[-2]  # of each expert, where experts share one tensor

    def read(start: int, count: int) -> Array:
        row = np.arange(start // columns, (start + count) // columns)
        block = row // rows * blocks + row % rows // high
        values = _mapped(source.stored, start, count).astype(np.float32).reshape(-1, columns)
        for i, first in enumerate(range(0, columns, wide)):
            values[:, first : first + wide] *= scales[block, i, None]
        return values

    return read


def _mapped(stored: StoredTensor, start: int, count: int) -> Array:
    """Elements as they lie in the file; the mapping ends with the array, so that read pages don't add up."""
    dtype = _DTYPES[stored.dtype]
    try:
        return np.memmap(stored.path, dtype, "r", stored.offset + start * dtype.itemsize, (count,))
    except (OSError, ValueError) as error:
        problem = f"can't be read any more ({error})"
        raise InputError(str(stored.path), None, problem, "Don't change the files while they are loaded.") from None
