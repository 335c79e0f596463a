"""The kernels of a prompt in Pallas's interpreter: rotation with the write into the cache, and attention over it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.cache import append
from qwenjax.kernels import prefill_attention as attention_kernel
from qwenjax.kernels import rope_fill as rope_kernel
from qwenjax.kernels.choice import Kernels
from qwenjax.kernels.prefill_attention import prefill_attention
from qwenjax.kernels.rope_fill import rope_fill
from qwenjax.layers import apply_rope, attention, causal_mask, rms_norm

Array = jax.Array
EPS = 1e-6


def normal(seed: int, *sizes: int, dtype: Any = "float32") -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=sizes).astype(jnp.dtype(dtype)))


def largest_difference(x: Array, y: Array) -> float:
    assert x.dtype == y.dtype
    assert x.shape == y.shape
    return float(np.max(np.abs(np.asarray(x).astype(np.float32) - np.asarray(y).astype(np.float32))))


def same(x: Array, y: Array) -> bool:
    return bool(np.array_equal(np.asarray(x), np.asarray(y)))


# Rotation and the write into the cache.


def projected(
    starts: tuple[int, ...], tokens: int, sizes: tuple[int, int, int, int], normed: bool, dtype: Any
) -> tuple[Any, ...]:
    """Arguments of rope_fill; sizes are S, K, G and H."""
    capacity, kv_heads, group, head_dim = sizes
    cached = (len(starts), kv_heads, capacity, head_dim)
    return (
        normal(0, len(starts), tokens, kv_heads, group + 2, head_dim, dtype=dtype),
        normal(1, head_dim, dtype=dtype) if normed else None,
        normal(2, head_dim, dtype=dtype) if normed else None,
        *(normal(seed, len(starts), tokens, head_dim // 2, dtype=dtype) for seed in (3, 4)),  # any two will do
        jnp.array(starts, jnp.int32),
        *(normal(seed, *cached, dtype=dtype) for seed in (5, 6)),
    )


def plain_rope_fill(
    qkv_BTKJH: Array,
    q_norm_H: Array | None,
    k_norm_H: Array | None,
    cos_BTH: Array,
    sin_BTH: Array,
    starts_B: Array,
    keys_BKSH: Array,
    values_BKSH: Array,
) -> tuple[Array, Array, Array]:
    """The same by the functions that the model runs without kernels."""
    q_BTKGH, k_BTKH, v_BTKH = qkv_BTKJH[..., :-2, :], qkv_BTKJH[..., -2, :], qkv_BTKJH[..., -1, :]
    if q_norm_H is not None and k_norm_H is not None:
        q_BTKGH, k_BTKH = rms_norm(q_BTKGH, q_norm_H, EPS), rms_norm(k_BTKH, k_norm_H, EPS)
    q_BTNH = apply_rope(q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, q_BTKGH.shape[-1]), cos_BTH, sin_BTH)
    k_BTKH = apply_rope(k_BTKH, cos_BTH, sin_BTH)
    return q_BTNH.reshape(q_BTKGH.shape), append(keys_BKSH, k_BTKH, starts_B), append(values_BKSH, v_BTKH, starts_B)


@pytest.mark.parametrize(
    ("starts", "tokens", "sizes", "normed", "dtype", "tolerance"),
    [
        ((0, 0), 40, (40, 2, 3, 16), False, "float32", 1e-6),  # a prompt that fills the cache, no multiple of a block
        ((3, 29, 60, 64), 5, (64, 2, 1, 16), True, "float32", 1e-5),  # some rows and all of one have no place
        ((7, 50), 33, (90, 1, 7, 64), True, "bfloat16", 2**-4),
        ((0, 5, 16), 1, (16, 2, 7, 16), True, "float32", 1e-5),  # a decode step, with an empty row and a full one
    ],
)
def test_queries_are_turned_and_keys_and_values_written(
    starts: tuple[int, ...],
    tokens: int,
    sizes: tuple[int, int, int, int],
    normed: bool,
    dtype: str,
    tolerance: float,
) -> None:
    given = projected(starts, tokens, sizes, normed, dtype)
    q_BTKGH, keys_BKSH, values_BKSH = jax.jit(partial(rope_fill, eps=EPS, interpret=True))(*given)
    expected = jax.jit(plain_rope_fill)(*given)
    assert largest_difference(q_BTKGH, expected[0]) < tolerance
    assert largest_difference(keys_BKSH, expected[1]) < tolerance
    assert same(values_BKSH, expected[2])  # values are only moved
    for row, start in enumerate(starts):  # and what isn't written stays
        for kept, cached in ((keys_BKSH, given[6]), (values_BKSH, given[7])):
            kept_KSH, cached_KSH = np.asarray(kept)[row], np.asarray(cached)[row]
            assert np.array_equal(kept_KSH[:, :start], cached_KSH[:, :start])
            assert np.array_equal(kept_KSH[:, start + tokens :], cached_KSH[:, start + tokens :])


def test_a_platform_without_the_kernel_runs_the_plain_version_without_norms() -> None:
    given = projected((0,), 3, (4, 1, 2, 16), False, jnp.bfloat16)
    run = partial(Kernels().run, "rope", rope_kernel.fits(given[0], *given[6:]), partial(rope_fill, eps=EPS))
    results = jax.jit(partial(run, plain_rope_fill))(*given), jax.jit(plain_rope_fill)(*given)
    for got, expected in zip(*results, strict=True):
        assert same(got, expected)


# Attention.


@pytest.mark.parametrize(
    ("starts", "tokens", "sizes", "window"),
    [
        ((0,), 300, (300, 1, 2, 16), None),  # a prompt: blocks of 128 queries, the last one short
        ((0, 140), 20, (150, 2, 7, 16), None),  # pieces, of an empty row and of one where the last have no place
        ((0, 70), 150, (230, 1, 3, 32), 100),  # the window ends inside blocks
        ((190,), 40, (256, 1, 1, 16), 3),  # no block that all its queries see
    ],
)
def test_a_query_attends_what_is_cached_up_to_it(
    starts: tuple[int, ...], tokens: int, sizes: tuple[int, int, int, int], window: int | None
) -> None:
    capacity, kv_heads, group, head_dim = sizes
    batch = len(starts)
    starts_B, places_S = np.array(starts, np.int32), np.arange(capacity)
    q_BTKGH = normal(0, batch, tokens, kv_heads, group, head_dim)
    written_BS = places_S < starts_B[:, None] + tokens
    caches = [normal(seed, batch, kv_heads, capacity, head_dim) for seed in (1, 2)]
    keys_BKSH, values_BKSH = (
        np.where(written_BS[:, None, :, None], x, np.float32(1e4)) for x in caches
    )  # stale beyond
    mask_BTS = causal_mask(jnp.asarray(starts_B[:, None] + np.arange(tokens)), jnp.asarray(places_S), window)
    mixed = jax.jit(partial(prefill_attention, window=window, interpret=True))
    expected = jax.jit(attention)(q_BTKGH, keys_BKSH, values_BKSH, mask_BTS)
    assert largest_difference(mixed(q_BTKGH, keys_BKSH, values_BKSH, starts_B), expected) < 1e-5


def test_padding_that_sees_no_key_is_no_nan() -> None:
    cached = normal(1, 2, 1, 16, 16)
    mixed = jax.jit(partial(prefill_attention, window=4, interpret=True))
    out = np.asarray(mixed(normal(0, 2, 16, 1, 1, 16), cached, cached, jnp.array([12, 100])))
    assert np.isfinite(out).all()
    assert np.abs(out[0, :7]).min() > 0  # positions up to 18 see the last place, 15
    assert np.abs(out[1]).max() == 0  # no block of keys is near enough to be read


def test_narrow_scores_stay_closer_to_float32_than_the_plain_version_s() -> None:
    narrow = [normal(0, 1, 40, 1, 3, 64, dtype="bfloat16")]
    narrow += [normal(seed, 1, 1, 100, 64, dtype="bfloat16") for seed in (1, 2)]
    wide = [jnp.asarray(np.asarray(x).astype(np.float32)) for x in narrow]
    mask_BTS = jnp.asarray(30 + np.arange(40)[None, :, None] >= np.arange(100))
    exact, plain = (jax.jit(attention)(*arrays, mask_BTS) for arrays in (wide, narrow))
    mixed = jax.jit(partial(prefill_attention, window=None, interpret=True))(*narrow, jnp.array([30]))
    assert mixed.dtype == plain.dtype == jnp.bfloat16
    error, plain_error = (np.abs(np.asarray(x).astype(np.float32) - np.asarray(exact)).max() for x in (mixed, plain))
    assert 0 < error < plain_error


# What they take.


@pytest.mark.parametrize(
    ("dtypes", "head_dim", "turns", "attends"),
    [
        (("bfloat16", "bfloat16"), 128, True, True),
        (("float16", "float16"), 64, True, True),
        (("bfloat16", "float8_e4m3fn"), 128, False, False),
        (("float32", "float32"), 128, False, False),
        (("bfloat16", "bfloat16"), 80, False, False),
        (("bfloat16", "bfloat16"), 256, True, False),
        (("bfloat16", "bfloat16"), 8, False, False),
    ],
)
def test_kernels_take_one_narrow_dtype_and_heads_of_powers_of_two(
    dtypes: tuple[str, str], head_dim: int, turns: bool, attends: bool
) -> None:
    own, cached = (jnp.dtype(name) for name in dtypes)
    cache: Any = jax.ShapeDtypeStruct((1, 2, 16, head_dim), cached)
    qkv: Any = jax.ShapeDtypeStruct((1, 16, 2, 5, head_dim), own)
    q: Any = jax.ShapeDtypeStruct((1, 16, 2, 3, head_dim), own)
    assert rope_kernel.fits(qkv, cache, cache) is turns
    assert attention_kernel.fits(q, cache, cache) is attends
