"""Ledger rows on the arithmetic of norms, RoPE, projections and the MLP, checked on the model's own functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ledger_models import QWEN25_7B, Case
from ledger_tiny import (
    QWEN2,
    QWEN3,
    Array,
    apply_down,
    block_of,
    close,
    first_layer,
    gap,
    laid,
    matmul,
    normal,
    read,
    residual_stream,
)

from qwenjax.layers import apply_rope, contract, rms_norm, rope_tables, swiglu
from qwenjax.weights import param_shapes

EXAMPLE_A, EXAMPLE_B = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0, 8.0], [9.0, 10.0], [11.0, 12.0]]
EXAMPLE = [1.0, 0.0, -1.0, 0.5]
FLOAT32 = {"S002-016", "S002-017", "S002-018", "S002-033"}  # norms and angles are float32 by contract


def key_projection_shape() -> list[int]:
    x, table = jax.ShapeDtypeStruct((1, 3, 3584), jnp.bfloat16), jax.ShapeDtypeStruct((1, 3, 64), jnp.bfloat16)
    layer = param_shapes(QWEN25_7B)["layers"][0]
    _, k_BTKH, _ = jax.eval_shape(lambda p, h, t: block_of(QWEN25_7B, p).project(h, (t, t)), layer, x, table)
    return [*k_BTKH.shape[:2], k_BTKH.shape[2] * k_BTKH.shape[3]]


def flattening_is_batching() -> bool:
    x, w = normal(2, 3, 5), normal(5, 4)
    flat = apply_down(x.reshape(1, 6, 5), w)
    return gap(flat.reshape(2, 3, 4), apply_down(x, w)) < 1e-6


def heads_are_slices() -> bool:
    """The joined projection gives each head what its own columns give."""
    h, leaf = residual_stream(QWEN2), first_layer(QWEN2)["qkv_proj"]
    whole, w_DKJH = contract("qkv_proj", h, leaf), read("qkv_proj", "DKJH", leaf)
    pieces = [matmul(h[0], w_DKJH[:, k, j]) for k in range(2) for j in range(5)]
    return close(whole[0].reshape(7, 10, 8), jnp.stack(pieces, axis=1))


def merged_equals_separate() -> bool:
    leaf, h = first_layer(QWEN2)["gate_up_proj"], residual_stream(QWEN2)
    gate_up, w_CDF = contract("gate_up_proj", h, leaf), read("gate_up_proj", "CDF", leaf)
    apart = [matmul(h[0], w_CDF[c]) for c in (0, 1)]
    return heads_are_slices() and close(gate_up[0], jnp.stack(apart, axis=1))


def shards_sum_to_the_whole() -> bool:
    h, w = normal(1, 5, 12), normal(12, 7)
    parts = [apply_down(h[..., cut], w[cut]) for cut in (slice(0, 4), slice(4, 12))]
    return close(sum(parts), apply_down(h, w))


def turned(x_BTNH: Array, positions: list[int], theta: float = 1e4) -> Array:
    return apply_rope(x_BTNH, *rope_tables(jnp.asarray([positions]), x_BTNH.shape[-1], theta, None, x_BTNH.dtype))


def layouts_are_conjugate() -> bool:
    """Adjacent pairs are the half-split layout after a permutation of channels, and differ without it."""
    x, evens_then_odds = normal(1, 5, 2, 8), np.array([0, 2, 4, 6, 1, 3, 5, 7])
    cos, sin = rope_tables(jnp.arange(5)[None], 8, 1e4, None, x.dtype)
    first, second, cos, sin = x[..., 0::2], x[..., 1::2], cos[:, :, None], sin[:, :, None]
    adjacent = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    half = turned(x[..., evens_then_odds], list(range(5)))
    return close(half, adjacent[..., evens_then_odds]) and not close(turned(x, list(range(5))), adjacent)


def rope_is_relative() -> bool:
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=4)
    here, there, nearer = (jnp.sum(turned(q, [p]) * turned(k, [s])) for p, s in ((5, 2), (12, 9), (5, 3)))
    return close(here, there, 1e-5) and not close(here, nearer, 1e-3)


def rope_keeps_length() -> bool:
    x = normal(1, 9, 2, 8)
    return close(jnp.linalg.norm(turned(x, list(range(9))), axis=-1), jnp.linalg.norm(x, axis=-1))


def rotation_matrix() -> list[list[float]]:
    """Images of the two unit vectors at position 1 with one frequency of 1, as columns."""
    units = jnp.eye(2)[:, None, None, :]
    columns = [turned(units[i : i + 1], [1]).reshape(2) for i in (0, 1)]
    return [[float(column[i]) for column in columns] for i in (0, 1)]


def silu_on_the_gate() -> bool:
    gate, up = normal(4, 6), normal(4, 6, seed=4)
    both = jnp.stack([gate, up], axis=-2)
    return close(swiglu(both), jax.nn.silu(gate) * up) and not close(swiglu(both[:, ::-1]), swiglu(both))


def expert_with_silu_on_up() -> bool:
    """Seed 001's expert, SiLU on the up branch: false means the model does not compute that."""
    gate, up = normal(4, 6), normal(4, 6, seed=4)
    return close(swiglu(jnp.stack([gate, up], axis=-2)), jax.nn.silu(up) * gate)


def silu(z: Array) -> Array:
    """The activation alone: SwiGLU with an up branch of ones."""
    return swiglu(jnp.stack([z, jnp.ones_like(z)], axis=-2))


def silu_values() -> list[float]:
    with jax.enable_x64(True):
        return [float(value) for value in silu(jnp.asarray([-1.0, 0.0, 1.0, 2.0], jnp.float64))]


def swiglu_is_quadratic() -> bool:
    both = jnp.full((2, 3), 30.0)
    small = jnp.stack([normal(3), normal(3, seed=4)])
    return close(swiglu(2 * both) / swiglu(both), jnp.full(3, 4.0)) and not close(swiglu(2 * small), 2 * swiglu(small))


def gate_is_its_own_projection() -> bool:
    """What the gate lets through depends on the token through its own matrix, not on the up branch."""
    leaf, h = first_layer(QWEN2)["gate_up_proj"], residual_stream(QWEN2)
    other = laid("gate_up_proj", "CDF", read("gate_up_proj", "CDF", leaf).at[1].set(normal(40, 56)))
    one, two = contract("gate_up_proj", h, leaf), contract("gate_up_proj", h, other)
    through = [swiglu(x) / x[..., 1, :] for x in (one, two)]
    up_changes, token_matters = gap(one[..., 1, :], two[..., 1, :]), gap(through[0][:, 0], through[0][:, 1])
    return close(through[0], through[1], 1e-4) and min(up_changes, token_matters) > 0.1


def silu_gradient() -> bool:
    slope = jax.vmap(jax.grad(lambda z: silu(z[None])[0]))
    negative = jnp.linspace(-6.0, -0.01, 400)
    stationary = slope(jnp.asarray([-1.27846]))
    away = negative[jnp.abs(negative + 1.27846) > 0.02]
    return bool(jnp.all(slope(away) != 0)) and abs(float(stationary[0])) < 1e-4


def silu_range() -> bool:
    values = silu(jnp.linspace(-8.0, 8.0, 4001))
    return abs(float(jnp.min(values)) + 0.278465) < 1e-5 and float(jnp.max(values)) > 1


def mlp_is_per_position() -> bool:
    block, h = block_of(QWEN3, first_layer(QWEN3)), residual_stream(QWEN3)
    order = np.array([4, 2, 6, 0, 1, 5, 3])
    return close(block.mlp(h[:, order]), block.mlp(h)[:, order])


def norm_keeps_the_mean_and_forgets_the_scale() -> bool:
    x = jnp.asarray([1.0, 0.0, -1.0, 0.5])
    out = rms_norm(x, jnp.ones(4), 0.0)
    return abs(float(jnp.mean(out))) > 0.1 and close(rms_norm(8 * x, jnp.ones(4), 0.0), out)


def norm_does_not_commute_with_projection() -> bool:
    """Norming the stream is not norming its projection: dropping QK-norm changes the layer all the same."""
    h, w = normal(1, 5, 12), normal(12, 7)
    before = apply_down(rms_norm(h, jnp.ones(12), 1e-6), w)
    after = rms_norm(apply_down(h, w), jnp.ones(7), 1e-6)
    return not close(before, after, 1e-2)


def example_norm(eps: float) -> list[float]:
    """RMSNorm of the worked example."""
    return [float(value) for value in rms_norm(jnp.asarray(EXAMPLE), jnp.ones(4), eps)]


def squares() -> list[float]:
    mean = 1 / example_norm(0.0)[0] ** 2
    return [4 * mean, mean]


def norm_definition() -> bool:
    """eps is inside the root, the mean is over features only, and positions don't mix."""
    x, weight, eps = normal(1, 3, 5), normal(5, seed=4), 0.5
    out = rms_norm(x, weight, eps)
    by_hand = np.asarray(weight) * np.asarray(x) / np.sqrt(np.mean(np.asarray(x) ** 2, axis=-1, keepdims=True) + eps)
    return close(out, by_hand) and gap(rms_norm(x.at[0, 1].add(1.0), weight, eps)[0, 0], out[0, 0]) == 0


def norm_falls_short_of_one() -> bool:
    out = rms_norm(jnp.asarray(EXAMPLE), jnp.ones(4), 0.01)
    return close(jnp.mean(out**2), jnp.asarray(0.5625 / 0.5725)) and float(jnp.mean(out**2)) < 1


def norm_in_float32() -> bool:
    """bfloat16 in and out, one rounding before the scale: the float32 norm rounded, then the scale's product
    rounded.
    """
    x, weight = normal(64, 40).astype(jnp.bfloat16), (1 + 0.1 * normal(40, seed=4)).astype(jnp.bfloat16)
    exact = rms_norm(x.astype(jnp.float32), jnp.ones(40), 1e-6).astype(jnp.bfloat16)
    late = (rms_norm(x.astype(jnp.float32), weight.astype(jnp.float32), 1e-6)).astype(jnp.bfloat16)
    out = rms_norm(x, weight, 1e-6)
    return out.dtype == jnp.bfloat16 and bool(jnp.all(out == weight * exact)) and not bool(jnp.all(out == late))


CASES: dict[str, Case] = {
    "S000-009": key_projection_shape,
    "S000-011": flattening_is_batching,
    "S000-025": lambda: matmul(EXAMPLE_A, EXAMPLE_B).tolist(),
    "S000-026": lambda: [
        [float(matmul([[a]], [[b]])[0, 0]) for a, b in zip(row, column, strict=True)]
        for row in EXAMPLE_A
        for column in zip(*EXAMPLE_B, strict=True)
    ],
    "S000-069": heads_are_slices,
    "S000-078": layouts_are_conjugate,
    "S000-079": rope_is_relative,
    "S000-080": rope_keeps_length,
    "S000-115": silu_on_the_gate,
    "S000-116": silu_values,
    "S000-117": swiglu_is_quadratic,
    "S000-118": gate_is_its_own_projection,
    "S000-119": silu_gradient,
    "S001-017": norm_keeps_the_mean_and_forgets_the_scale,
    "S001-031": expert_with_silu_on_up,
    "S002-015": norm_definition,
    "S002-016": squares,
    "S002-017": lambda: 1 / example_norm(1e-6)[0],
    "S002-018": lambda: example_norm(1e-6),
    "S002-019": norm_keeps_the_mean_and_forgets_the_scale,
    "S002-020": norm_falls_short_of_one,
    "S002-021": norm_in_float32,
    "S002-033": rotation_matrix,
    "S002-036": rope_is_relative,
    "S002-053": silu_on_the_gate,
    "S002-054": silu_range,
    "S002-055": mlp_is_per_position,
    "S002-071": merged_equals_separate,
    "S002-072": shards_sum_to_the_whole,
    "S002-083": norm_does_not_commute_with_projection,
    "S002-085": norm_keeps_the_mean_and_forgets_the_scale,
}
