"""Ledger rows on attention and the residual layer, checked on the model's own functions with tiny random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from ledger_models import Case
from ledger_tiny import (
    QWEN3,
    Array,
    block_of,
    close,
    first_layer,
    gap,
    laid,
    no_rotation,
    normal,
    read,
    residual_stream,
    run_block,
    without,
)

from qwenjax.layers import attention, contract, rms_norm, rope_tables
from qwenjax.weights import Params
from roofline import formulas as f


def layer_keeps_the_stream() -> bool:
    """Same shape out as in, and without its two output matrices a layer adds nothing."""
    x, layer = residual_stream(QWEN3), first_layer(QWEN3)
    y = run_block(QWEN3, layer, x)
    silent = run_block(QWEN3, without(layer, "o_proj", "down_proj"), x)
    return y.shape == x.shape and gap(y, x) > 0.1 and gap(silent, x) == 0


def norm_at_the_entrance() -> bool:
    """A branch sees a scaled stream as the same, and what it returns is added without another norm."""
    x, layer = residual_stream(QWEN3), without(first_layer(QWEN3), "down_proj")
    branch = run_block(QWEN3, layer, x) - x
    scaled = run_block(QWEN3, layer, 8 * x) - 8 * x
    doubled = run_block(QWEN3, {**layer, "o_proj": 2 * layer["o_proj"]}, x) - x
    return close(scaled, branch, 1e-4) and close(doubled, 2 * branch)


def projections_are_per_token() -> bool:
    """Perturbing one token changes no other token's projections, norm or MLP; reordering tokens reorders them."""
    x, layer = residual_stream(QWEN3), first_layer(QWEN3)
    block, no_turn = block_of(QWEN3, layer), no_rotation(QWEN3, 1, 7)

    def per_token(h: Array) -> list[Array]:
        return [*block.project(h, no_turn), block.mlp(h), rms_norm(h, layer["input_norm"], 1e-6)]

    moved = x.at[0, 3].add(1.0)
    kept, order = np.array([0, 1, 2, 4, 5, 6]), np.array([4, 2, 6, 0, 1, 5, 3])
    apart = [gap(a[:, kept], b[:, kept]) for a, b in zip(per_token(x), per_token(moved), strict=True)]
    reordered = [gap(a[:, order], b) for a, b in zip(per_token(x), per_token(x[:, order]), strict=True)]
    return max(apart) == 0 and max(reordered) < 1e-5


@cache
def qkv(group: int = 3, tokens: int = 6) -> tuple[Array, Array, Array, Array]:
    q, k, v = normal(1, tokens, 2, group, 8), normal(1, 2, tokens, 8, seed=4), normal(1, 2, tokens, 8, seed=6)
    return q, k, v, jnp.tril(jnp.ones((1, tokens, tokens), bool))


def grouped_heads_index_their_group() -> bool:
    """Attention over 2 KV heads equals attention over 6 repeated ones, and not over 6 tiled ones."""
    q, k, v, mask = qkv()
    grouped = attention(q, k, v, mask).reshape(1, 6, 6, 8)
    single = q.reshape(1, 6, 6, 1, 8)
    repeated = attention(single, jnp.repeat(k, 3, axis=1), jnp.repeat(v, 3, axis=1), mask).reshape(1, 6, 6, 8)
    tiled = attention(single, jnp.tile(k, (1, 3, 1, 1)), jnp.tile(v, (1, 3, 1, 1)), mask).reshape(1, 6, 6, 8)
    return close(repeated, grouped) and not close(tiled, grouped)


def residual_equations() -> bool:
    """R = X + Attention(norm1(X)) and Y = R + MLP(norm2(R)), each branch by the layer's own parts."""
    x, layer = residual_stream(QWEN3), first_layer(QWEN3)
    block = block_of(QWEN3, layer)
    tables = rope_tables(jnp.arange(7)[None], 8, QWEN3.rope_theta, None, x.dtype)
    q, k, v = block.project(rms_norm(x, layer["input_norm"], 1e-6), tables)
    mixed = attention(q, k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), jnp.tril(jnp.ones((1, 7, 7), bool)))
    r = x + contract("o_proj", mixed, layer["o_proj"])
    y = r + block.mlp(rms_norm(r, layer["post_norm"], 1e-6))
    return close(run_block(QWEN3, layer, x), y)


def skip_path_is_raw() -> bool:
    """The stream itself is added, not its norm, and the two norms have scales of their own."""
    x, layer = residual_stream(QWEN3), first_layer(QWEN3)
    branch = run_block(QWEN3, without(layer, "down_proj"), x) - x
    normed = rms_norm(x, layer["input_norm"], 1e-6)
    wrong = normed + branch
    other = {**layer, "post_norm": layer["input_norm"]}
    moved = gap(run_block(QWEN3, other, x), run_block(QWEN3, layer, x)) > 1e-2
    return gap(run_block(QWEN3, without(layer, "down_proj"), x), wrong) > 0.1 and moved


def splitting_makes_nothing() -> bool:
    h, layer = residual_stream(QWEN3), first_layer(QWEN3)
    parts = block_of(QWEN3, layer).project(h, no_rotation(QWEN3, 1, 7))
    return sum(part.size for part in parts) == contract("qkv_proj", h, layer["qkv_proj"]).size


def attention_branch(layer: Params) -> Array:
    x = residual_stream(QWEN3)
    return run_block(QWEN3, without(layer, "down_proj"), x) - x


def only_queries_and_keys_are_normed() -> bool:
    """Scaling W_V scales the branch; scaling W_Q and W_K does nothing but for eps."""
    layer = first_layer(QWEN3)
    w_JDKH = read("qkv_proj", "JDKH", layer["qkv_proj"])
    values = {**layer, "qkv_proj": laid("qkv_proj", "JDKH", w_JDKH.at[-1].multiply(3.0))}
    others = {**layer, "qkv_proj": laid("qkv_proj", "JDKH", w_JDKH.at[:-1].multiply(3.0))}
    plain = attention_branch(layer)
    return close(attention_branch(values), 3 * plain) and close(attention_branch(others), plain, 1e-4)


def qk_norm_matters() -> bool:
    layer, x = first_layer(QWEN3), residual_stream(QWEN3)
    bare = {name: leaf for name, leaf in layer.items() if name not in ("q_norm", "k_norm")}
    return gap(run_block(replace(QWEN3, model_type="qwen2"), bare, x), run_block(QWEN3, layer, x)) > 1e-2


def probabilities(q: Array, k: Array, mask: Array) -> Array:
    """What attention weighs each key by, [B, T, K, G, S], read off by attending unit vectors as wide as a head."""
    tokens, width = k.shape[2], q.shape[-1]
    assert tokens <= width
    units = jnp.broadcast_to(jnp.eye(tokens, width), k.shape)
    return attention(q, k, units, mask)[..., :tokens]


def future_is_masked() -> bool:
    q, k, _, mask = qkv()
    weights = np.asarray(probabilities(q, k, mask))
    return (
        all(np.all(weights[:, t, :, :, t + 1 :] == 0) for t in range(6))
        and float(weights.min(where=weights > 0, initial=1)) > 0
    )


def first_row_sees_itself() -> bool:
    q, k, _, mask = qkv()
    weights = probabilities(q, k, mask)
    return bool(jnp.all(weights[:, 0, :, :, 0] == 1)) and bool(jnp.all(jnp.isfinite(weights)))


def rows_sum_to_one() -> bool:
    q, k, _, mask = qkv()
    weights = probabilities(q, k, mask)
    return (
        close(jnp.sum(weights, axis=-1), jnp.ones((1, 6, 2, 3)))
        and gap(jnp.sum(weights, axis=3), jnp.ones((1, 6, 2, 6))) > 0.1
    )


def softmax_does_not_overflow() -> bool:
    """Scores near 1e4 stay finite, and adding the same to every score of a row changes nothing."""
    q, k, v, mask = qkv()
    huge = attention(1e4 * q, k, v, mask)
    # One more channel, the same in every key, adds a constant to each query's scores; the width's scale is undone.
    wider = [jnp.concatenate([a, jnp.full_like(a[..., :1], 5.0)], -1) * (9 / 8) ** 0.25 for a in (q, k)]
    shifted = attention(wider[0], wider[1], v, mask)
    return bool(jnp.all(jnp.isfinite(huge))) and close(shifted, attention(q, k, v, mask))


def concatenation_is_not_a_sum() -> bool:
    """Each head has its own rows of W_O: their parts add up to the product, and swapping heads changes it."""
    mixed, w = normal(1, 5, 2, 3, 8), first_layer(QWEN3)["o_proj"]
    parts = [contract("o_proj", jnp.zeros_like(mixed).at[:, :, :, g].set(mixed[:, :, :, g]), w) for g in range(3)]
    whole = contract("o_proj", mixed, w)
    return close(sum(parts), whole) and gap(contract("o_proj", mixed[:, :, :, ::-1], w), whole) > 0.1


def blocks_equal_the_whole() -> bool:
    """Attention over two blocks of keys, merged by their running maximum and sum, equals attention over all of them."""
    q, k, v, _ = qkv()
    everything = jnp.ones((1, 6, 6), bool)
    scores = np.asarray(contract("scores", q, k)) * f.attention_scale(8)
    total, weight, highest = 0.0, 0.0, -np.inf
    for cut in (slice(0, 2), slice(2, 6)):
        block = attention(q, k[:, :, cut], v[:, :, cut], everything[:, :, cut])
        peak = np.maximum(highest, scores[..., cut].max(axis=-1))
        mass = np.exp(scores[..., cut] - peak[..., None]).sum(axis=-1)
        fade = np.exp(highest - peak)
        total = (
            total * spread(fade) + np.asarray(block) * spread(mass)
            if np.ndim(total)
            else np.asarray(block) * spread(mass)
        )
        weight, highest = weight * fade + mass, peak
    return close(total / spread(weight), attention(q, k, v, everything), 1e-5)


def spread(x_BKGT: Any) -> np.ndarray:
    """[B, K, G, T] beside [B, T, K, G, H]."""
    return np.asarray(x_BKGT).transpose(0, 3, 1, 2)[..., None]


def heads_stay_within_their_values() -> bool:
    """A head's output lies between the least and greatest of the values it sees; the layer's output does not."""
    q, k, v, mask = qkv()
    out = np.asarray(attention(q, k, v, mask))
    values = np.asarray(v).transpose(0, 2, 1, 3)[:, :, :, None]
    inside = all(
        np.all(out[:, t] <= values[:, : t + 1].max(axis=1) + 1e-6)
        and np.all(out[:, t] >= values[:, : t + 1].min(axis=1) - 1e-6)
        for t in range(6)
    )
    projected = contract("o_proj", jnp.asarray(out), first_layer(QWEN3)["o_proj"])
    return inside and float(jnp.max(jnp.abs(projected))) > float(np.max(np.abs(values)))


CASES: dict[str, Case] = {
    "S000-004": layer_keeps_the_stream,
    "S000-005": norm_at_the_entrance,
    "S000-012": projections_are_per_token,
    "S000-071": grouped_heads_index_their_group,
    "S002-003": layer_keeps_the_stream,
    "S002-011": residual_equations,
    "S002-012": skip_path_is_raw,
    "S002-013": residual_equations,
    "S002-028": splitting_makes_nothing,
    "S002-031": only_queries_and_keys_are_normed,
    "S002-032": qk_norm_matters,
    "S002-045": future_is_masked,
    "S002-046": first_row_sees_itself,
    "S002-048": softmax_does_not_overflow,
    "S002-049": rows_sum_to_one,
    "S002-051": concatenation_is_not_a_sum,
    "S002-070": blocks_equal_the_whole,
    "S002-084": heads_stay_within_their_values,
}
