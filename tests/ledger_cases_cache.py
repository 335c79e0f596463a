"""Ledger rows on whole models: shapes, the KV cache, causality and the output head, with tiny random weights."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from ledger_models import QWEN25_7B, Case, letters, params, step_sum
from ledger_tiny import (
    QWEN2,
    QWEN3,
    TOKENS,
    Array,
    block_of,
    close,
    gap,
    no_rotation,
    random_params,
    without,
)

from qwenjax.cache import KVCache, init_cache
from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.layers import contract, rms_norm, rope_tables
from qwenjax.model import decode_step, forward, prefill
from qwenjax.ops import weights_of
from qwenjax.weights import param_shapes


def shapes_along_the_flow() -> list[list[int]]:
    ids = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    logits = jax.eval_shape(lambda p, t: forward(QWEN25_7B, p, t), param_shapes(QWEN25_7B), ids)
    return [list(ids.shape), letters(QWEN25_7B, "BTD", Step.prefill(2, 5)), list(logits.shape)]


def layers_have_equal_shapes() -> bool:
    layers = param_shapes(QWEN25_7B)["layers"]
    return len(layers) == 28 and all(layers[i] == layers[0] for i in layers)


def count_dots(jaxpr: object) -> int:
    total = 0
    for equation in jaxpr.eqns:  # type: ignore[attr-defined]
        total += equation.primitive.name == "dot_general"
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            total += count_dots(inner) if hasattr(inner, "eqns") else 0
    return total


def dots_of_a_layer() -> bool:
    """Seven checkpoint matrices run as four products, since q, k, v and gate, up are joined; the kernel has two
    more.
    """
    one, two = (replace(QWEN2, num_hidden_layers=n, sliding_windows=()) for n in (1, 2))
    dots = [
        count_dots(jax.make_jaxpr(lambda p, t, c=c: forward(c, p, t))(random_params(c), TOKENS).jaxpr)
        for c in (one, two)
    ]
    matrices = [w for w in weights_of(one) if w.group in ("attention", "mlp")]
    return len(matrices) == 7 and dots[1] - dots[0] == len({w.leaf for w in matrices}) + 2 == 6


@cache
def logits(config: ModelConfig) -> Array:
    out: Array = forward(config, random_params(config), TOKENS)
    return out


def prefilled(config: ModelConfig, tokens: np.ndarray, capacity: int = 16) -> tuple[Array, KVCache]:
    batch, length = tokens.shape
    empty = init_cache(config, batch, capacity, "float32")
    out: tuple[Array, KVCache] = prefill(config, random_params(config), tokens, jnp.full(batch, length), empty)
    return out


def copied(cache: KVCache) -> KVCache:
    copy: KVCache = jax.tree.map(jnp.copy, cache)  # decode_step takes its argument's memory
    return copy


def last_position_logits() -> bool:
    """A prefill's logits are the full pass's last, and it is charged for one output head."""
    per_token, heads = params(QWEN25_7B).flops_per_token, 1
    step = Step.prefill(1, 1024)
    saved = step_sum(QWEN25_7B, step, "flops", logits="all") - step_sum(QWEN25_7B, step, "flops")
    return close(prefilled(QWEN2, TOKENS)[0], logits(QWEN2)[:, -1]) and saved == (1024 - heads) * per_token["lm_head"]


def cached_decode_equals_full() -> bool:
    for config in (QWEN2, QWEN3):
        out, cache = prefilled(config, TOKENS[:, :8])
        for position in range(8, 12):
            out, cache = decode_step(config, random_params(config), TOKENS[:, position], cache)
            if not close(out, logits(config)[:, position], 1e-4):
                return False
    return True


def cache_only_grows() -> bool:
    """Later steps leave old rows bit for bit, and one request's rows don't depend on another's tokens."""
    _, before = prefilled(QWEN2, TOKENS[:, :8])
    _, after = decode_step(QWEN2, random_params(QWEN2), TOKENS[:, 8], copied(before))
    kept = all(
        gap(a[:, :, :8], b[:, :, :8]) == 0
        for a, b in zip(before.keys + before.values, after.keys + after.values, strict=True)
    )
    other = TOKENS.copy()
    other[1] = (other[1] + 1) % 97
    _, changed = prefilled(QWEN2, other[:, :8])
    apart = all(gap(a[0], b[0]) == 0 and gap(a[1], b[1]) > 0 for a, b in zip(before.keys, changed.keys, strict=True))
    return kept and apart and after.lengths.tolist() == [9, 9]


def cache_holds_keys_and_values() -> bool:
    _, cache = prefilled(QWEN2, TOKENS[:, :8])
    return len(jax.tree.leaves(cache)) == 2 * QWEN2.num_hidden_layers + 1  # and the lengths


def cache_holds_kv_heads() -> bool:
    _, cache = prefilled(QWEN2, TOKENS[:, :8])
    return all(array.shape == (2, QWEN2.num_key_value_heads, 16, 8) for array in cache.keys + cache.values)


def earlier_positions_do_not_move() -> bool:
    changed = TOKENS.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    for config in (QWEN2, QWEN3):
        moved = forward(config, random_params(config), changed)
        if gap(moved[:, :-1], logits(config)[:, :-1]) != 0 or gap(moved[:, -1], logits(config)[:, -1]) == 0:
            return False
    return True


def first_layer_projections(config: ModelConfig, *, rotate: bool = True) -> tuple[Array, Array]:
    """Keys and values of layer 0 for the prompt, as the layer's own projection gives them, [B, K, T, H]."""
    tree = random_params(config)
    block = block_of(config, tree["layers"][0])
    h = rms_norm(tree["embed_tokens"][TOKENS], tree["layers"][0]["input_norm"], config.rms_norm_eps)
    positions = jnp.broadcast_to(jnp.arange(12), (2, 12))
    tables = rope_tables(positions, config.head_dim, config.rope_theta, None, h.dtype)
    tables = tables if rotate else no_rotation(config, 2, 12)
    _, k, v = block.project(h, tables)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def cached_key_is_the_plain_product() -> bool:
    _, cache = prefilled(QWEN2, TOKENS)
    tree = random_params(QWEN2)["layers"][0]
    h = rms_norm(random_params(QWEN2)["embed_tokens"][TOKENS], tree["input_norm"], 1e-6)
    plain = contract("qkv_proj", h, tree["qkv_proj"])[..., -2, :].transpose(0, 2, 1, 3)
    return close(cache.keys[0][:, :, :12], plain)


def cached_key_is_normed_and_turned() -> bool:
    _, cache = prefilled(QWEN3, TOKENS)
    keys, _ = first_layer_projections(QWEN3)
    unturned, _ = first_layer_projections(QWEN3, rotate=False)
    return close(cache.keys[0][:, :, :12], keys) and not close(cache.keys[0][:, :, :12], unturned)


def cached_value_is_the_projection() -> bool:
    _, cache = prefilled(QWEN3, TOKENS)
    tree = random_params(QWEN3)["layers"][0]
    h = rms_norm(random_params(QWEN3)["embed_tokens"][TOKENS], tree["input_norm"], 1e-6)
    plain = contract("qkv_proj", h, tree["qkv_proj"])[..., -1, :].transpose(0, 2, 1, 3)
    return close(cache.values[0][:, :, :12], plain)


def rows_of_a_batch_are_apart() -> bool:
    alone = forward(QWEN2, random_params(QWEN2), TOKENS[:1])
    return close(alone[0], logits(QWEN2)[0])


def head_reads_the_final_norm() -> bool:
    """With silent layers the logits are the output head on the normed embedding."""
    tree = random_params(QWEN3)
    silent = {**tree, "layers": {i: without(layer, "o_proj", "down_proj") for i, layer in tree["layers"].items()}}
    tokens = np.array([[3, 1, 4]])
    normed = rms_norm(tree["embed_tokens"][tokens], tree["final_norm"], 1e-6)
    return close(forward(QWEN3, silent, tokens), contract("unembed", normed, tree["lm_head"]))


CASES: dict[str, Case] = {
    "S000-002": layers_have_equal_shapes,
    "S000-003": shapes_along_the_flow,
    "S000-007": dots_of_a_layer,
    "S000-051": last_position_logits,
    "S000-129": cached_decode_equals_full,
    "S000-132": cache_only_grows,
    "S000-134": cache_holds_keys_and_values,
    "S000-135": earlier_positions_do_not_move,
    "S000-136": cached_key_is_the_plain_product,
    "S000-300": rows_of_a_batch_are_apart,
    "S002-014": head_reads_the_final_norm,
    "S002-035": cached_value_is_the_projection,
    "S002-044": cache_holds_kv_heads,
    "S002-069": cached_key_is_normed_and_turned,
}
