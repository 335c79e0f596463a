"""Routed experts: the router, and three ways through the experts behind one signature.

`dense` runs every expert on every token and is the reference. `gathered` takes each token's own experts out of the
stack, so a decode step touches only those; its weights are read once for each token that chose them. `grouped` sorts
tokens by expert and runs blocks of rows that share one, for many tokens. `jax.lax.ragged_dot` is not used: XLA runs it
as a dense product over all experts on CPU and NVIDIA.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax.layers import contract, precision_of, swiglu
from qwenjax.moe_blocks import Way, block_rows, choose_way, num_blocks

Array = jax.Array


def route(x_BTD: Array, router_ED: Array, experts_per_token: int, renormalise: bool) -> tuple[Array, Array]:
    """Weights and indices of each token's experts, both [B, T, A]."""
    return choose_experts(router_logits(x_BTD, router_ED), experts_per_token, renormalise)


def router_logits(x_BTD: Array, router_ED: Array) -> Array:
    """Each token's score of each expert, [B, T, E], in the model's dtype."""
    with jax.named_scope("router"):
        return contract("router", x_BTD, router_ED)


def choose_experts(logits_BTE: Array, experts_per_token: int, renormalise: bool) -> tuple[Array, Array]:
    """Weights and indices of the experts with the largest scores, both [B, T, A].

    Softmax over all experts in float32, then the largest; they sum to less than 1 unless renormalised. Cast last.
    """
    with jax.named_scope("top_k"):
        probs_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
        weights_BTA, chosen_BTA = jax.lax.top_k(probs_BTE, experts_per_token)
        if renormalise:
            weights_BTA = weights_BTA / weights_BTA.sum(axis=-1, keepdims=True)
        return weights_BTA.astype(logits_BTE.dtype), chosen_BTA


def run_experts(
    x_BTD: Array, weights_BTA: Array, chosen_BTA: Array, gate_up_ECFD: Array, down_EDF: Array, way: Way | None = None
) -> Array:
    """Sum over each token's experts of weight x expert(token), [B, T, D]; an expert is down(silu(gate) * up)."""
    batch, tokens, per_token = chosen_BTA.shape
    way = way or choose_way(batch * tokens, per_token, gate_up_ECFD.shape[0])
    x_ND, chosen_NA = x_BTD.reshape(batch * tokens, -1), chosen_BTA.reshape(batch * tokens, per_token)
    out_NAD = _WAYS[way](x_ND, chosen_NA, gate_up_ECFD, down_EDF)
    with jax.named_scope("combine"):
        weighted_NAD = out_NAD * weights_BTA.reshape(batch * tokens, per_token, 1)
        return weighted_NAD.sum(axis=1).reshape(x_BTD.shape)


def _dense(x_ND: Array, chosen_NA: Array, gate_up_ECFD: Array, down_EDF: Array) -> Array:
    """Every expert on every token; each token's own are picked from the results."""
    experts, _, width, hidden = gate_up_ECFD.shape
    with jax.named_scope("experts_gate_up_proj"):
        gate_up = _rows_times(x_ND, gate_up_ECFD.reshape(-1, hidden)).reshape(-1, experts, 2, width)
    with jax.named_scope("experts_swiglu"):
        hidden_NEF = swiglu(gate_up)
    with jax.named_scope("experts_down_proj"):
        out_END = jax.lax.dot_general(
            hidden_NEF.transpose(1, 0, 2), down_EDF, (((2,), (2,)), ((0,), (0,))), precision=precision_of(x_ND.dtype)
        )
    return out_END[chosen_NA, jnp.arange(x_ND.shape[0])[:, None]]


def _gathered(x_ND: Array, chosen_NA: Array, gate_up_ECFD: Array, down_EDF: Array) -> Array:
    """One product for each token and expert, on weights taken out of the stack."""
    tokens, per_token = chosen_NA.shape
    chosen_R, (_, _, width, hidden) = chosen_NA.reshape(-1), gate_up_ECFD.shape
    x_RD = jnp.repeat(x_ND, per_token, axis=0)
    with jax.named_scope("experts_gate_up_proj"):
        gate_up_RFD = gate_up_ECFD.reshape(-1, 2 * width, hidden)[chosen_R]
        gate_up_RF = jax.lax.dot_general(
            gate_up_RFD, x_RD, (((2,), (1,)), ((0,), (0,))), precision=precision_of(x_ND.dtype)
        )
    with jax.named_scope("experts_swiglu"):
        hidden_RF = swiglu(gate_up_RF.reshape(-1, 2, width))
    with jax.named_scope("experts_down_proj"):
        out_RD = jax.lax.dot_general(
            down_EDF[chosen_R], hidden_RF, (((2,), (1,)), ((0,), (0,))), precision=precision_of(x_ND.dtype)
        )
    return out_RD.reshape(tokens, per_token, hidden)


def _grouped(x_ND: Array, chosen_NA: Array, gate_up_ECFD: Array, down_EDF: Array) -> Array:
    """Rows sorted by expert and cut into blocks of one expert each; blocks that no row needs are skipped."""
    tokens, per_token = chosen_NA.shape
    experts, _, width, hidden = gate_up_ECFD.shape
    rows, size = tokens * per_token, block_rows(tokens * per_token, experts)
    with jax.named_scope("top_k"):
        chosen_R = chosen_NA.reshape(-1)
        order_R = jnp.argsort(chosen_R)
        counts_E = jnp.bincount(chosen_R, length=experts)
        ends_E = jnp.cumsum(counts_E)
        starts_E, blocks_E = ends_E - counts_E, -(-counts_E // size)
        last_blocks_E = jnp.cumsum(blocks_E)
        block_G = jnp.arange(num_blocks(rows, experts))
        expert_G = jnp.minimum(jnp.searchsorted(last_blocks_E, block_G, side="right"), experts - 1)
        within_G = block_G - (last_blocks_E - blocks_E)[expert_G]
        first_G = starts_E[expert_G] + within_G * size
    flat_EFD = gate_up_ECFD.reshape(experts, 2 * width, hidden)

    def run_block(expert: Array, first: Array) -> Array:
        row_M = order_R[jnp.minimum(first + jnp.arange(size), rows - 1)]  # what lies past the expert's end is not read
        with jax.named_scope("experts_gate_up_proj"):
            gate_up_MF = _rows_times(x_ND[row_M // per_token], flat_EFD[expert])
        with jax.named_scope("experts_swiglu"):
            hidden_MF = swiglu(gate_up_MF.reshape(size, 2, width))
        with jax.named_scope("experts_down_proj"):
            return _rows_times(hidden_MF, down_EDF[expert])

    def step(_: None, block: tuple[Array, Array]) -> tuple[None, Array]:
        expert, first = block
        empty = jnp.zeros((size, hidden), x_ND.dtype)
        return None, jax.lax.cond(first < ends_E[expert], run_block, lambda *_: empty, expert, first)

    _, out_GMD = jax.lax.scan(step, None, (expert_G, first_G))
    with jax.named_scope("combine"):
        place_R = jnp.zeros(rows, jnp.int32).at[order_R].set(jnp.arange(rows, dtype=jnp.int32))  # where each row went
        within_R = place_R - starts_E[chosen_R]
        slot_R = ((last_blocks_E - blocks_E)[chosen_R] + within_R // size) * size + within_R % size
        return out_GMD.reshape(-1, hidden)[slot_R].reshape(tokens, per_token, hidden)


def _rows_times(x_MD: Array, weight_FD: Array) -> Array:
    return jax.lax.dot_general(x_MD, weight_FD, (((1,), (1,)), ((), ())), precision=precision_of(x_MD.dtype))


_WAYS = {"dense": _dense, "gathered": _gathered, "grouped": _grouped}
