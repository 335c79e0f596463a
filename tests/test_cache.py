"""The KV cache: what a step writes, what it leaves, and what it never reads."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qwenjax.cache import KVCache, append, cache_shapes, fill, init_cache, rounded
from qwenjax.errors import InputError
from qwenjax.model import decode_step, extend, forward, prefill

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CONFIGS = {
    "qwen2": tiny.config("qwen2", num_hidden_layers=2),
    "windowed": tiny.config("qwen3", num_hidden_layers=2, **WINDOWED),
}
LENGTHS = np.array([9, 4])
CAPACITY = 14


def filled(name: str) -> tuple[Any, Any, KVCache]:
    config = CONFIGS[name]
    params = tiny.params(config)
    empty = init_cache(config, 2, CAPACITY, "float32")
    _, cache = prefill(config, params, tiny.tokens(name, 2, 9), jnp.asarray(LENGTHS), empty)
    return config, params, cache


def as_numpy(cache: KVCache) -> list[np.ndarray[Any, Any]]:
    return [np.array(leaf) for leaf in (*cache.keys, *cache.values)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_empty_cache_has_the_announced_shapes(dtype: str) -> None:
    config = CONFIGS["qwen2"]
    cache, shapes = init_cache(config, 2, CAPACITY, dtype), cache_shapes(config, 2, CAPACITY, dtype)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), cache) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), shapes
    )
    assert [leaf.shape for leaf in (*cache.keys, *cache.values)] == [(2, 3, CAPACITY, 16)] * 4
    assert (cache.capacity, cache.lengths.tolist(), cache.lengths.dtype) == (CAPACITY, [0, 0], jnp.int32)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_writes_one_position_a_row_and_keeps_the_others(name: str) -> None:
    config, params, cache = filled(name)
    np.testing.assert_array_equal(cache.lengths, LENGTHS)
    for step in range(3):
        before = as_numpy(cache)
        _, cache = decode_step(config, params, tiny.tokens(f"{step}", 2), cache)
        np.testing.assert_array_equal(cache.lengths, LENGTHS + step + 1)
        for old_BKSH, new_BKSH in zip(before, as_numpy(cache), strict=True):
            changed_BS = np.any(old_BKSH != new_BKSH, axis=(1, 3))
            np.testing.assert_array_equal(changed_BS, np.arange(CAPACITY) == (LENGTHS + step)[:, None])


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_beyond_a_rows_length_matters(name: str) -> None:
    config, params, cache = filled(name)
    beyond = np.arange(CAPACITY) >= LENGTHS[:, None]

    def spoilt(leaf: jax.Array) -> jax.Array:
        return jnp.where(beyond[:, None, :, None], 1e30, leaf)

    loud = KVCache(tuple(map(spoilt, cache.keys)), tuple(map(spoilt, cache.values)), cache.lengths + 0)
    tokens = tiny.tokens("beyond", 3, 2)
    for step in range(3):
        quiet_logits, cache = decode_step(config, params, tokens[step], cache)
        loud_logits, loud = decode_step(config, params, tokens[step], loud)
        np.testing.assert_array_equal(loud_logits, quiet_logits)


def test_what_lies_within_a_rows_length_matters() -> None:
    config, params, cache = filled("qwen2")
    values = tuple(leaf.at[1, 0, 2].add(1.0) for leaf in cache.values)
    changed = KVCache(tuple(leaf + 0 for leaf in cache.keys), values, cache.lengths + 0)
    logits, _ = decode_step(config, params, tiny.tokens("within", 2), cache)
    changed_logits, _ = decode_step(config, params, tiny.tokens("within", 2), changed)
    np.testing.assert_array_equal(changed_logits[0], logits[0])
    assert np.abs(changed_logits[1] - logits[1]).max() > 1e-3


def test_a_window_hides_what_is_older() -> None:
    """With every layer windowed by 5, a step at position 9 reads positions 5 to 9."""
    config = tiny.config("qwen3", **(WINDOWED | {"max_window_layers": 0}))
    params, logits = tiny.params(config), []
    for spoilt in (None, 4, 5):
        _, cache = prefill(
            config, params, tiny.tokens("w", 1, 9), jnp.array([9]), init_cache(config, 1, CAPACITY, "float32")
        )
        if spoilt is not None:
            cache = cache.replace(values=tuple(leaf.at[:, :, spoilt].add(1.0) for leaf in cache.values))
        logits.append(np.asarray(decode_step(config, params, jnp.array([1]), cache)[0]))
    np.testing.assert_array_equal(logits[1], logits[0])
    assert np.abs(logits[2] - logits[0]).max() > 1e-3


def test_the_cache_argument_is_donated() -> None:
    config, params, cache = filled("qwen2")
    empty = init_cache(config, 2, CAPACITY, "float32")
    prefill(config, params, tiny.tokens("d", 2, 9), jnp.asarray(LENGTHS), empty)
    decode_step(config, params, tiny.tokens("d", 2), cache)
    for used in (empty, cache):
        assert all(leaf.is_deleted() for leaf in (*used.keys, *used.values))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


def test_append_writes_after_each_rows_last_and_leaves_a_full_row() -> None:
    cached_BKSH = jnp.asarray(tiny.uniform("cached", (3, 2, 4, 6)))
    new_BTKH = jnp.asarray(tiny.uniform("new", (3, 1, 2, 6)))
    expected = np.array(cached_BKSH)
    expected[0, :, 1], expected[1, :, 3] = new_BTKH[0, 0], new_BTKH[1, 0]
    np.testing.assert_array_equal(append(cached_BKSH, new_BTKH, jnp.array([1, 3, 4])), expected)


def test_append_writes_several_and_drops_what_has_no_place() -> None:
    cached_BKSH = jnp.asarray(tiny.uniform("cached", (3, 2, 6, 4)))
    new_BTKH = jnp.asarray(tiny.uniform("new", (3, 3, 2, 4)))
    expected = np.array(cached_BKSH)
    for row, length in enumerate((0, 2, 5)):
        for t in range(min(3, 6 - length)):
            expected[row, :, length + t] = new_BTKH[row, t]
    np.testing.assert_array_equal(append(cached_BKSH, new_BTKH, jnp.array([0, 2, 5])), expected)


def test_fill_writes_from_position_zero() -> None:
    cached_BKSH, new_BKTH = jnp.full((2, 3, 5, 4), 7.0), jnp.asarray(tiny.uniform("prompt", (2, 3, 2, 4)))
    result = fill(cached_BKSH, new_BKTH)
    np.testing.assert_array_equal(result[:, :, :2], new_BKTH)
    np.testing.assert_array_equal(result[:, :, 2:], 7.0)


# A dtype of its own


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_narrower_cache_holds_the_rounded_vectors(name: str, dtype: str) -> None:
    """The first layer's keys and values don't depend on the cache: they are those of float32, rounded once."""
    config, params, wide = filled(name)
    empty = init_cache(config, 2, CAPACITY, dtype)
    _, narrow = prefill(config, params, tiny.tokens(name, 2, 9), jnp.asarray(LENGTHS), empty)
    for _ in range(2):
        for ours, theirs in ((narrow.keys[0], wide.keys[0]), (narrow.values[0], wide.values[0])):
            assert ours.dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(ours.astype(np.float32), theirs.astype(dtype).astype(np.float32))
        _, narrow = decode_step(config, params, tiny.tokens("step", 2), narrow)
        _, wide = decode_step(config, params, tiny.tokens("step", 2), wide)


@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.03), ("float8_e4m3fn", 0.3)])
@pytest.mark.parametrize("params_dtype", ["float32", "bfloat16"])
def test_logits_with_a_narrower_cache_are_near_those_without(dtype: str, error: float, params_dtype: str) -> None:
    config = CONFIGS["windowed"]
    params, tokens = tiny.params(config, params_dtype), tiny.tokens("narrow", 2, 10)
    whole = np.asarray(forward(config, params, tokens), np.float32)
    lengths, cache = jnp.array([9, 9]), init_cache(config, 2, CAPACITY, dtype)
    first, cache = prefill(config, params, tokens[:, :9], lengths, cache)
    second, cache = decode_step(config, params, tokens[:, 9], cache)
    assert first.dtype == second.dtype == jnp.dtype(params_dtype)
    for found, position in ((first, 8), (second, 9)):
        difference = np.abs(np.asarray(found, np.float32) - whole[:, position]).max() / whole.std()
        assert difference < error
        assert difference > 0


def test_pieces_equal_the_whole_with_a_narrower_cache() -> None:
    config, tokens = CONFIGS["qwen2"], tiny.tokens("pieces", 2, 8)
    params, counts = tiny.params(config), jnp.array([4, 4])
    whole, _ = prefill(config, params, tokens, 2 * counts, init_cache(config, 2, CAPACITY, "float8_e4m3fn"))
    _, cache = prefill(config, params, tokens[:, :4], counts, init_cache(config, 2, CAPACITY, "float8_e4m3fn"))
    parts, _ = extend(config, params, tokens[:, 4:], counts, cache)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=2e-5)


def test_what_a_narrower_dtype_cannot_hold_becomes_its_greatest_value() -> None:
    values = jnp.array([1e9, -1e9, 449.0, 0.3, jnp.nan], jnp.float32)
    found = np.asarray(rounded(values, "float8_e4m3fn"), np.float32)
    np.testing.assert_array_equal(found, np.array([448, -448, 448, 0.3125, np.nan], np.float32))
    assert np.isfinite(np.asarray(rounded(jnp.array([3e38], jnp.float32), "float16"), np.float32)).all()
    wide = jnp.array([1.0], jnp.bfloat16)
    assert rounded(wide, "float32").dtype == jnp.float32
    assert rounded(wide, "bfloat16") is wide


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "float64", "float4_e2m1fn"])
def test_other_dtypes_of_a_cache_are_refused(dtype: str) -> None:
    with pytest.raises(InputError) as caught:
        init_cache(CONFIGS["qwen2"], 1, 4, dtype)
    assert str(caught.value) == (
        f"dtype = {dtype!r}: is no dtype of keys and values. "
        "Known: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2."
    )


# Full rows


def test_a_full_row_stays_full_and_changes_no_other() -> None:
    """Row 0 is full after five steps; four more leave it as it is, and row 1 goes on as if alone."""
    config, params, cache = filled("windowed")
    _, _, alone = filled("windowed")
    alone = KVCache(*(tuple(leaf[1:] for leaf in part) for part in (alone.keys, alone.values)), alone.lengths[1:])
    tokens = tiny.tokens("full", 9, 2)
    for step in range(9):
        before = as_numpy(cache)
        logits, cache = decode_step(config, params, tokens[step], cache)
        expected, alone = decode_step(config, params, tokens[step, 1:], alone)
        assert cache.lengths.tolist() == [min(9 + step + 1, CAPACITY), 4 + step + 1]
        np.testing.assert_allclose(logits[1], expected[0], rtol=0, atol=2e-5)
        for old, new, own in zip(before, as_numpy(cache), as_numpy(alone), strict=True):
            np.testing.assert_array_equal(new[0, :, : min(9 + step, CAPACITY)], old[0, :, : min(9 + step, CAPACITY)])
            np.testing.assert_allclose(new[1], own[0], rtol=0, atol=2e-5)


def test_pieces_fill_a_row_up_to_its_capacity() -> None:
    config, params, cache = filled("qwen2")
    before = as_numpy(cache)
    _, cache = extend(config, params, tiny.tokens("more", 2, 7), jnp.array([7, 7]), cache)
    assert cache.lengths.tolist() == [CAPACITY, 11]
    for old, new in zip(before, as_numpy(cache), strict=True):
        np.testing.assert_array_equal(new[0, :, :9], old[0, :, :9])
        np.testing.assert_array_equal(new[1, :, :4], old[1, :, :4])


@pytest.mark.parametrize(
    ("batch", "capacity", "problem"),
    [(2, 8, "holds 8 tokens, and the prompts have 9"), (3, 9, "holds 3 rows, and the prompts have 2")],
)
def test_a_cache_that_does_not_fit_its_prompts_is_refused(batch: int, capacity: int, problem: str) -> None:
    config = CONFIGS["qwen2"]
    cache = init_cache(config, batch, capacity, "float32")
    with pytest.raises(InputError) as caught:
        prefill(config, tiny.params(config), tiny.tokens("short", 2, 9), jnp.asarray(LENGTHS), cache)
    assert str(caught.value) == f"cache: {problem}, padding included. Make one with init_cache that fits them."
