"""The arithmetic of one layer against its definition in numpy, and its invariances."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.layers import (
    apply_rope,
    attention,
    causal_mask,
    contract,
    rms_norm,
    rope_frequencies,
    rope_tables,
    swiglu,
)
from qwenjax.ops import EINSUM, OPS
from qwenjax.rope_config import RopeScaling

B, T, S, K, G, H = 2, 5, 7, 3, 4, 16
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=32768)


def array(name: str, *shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(tiny.uniform(name, shape), dtype)


# Contractions


@pytest.mark.parametrize("op", [op.name for op in OPS if op.kind in ("matmul", "attention")])
def test_contract_is_the_einsum_of_the_inventory(op: str) -> None:
    sizes = dict(zip("BTUSDKJGHCFEV", (2, 5, 3, 7, 40, 3, 6, 4, 16, 2, 56, 9, 101), strict=True))
    x_letters, y_letters = EINSUM[op].split("->")[0].split(",")
    x, y = (array(f"{op} {letters}", *(sizes[letter] for letter in letters)) for letters in (x_letters, y_letters))
    expected = np.einsum(EINSUM[op], np.asarray(x, np.float64), np.asarray(y, np.float64))
    np.testing.assert_allclose(contract(op, x, y), expected, rtol=0, atol=2e-5)


# RMSNorm


def test_rms_norm_has_its_eps_inside_the_root() -> None:
    x, weight = jnp.full((1, 4), 1e-3, jnp.float32), jnp.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(rms_norm(x, weight, 1e-6)[0], 1e-3 / math.sqrt(1e-6 + 1e-6) * np.arange(1, 5), rtol=1e-6)
    np.testing.assert_array_equal(rms_norm(jnp.zeros((1, 4)), weight, 1e-6), 0)


def test_rms_norm_rounds_in_the_order_of_transformers() -> None:
    """Mean square and root in float32, one rounding to the model's dtype, then the weight in that dtype."""
    x, weight = array("x", 3, 1000, dtype="bfloat16"), array("norm", 1000, dtype="bfloat16")
    wide = np.asarray(x, np.float32)
    scaled = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(1e-6))
    cast_first = np.asarray(weight) * scaled.astype(ml_dtypes.bfloat16)
    cast_last = (np.asarray(weight, np.float32) * scaled).astype(ml_dtypes.bfloat16)
    result = rms_norm(x, weight, 1e-6)
    assert result.dtype == jnp.bfloat16
    assert np.mean(np.asarray(result) == cast_first) > 0.999  # the root may differ in its last bit
    assert np.mean(np.asarray(result) == cast_last) < 0.9


def test_rms_norm_reduces_in_float32() -> None:
    x = jnp.full((1, 2**14), 0.1, jnp.bfloat16)  # a bfloat16 sum of squares stops growing at 256 terms
    np.testing.assert_allclose(np.asarray(rms_norm(x, jnp.ones(2**14, jnp.bfloat16), 0.0), np.float32), 1.0, rtol=2**-8)


@given(scale=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rms_norm_ignores_the_scale_of_its_input(scale: float, seed: int) -> None:
    x, weight = array(f"rms {seed}", 2, 24), array("norm", 24)
    np.testing.assert_allclose(rms_norm(x * scale, weight, 0.0), rms_norm(x, weight, 0.0), rtol=2e-5, atol=1e-6)


# RoPE


def test_rope_frequencies_of_yarn_in_the_contract() -> None:
    frequencies, factor = rope_frequencies(16, 1e6, YARN)
    assert factor == pytest.approx(1.138629436, abs=1e-9)
    np.testing.assert_allclose(frequencies[3:6], [0.00421756, 0.0005, 0.00004446], atol=5e-9)
    np.testing.assert_array_equal(frequencies[:3], rope_frequencies(16, 1e6, None)[0][:3])
    np.testing.assert_allclose(frequencies[6:], rope_frequencies(16, 1e6, None)[0][6:] / 4, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.1 * math.log(4) + 1),
        ({"attention_factor": 0.8, "mscale": 0.7, "mscale_all_dim": 1.3}, 0.8),
        ({"mscale": 0.7, "mscale_all_dim": 1.3}, (0.07 * math.log(4) + 1) / (0.13 * math.log(4) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor_of_yarn(changes: dict[str, float], expected: float) -> None:
    scaling = RopeScaling("yarn", **{"factor": 4.0, "original_max_position_embeddings": 32768, **changes})
    assert rope_frequencies(16, 1e6, scaling)[1] == pytest.approx(expected, rel=1e-12)


@given(
    half=st.integers(1, 64),
    theta=st.floats(100, 1e7),
    factor=st.floats(1, 64),
    original=st.integers(16, 2**18),
    truncate=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_yarn_lies_between_plain_and_linear(
    half: int, theta: float, factor: float, original: int, truncate: bool
) -> None:
    plain, _ = rope_frequencies(2 * half, theta, None)
    linear, one = rope_frequencies(2 * half, theta, RopeScaling("linear", factor, original))
    yarn, _ = rope_frequencies(2 * half, theta, RopeScaling("yarn", factor, original, truncate=truncate))
    assert one == 1.0
    assert plain.dtype == linear.dtype == yarn.dtype == np.float32
    np.testing.assert_allclose(linear, plain / factor, rtol=3e-7)
    assert np.all(yarn <= plain * (1 + 1e-6))
    assert np.all(yarn >= linear * (1 - 1e-6))


@pytest.mark.parametrize("scaling", [None, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("position", [0, 1, 4095, 100000])
def test_bfloat16_tables_round_once(scaling: RopeScaling | None, position: int) -> None:
    """Frequencies and angles stay in float32: cast to bfloat16 they miss by 0.8 at position 4095."""
    frequencies, factor = rope_frequencies(128, 1e6, scaling)
    angles = (np.float32(position) * frequencies).astype(np.float64)  # the angle in float32, as transformers has it
    tables = rope_tables(jnp.asarray([[position]]), 128, 1e6, scaling, jnp.bfloat16)
    for table, exact in zip(tables, (np.cos(angles) * factor, np.sin(angles) * factor), strict=True):
        assert table.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(table, np.float64)[0, 0], exact, rtol=2**-8, atol=1e-7)


def test_rope_pairs_each_channel_with_the_one_half_a_head_further() -> None:
    x_BTNH, positions_BT = array("x", 1, 3, 2, 8), jnp.asarray([[0, 1, 50]])
    rotated = apply_rope(x_BTNH, *rope_tables(positions_BT, 8, 1e4, None, jnp.float32))
    pairs = np.asarray(x_BTNH[..., :4], np.float64) + 1j * np.asarray(x_BTNH[..., 4:], np.float64)
    angles = np.array([0, 1, 50])[:, None] * 1e4 ** (-np.arange(4) / 4)
    turned = pairs * np.exp(1j * angles)[None, :, None]
    np.testing.assert_allclose(rotated, np.concatenate([turned.real, turned.imag], -1), atol=1e-5)
    np.testing.assert_array_equal(rotated[:, 0], x_BTNH[:, 0])


@given(q_position=st.integers(0, 3000), k_position=st.integers(0, 3000), shift=st.integers(0, 3000))
@settings(max_examples=25, deadline=None)
def test_rope_products_depend_on_the_distance_alone(q_position: int, k_position: int, shift: int) -> None:
    q, k = array("q", 1, 1, 1, H), array("k", 1, 1, 1, H)

    def product(q_at: int, k_at: int) -> float:
        q_table, k_table = (rope_tables(jnp.asarray([[at]]), H, 1e4, None, jnp.float32) for at in (q_at, k_at))
        return float(jnp.vdot(apply_rope(q, *q_table), apply_rope(k, *k_table)))

    assert product(q_position + shift, k_position + shift) == pytest.approx(product(q_position, k_position), abs=4e-3)
    norm = jnp.linalg.norm(apply_rope(q, *rope_tables(jnp.asarray([[q_position]]), H, 1e4, None, jnp.float32)))
    assert float(norm) == pytest.approx(float(jnp.linalg.norm(q)), rel=1e-5)


# Mask and attention


@given(
    queries=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    keys=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 41),
)
@settings(max_examples=50, deadline=None)
def test_mask_keeps_the_past_within_the_window(queries: list[int], keys: list[int], window: int | None) -> None:
    mask_BTS = causal_mask(jnp.asarray([queries]), jnp.asarray(keys), window)
    expected = [[k <= q and (window is None or k > q - window) for k in keys] for q in queries]
    np.testing.assert_array_equal(mask_BTS[0], expected)


def _qkv(dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    return (
        array("q", B, T, K, G, H, dtype=dtype),
        array("k", B, K, S, H, dtype=dtype),
        array("v", B, K, S, H, dtype=dtype),
    )


CAUSAL_BTS = causal_mask(jnp.broadcast_to(jnp.arange(S - T, S), (B, T)), jnp.arange(S), None)


def naive_attention(q_BTKGH: Any, k_BKSH: Any, v_BKSH: Any, mask_BTS: Any) -> Any:
    """One head at a time, in float64: query head h reads KV head h // group."""
    q_BTNH = np.asarray(q_BTKGH, np.float64).reshape(B, T, K * G, H)
    out_BTNH = np.zeros_like(q_BTNH)
    for b in range(B):
        for t in range(T):
            for h in range(K * G):
                seen = np.asarray(mask_BTS[b, t])
                scores = np.asarray(k_BKSH, np.float64)[b, h // G, seen] @ q_BTNH[b, t, h] / np.sqrt(H)
                probs = np.exp(scores - scores.max())
                out_BTNH[b, t, h] = probs / probs.sum() @ np.asarray(v_BKSH, np.float64)[b, h // G, seen]
    return out_BTNH.reshape(B, T, K, G, H)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_is_grouped_and_masked(window: int | None) -> None:
    mask_BTS = causal_mask(jnp.broadcast_to(jnp.arange(S - T, S), (B, T)), jnp.arange(S), window)
    q, k, v = _qkv()
    np.testing.assert_allclose(attention(4 * q, k, v, mask_BTS), naive_attention(4 * q, k, v, mask_BTS), atol=1e-6)


def test_probabilities_sum_to_one() -> None:
    q, k, v = _qkv()
    np.testing.assert_allclose(attention(30 * q, k, jnp.ones_like(v), CAUSAL_BTS), 1.0, rtol=1e-6)


def test_what_is_masked_has_no_influence() -> None:
    q, k, v = _qkv()
    hidden_BKSH = ~CAUSAL_BTS[:, 1][:, None, :, None]  # what the second query may not see
    loud = attention(q, jnp.where(hidden_BKSH, 1e30, k), jnp.where(hidden_BKSH, 1e30, v), CAUSAL_BTS)
    plain = attention(q, k, v, CAUSAL_BTS)
    np.testing.assert_array_equal(loud[:, :2], plain[:, :2])
    assert np.all(np.asarray(loud[:, -1]) != np.asarray(plain[:, -1]))


def test_softmax_is_in_float32() -> None:
    """Rounded to bfloat16 once, at the end; done in bfloat16, most of the probabilities miss."""
    scores_S = (4 * array("scores", H)).astype(jnp.bfloat16)
    q = jnp.zeros((1, 1, 1, 1, H), jnp.bfloat16).at[..., 0].set(4)  # times H^-0.5: one
    k = jnp.zeros((1, 1, H, H), jnp.bfloat16).at[..., 0].set(scores_S)
    probs_S = attention(q, k, jnp.eye(H, dtype=jnp.bfloat16)[None, None], jnp.ones((1, 1, H), bool))[0, 0, 0, 0]
    powers = np.exp(np.asarray(scores_S, np.float64))
    assert probs_S.dtype == jnp.bfloat16
    np.testing.assert_array_equal(probs_S, (powers / powers.sum()).astype(ml_dtypes.bfloat16))
    assert np.sum(np.asarray(jax.nn.softmax(scores_S)) != np.asarray(probs_S)) > H // 3


def test_probabilities_are_rounded_before_they_weigh_values() -> None:
    """As transformers does: 1/3 in bfloat16 is 0.333984, and three of them exceed 1."""
    q, k = jnp.zeros((1, 1, 1, 1, 2), jnp.bfloat16), jnp.zeros((1, 1, 3, 2), jnp.bfloat16)
    v = jnp.asarray([192, 0, 0], jnp.bfloat16)[None, None, :, None] * jnp.ones(2, jnp.bfloat16)
    out = attention(q, k, v, jnp.ones((1, 1, 3), bool))
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.float32(ml_dtypes.bfloat16(192 * 0.333984375)))


# SwiGLU


def test_silu_is_on_the_gate_branch() -> None:
    gate, up = np.float64([0.0, 1.0, -2.0, 30.0]), np.float64([5.0, -2.0, 3.0, 0.5])
    result = swiglu(jnp.asarray(np.stack([gate, up]), jnp.float32))
    np.testing.assert_allclose(result, gate / (1 + np.exp(-gate)) * up, rtol=1e-6)
