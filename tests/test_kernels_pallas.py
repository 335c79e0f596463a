"""The kernels for GPUs, in Pallas's interpreter, against the plain functions that they stand in for."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from qwenjax.cache import append, init_cache
from qwenjax.errors import InputError
from qwenjax.kernels import choice, decode_attention, norm, product
from qwenjax.kernels.choice import NAMES, NO_KERNELS, Kernels
from qwenjax.layers import apply_rope, attention, causal_mask, rms_norm, rope_tables, swiglu
from qwenjax.model import decode_step, extend, prefill

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)])
BY_INTERPRETER = Kernels(interpret=True)


def normal(seed: int, *sizes: int, dtype: Any = jnp.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(sizes), dtype)


def close(actual: Any, expected: Any, tolerance: float) -> None:
    """Within a tolerance of the greatest expected value."""
    wide = np.asarray(expected, np.float32)
    np.testing.assert_allclose(np.asarray(actual, np.float32), wide, rtol=0, atol=tolerance * np.abs(wide).max())


@DTYPES
@pytest.mark.parametrize("channels", [64, 200])
def test_residual_and_norm(dtype: Any, tolerance: float, channels: int) -> None:
    x, delta, weight = (
        normal(1, 3, channels, dtype=dtype),
        normal(2, 3, channels, dtype=dtype),
        normal(3, channels, dtype=dtype),
    )
    total, normed = norm.add_norm(x, delta, weight, eps=1e-6, interpret=True)
    close(total, x + delta, tolerance)
    close(normed, rms_norm(x + delta, weight, 1e-6), tolerance)
    close(norm.norm(x, weight, eps=1e-6, interpret=True), rms_norm(x, weight, 1e-6), tolerance)


@DTYPES
@pytest.mark.parametrize("rows", [1, 20])
def test_products_of_few_rows(dtype: Any, tolerance: float, rows: int) -> None:
    """72 columns are no multiple of a program's 16."""
    x, weight = normal(1, rows, 256, dtype=dtype), normal(2, 2, 72, 256, dtype=dtype)
    close(product.product(x, weight[0], interpret=True), x @ weight[0].T, tolerance)
    expected = swiglu(jnp.einsum("md,cfd->mcf", x, weight))
    close(product.gated(x, weight, interpret=True), expected, tolerance)


def plain_attention(
    qkv: Any, cos: Any, sin: Any, lengths: Any, keys: Any, values: Any, *weights: Any, window: Any, eps: Any
) -> Any:
    q, k, v = qkv[:, None, :, :-2], qkv[:, None, :, -2], qkv[:, None, :, -1]
    if weights:
        q, k = rms_norm(q, weights[0], eps), rms_norm(k, weights[1], eps)
    batch, tokens, kv_heads, group, head_dim = q.shape
    flat = apply_rope(q.reshape(batch, tokens, kv_heads * group, head_dim), cos[:, None], sin[:, None])
    k = apply_rope(k, cos[:, None], sin[:, None])
    keys, values = append(keys, k, lengths), append(values, v, lengths)
    mask = causal_mask(lengths[:, None], jnp.arange(keys.shape[2]), window)
    return attention(flat.reshape(q.shape), keys, values, mask)[:, 0], keys, values


@DTYPES
@pytest.mark.parametrize(
    ("batch", "kv_heads", "group", "head_dim", "capacity", "window", "eps"),
    [
        (3, 2, 7, 64, 200, None, None),  # heads that are no power of two, positions that are no whole blocks
        (3, 1, 4, 32, 130, 50, 1e-6),  # a window that begins inside a block, and norms
        (40, 4, 2, 32, 70, None, 1e-6),  # enough rows that none is cut into parts
        (2, 2, 20, 32, 64, 1, None),  # each token sees itself alone
    ],
)
def test_a_token_of_each_row_against_its_cache(
    dtype: Any, tolerance: float, batch: int, kv_heads: int, group: int, head_dim: int, capacity: int, window: Any,
    eps: Any,
) -> None:  # fmt: skip
    """An empty row, a row with one place left, and where there is a third a full one, whose cache stays."""
    lengths = jnp.asarray(np.random.default_rng(0).integers(1, capacity, batch), jnp.int32)
    lengths = lengths.at[0].set(0).at[1].set(capacity - 1).at[2:3].set(capacity)
    cos, sin = rope_tables(lengths[:, None], head_dim, 1e4, None, dtype)
    cached = [normal(seed, batch, kv_heads, capacity, head_dim, dtype=dtype) for seed in (1, 2)]
    weights = [normal(seed, head_dim, dtype=dtype) for seed in (3, 4)] if eps else []
    qkv = normal(5, batch, kv_heads, group + 2, head_dim, dtype=dtype)
    arguments = qkv, cos[:, 0], sin[:, 0], lengths, *cached, *weights
    options = {"window": window, "eps": eps}
    actual = jax.jit(partial(decode_attention.decode_attention, **options, interpret=True))(*arguments)
    expected = jax.jit(partial(plain_attention, **options))(*arguments)
    roomy = np.asarray(lengths < capacity)
    for ours, theirs in zip(actual, expected, strict=True):
        close(ours[roomy], theirs[roomy], tolerance)
    for ours, before in zip(actual[1:], cached, strict=True):
        np.testing.assert_array_equal(ours[~roomy], before[~roomy])


@pytest.mark.parametrize(
    ("batch", "kv_heads", "capacity", "parts"), [(1, 4, 2048, 32), (1, 8, 2048, 16), (32, 4, 2048, 1), (1, 4, 100, 2)]
)
def test_rows_are_cut_until_they_fill_a_gpu(batch: int, kv_heads: int, capacity: int, parts: int) -> None:
    assert decode_attention.num_parts(batch, kv_heads, capacity) == parts


# Whole steps

WIDE = {"hidden_size": 128, "head_dim": 32, "num_hidden_layers": 2}
CONFIGS = {
    "qwen2": tiny.config("qwen2", **WIDE),
    "windowed": tiny.config("qwen3", **WIDE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "experts": tiny.moe_config(**WIDE, num_experts=4, num_experts_per_tok=4),  # no rounding can change the choice
}


def steps(config: Any, kernels: Kernels | None) -> list[Any]:
    """Logits of a prompt, of a piece after it and of two more tokens, in bfloat16, and what the cache then holds."""
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params(config))
    lengths, cache = jnp.asarray([9, 4, 6]), init_cache(config, 3, 24, "bfloat16")
    outputs = []
    logits, cache = prefill(config, params, tiny.tokens("prompt", 3, 9), lengths, cache, kernels=kernels)
    outputs.append(logits)
    counts = jnp.asarray([4, 3, 1])
    logits, cache = extend(config, params, tiny.tokens("piece", 3, 4), counts, cache, kernels=kernels)
    outputs.append(logits)
    for step in range(2):
        logits, cache = decode_step(config, params, tiny.tokens(f"step {step}", 3), cache, kernels=kernels)
        outputs.append(logits)
    seen = jnp.arange(24)[None, None, :, None] < cache.lengths[:, None, None, None]
    return [*outputs, *(jnp.where(seen, leaf, 0) for leaf in (*cache.keys, *cache.values)), cache.lengths]


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_with_kernels_are_the_plain_steps(name: str) -> None:
    config = CONFIGS[name]
    for ours, theirs in zip(steps(config, BY_INTERPRETER), steps(config, NO_KERNELS), strict=True):
        close(ours, theirs, 4e-2)


def called(config: Any, kernels: Kernels | None) -> set[str]:
    """Names of the kernels in a decode step's program."""
    params = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params(config)))
    cache = jax.eval_shape(lambda: init_cache(config, 4, 256, "bfloat16"))
    program = decode_step.trace(config, params, jax.ShapeDtypeStruct((4,), jnp.int32), cache, kernels=kernels)
    text = str(program.jaxpr)
    names = "rms_norm", "decode_attention", "combine_parts", "narrow_product", "narrow_gated"
    return {name for name in names if f"name={name}" in text}


@pytest.mark.parametrize(
    ("off", "gone"),
    [
        ((), set()),
        (("norm",), {"rms_norm"}),
        (("attention",), {"decode_attention", "combine_parts"}),
        (("product",), {"narrow_product", "narrow_gated"}),
    ],
)
def test_a_kernel_is_switched_off_by_name(
    monkeypatch: pytest.MonkeyPatch, off: tuple[str, ...], gone: set[str]
) -> None:
    monkeypatch.setenv(choice.VARIABLE, ",".join(off))
    kernels = choice.from_environment()
    everything = {"rms_norm", "decode_attention", "combine_parts", "narrow_product", "narrow_gated"}
    assert called(CONFIGS["qwen2"], kernels) == everything - gone


def test_without_a_gpu_no_kernel_is_traced() -> None:
    assert called(CONFIGS["qwen2"], None) == called(CONFIGS["qwen2"], NO_KERNELS) == set()


def test_lowered_for_a_cpu_the_plain_functions_run() -> None:
    """The choice is the platform's, not the process's: the same traced step runs here."""
    config = CONFIGS["qwen2"]
    for ours, theirs in zip(steps(config, Kernels()), steps(config, NO_KERNELS), strict=True):
        close(ours, theirs, 1e-2)


def test_the_variable_names_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choice.VARIABLE, "all")
    assert choice.from_environment() == NO_KERNELS
    monkeypatch.setenv(choice.VARIABLE, "norm, attention")
    assert choice.from_environment().off == {"norm", "attention"}
    monkeypatch.setenv(choice.VARIABLE, "norm,fast")
    with pytest.raises(InputError) as caught:
        choice.from_environment()
    assert str(caught.value) == (
        f"QWENJAX_KERNELS_OFF = 'norm,fast': names no kernel: fast. Known: all, {', '.join(NAMES)}."
    )
