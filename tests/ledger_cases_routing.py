"""Ledger rows on routing, experts and the block that holds them, checked on the model's own functions."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from ledger_models import QWEN2_57B, QWEN3_8B, QWEN3_30B, QWEN3_32B, QWEN25_7B, Case
from ledger_tiny import QWEN2, Array, block_of, close, first_layer, gap, normal, residual_stream, run_block, without

from qwenjax.block import Block
from qwenjax.config import ModelConfig
from qwenjax.layers import rms_norm
from qwenjax.model import step_shapes
from qwenjax.moe import route, run_experts
from qwenjax.weights import Params, layer_scopes

MOE = replace(
    QWEN2, model_type="qwen2_moe", num_experts=13, num_experts_per_tok=3, moe_intermediate_size=24,
    shared_expert_intermediate_size=36,
)  # fmt: skip


@cache
def routed(config: ModelConfig, tokens: int = 50) -> tuple[Array, Array, Array]:
    """Router logits of some tokens at the model's own sizes, and the weights and experts that it takes for them."""
    x_BTD = normal(1, tokens, config.hidden_size)
    router_ED = normal(config.num_experts, config.hidden_size, seed=4) / config.hidden_size**0.5
    logits_TE = x_BTD[0] @ router_ED.T
    weights_BTA, chosen_BTA = route(x_BTD, router_ED, config.num_experts_per_tok, config.norm_topk_prob)
    return logits_TE, weights_BTA[0], chosen_BTA[0]


@jax.jit
def experts_of(layer: Params, x_BTD: Array) -> Array:
    mixed_BTD, _ = block_of(MOE, layer).experts(x_BTD)
    return mixed_BTD


def shared_part(layer: Params, x_BTD: Array) -> Array:
    return experts_of(without(layer, "experts_down_proj"), x_BTD)


def closed_gate(layer: Params, x_BTD: Array) -> tuple[Params, Array]:
    """A first channel of 1 in every token, and a gate that reads -1e4 there: the sigmoid is zero."""
    x_BTD = x_BTD.at[..., 0].set(1)
    return layer | {"shared_expert_gate": jnp.zeros_like(layer["shared_expert_gate"]).at[0].set(-1e4)}, x_BTD


def shared_gate_is_a_scalar_of_each_token() -> bool:
    """Gated over ungated output is one number in (0, 1) for all channels of a token, other for another token."""
    layer, x_BTD = first_layer(MOE), residual_stream(MOE)
    half = shared_part(layer | {"shared_expert_gate": jnp.zeros(MOE.hidden_size)}, x_BTD)
    ratio_TD = (shared_part(layer, x_BTD) / (2 * half))[0]
    in_range = bool((ratio_TD > 0).all() & (ratio_TD < 1).all())
    spread_of_channels, spread_of_tokens = jnp.ptp(ratio_TD, axis=1).max(), jnp.ptp(ratio_TD[:, 0])
    return in_range and float(spread_of_channels) < 1e-4 < 0.1 < float(spread_of_tokens)


def routed_plus_gated_shared() -> bool:
    """A closed gate removes the shared part and nothing else; the whole is the sum of the two."""
    layer, x_BTD = first_layer(MOE), residual_stream(MOE)
    routed_only = experts_of(without(layer, "shared_down_proj"), x_BTD)
    total = routed_only + shared_part(layer, x_BTD)
    closed, with_one = closed_gate(layer, x_BTD)
    removed = close(experts_of(closed, with_one), experts_of(without(layer, "shared_down_proj"), with_one))
    return close(experts_of(layer, x_BTD), total) and removed and not close(routed_only, total, 1e-2)


def full_softmax_sums_to_one() -> bool:
    """With every expert taken, the weights are the whole softmax, not renormalised."""
    taken = routed(replace(QWEN2_57B, num_experts_per_tok=QWEN2_57B.num_experts))
    return taken[1].shape[-1] == 64 and close(taken[1].sum(axis=-1), 1) and close(
        jnp.sort(taken[1]), jnp.sort(jax.nn.softmax(taken[0]))
    )  # fmt: skip


def experts_and_weights() -> int:
    """How many of each: the ids are distinct, and each weight is its expert's probability among all."""
    logits_TE, weights_TA, chosen_TA = routed(QWEN2_57B)
    probs_TE = jax.nn.softmax(logits_TE)
    assert close(weights_TA, jnp.take_along_axis(probs_TE, chosen_TA, axis=-1))
    counts = {len(set(row)) for row in np.asarray(chosen_TA).tolist()} | {weights_TA.shape[-1]}
    (count,) = counts
    return count


def raw_weights_sum_below_one() -> bool:
    return not QWEN2_57B.norm_topk_prob and bool((routed(QWEN2_57B)[1].sum(axis=-1) < 0.999).all())


def renormalised_weights_sum_to_one() -> bool:
    return QWEN3_30B.norm_topk_prob and close(routed(QWEN3_30B)[1].sum(axis=-1), 1, 1e-6)


def softmax_of_the_chosen(config: ModelConfig) -> tuple[Array, Array]:
    """The weights, and what the softmax of the largest logits alone would be."""
    logits_TE, weights_TA, _ = routed(config)
    return weights_TA, jax.nn.softmax(jax.lax.top_k(logits_TE, config.num_experts_per_tok)[0])


def orders_agree_when_renormalised() -> bool:
    return QWEN3_30B.norm_topk_prob and close(*softmax_of_the_chosen(QWEN3_30B), 1e-6)


def orders_differ_when_not() -> bool:
    ours, other = softmax_of_the_chosen(QWEN2_57B)
    return not QWEN2_57B.norm_topk_prob and bool((ours < 0.9 * other).all())


def one_residual_around_the_sum() -> bool:
    """The layer without attention's part is x + experts(norm(x)), the shared expert within."""
    layer, x_BTD = without(first_layer(MOE), "o_proj"), residual_stream(MOE)
    mixed = experts_of(layer, rms_norm(x_BTD, layer["post_norm"], MOE.rms_norm_eps))
    return close(run_block(MOE, layer, x_BTD) - x_BTD, mixed) and gap(mixed, 0) > 0.1


def grouped_equals_token_by_token() -> bool:
    layer, x_BTD = first_layer(MOE), residual_stream(MOE, tokens=30)
    weights_BTA, chosen_BTA = route(x_BTD, layer["router"], 3, False)
    gate_up_ECFD, down_EDF = layer["experts_gate_up_proj"], layer["experts_down_proj"]
    grouped = run_experts(x_BTD, weights_BTA, chosen_BTA, gate_up_ECFD, down_EDF, "grouped")
    rows = []
    for t in range(30):
        row = jnp.zeros(MOE.hidden_size)
        for a, expert in enumerate(chosen_BTA[0, t].tolist()):
            gate_F, up_F = gate_up_ECFD[expert] @ x_BTD[0, t]
            row += weights_BTA[0, t, a] * (down_EDF[expert] @ (jax.nn.silu(gate_F) * up_F))
        rows.append(row)
    return close(grouped[0], jnp.stack(rows))


def tokens_choose_different_experts() -> bool:
    """No two of 50 tokens take the same eight, and together they take nearly all 64."""
    sets = [frozenset(row) for row in np.asarray(routed(QWEN2_57B)[2]).tolist()]
    return len(set(sets)) == len(sets) and len(frozenset().union(*sets)) > 60


def one_block_class_serves_all_five() -> bool:
    """The same class runs a layer of each, with RMSNorm, RoPE and grouped queries throughout, by options alone."""
    ran = []
    for config in (QWEN25_7B, QWEN2_57B, QWEN3_8B, QWEN3_32B, QWEN3_30B):
        params, _, _ = step_shapes(config, "prefill", 1, 3, 3)
        x = jax.ShapeDtypeStruct((1, 3, config.hidden_size), jnp.bfloat16)
        table = jax.ShapeDtypeStruct((1, 3, config.head_dim // 2), jnp.bfloat16)

        def layer(tree: Params, x: Array, table: Array, config: ModelConfig = config) -> Array:
            block = Block(config, layer_scopes(config, 0), tree)
            return block(x, (table, table), jnp.ones((1, 3, 3), bool), None, None)[0]

        ran.append(jax.eval_shape(layer, params["layers"][0], x, table).shape == (1, 3, config.hidden_size))
    return all(ran) and not Block.__subclasses__() and "model_type" not in inspect.getsource(Block)


CASES: dict[str, Case] = {
    "S000-194": shared_gate_is_a_scalar_of_each_token,
    "S000-195": routed_plus_gated_shared,
    "S000-200": full_softmax_sums_to_one,
    "S000-201": experts_and_weights,
    "S000-202": raw_weights_sum_below_one,
    "S000-203": renormalised_weights_sum_to_one,
    "S000-207": one_residual_around_the_sum,
    "S000-208": grouped_equals_token_by_token,
    "S000-250": tokens_choose_different_experts,
    "S001-028": orders_agree_when_renormalised,
    "S001-029": orders_differ_when_not,
    "S001-048": one_block_class_serves_all_five,
}
