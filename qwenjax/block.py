"""One decoder layer in Flax: a module whose parameters come from the inventory, and the pure functions that run it.

Layers of one kind share one traced function, so tracing and lowering take as long as one layer, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qwenjax.cache import append, fill, rounded
from qwenjax.config import ModelConfig
from qwenjax.layers import apply_rope, attention, contract, rms_norm, swiglu
from qwenjax.moe import choose_experts, router_logits, run_experts
from qwenjax.ops import Scope
from qwenjax.weights import Params, leaves_of

Array = jax.Array
KeyValue = tuple[Array, Array]


def _gated(ops: tuple[str, str], h_BTD: Array, gate_up_CFD: Array) -> Array:
    """silu(gate) * up, [B, T, F]; `ops` name the product and what joins its two halves."""
    with jax.named_scope(ops[0]):
        gate_up_BTCF = contract(ops[0], h_BTD, gate_up_CFD)
    with jax.named_scope(ops[1]):
        return swiglu(gate_up_BTCF)


class Products(NamedTuple):
    """How a block computes: `contract`, silu(gate) * up from (ops, x, gate and up), `choose_experts` and `run_experts`,
    or what stands in for them."""

    contract: Callable[[str, Array, Array], Array] = contract
    gated: Callable[[tuple[str, str], Array, Array], Array] = _gated
    choose: Callable[[Array, int, bool], tuple[Array, Array]] = choose_experts
    experts: Callable[..., Array] = run_experts


PLAIN = Products()


class Block(nnx.Module):
    """One pre-norm decoder layer; its arrays are those of the inventory's rows for these scopes."""

    input_norm: nnx.Param[Array]
    qkv_proj: nnx.Param[Array]
    qkv_bias: nnx.Param[Array]
    q_norm: nnx.Param[Array]
    k_norm: nnx.Param[Array]
    o_proj: nnx.Param[Array]
    o_bias: nnx.Param[Array]
    post_norm: nnx.Param[Array]
    gate_up_proj: nnx.Param[Array]
    down_proj: nnx.Param[Array]
    router: nnx.Param[Array]
    experts_gate_up_proj: nnx.Param[Array]
    experts_down_proj: nnx.Param[Array]
    shared_gate_up_proj: nnx.Param[Array]
    shared_down_proj: nnx.Param[Array]
    shared_expert_gate: nnx.Param[Array]

    def __init__(self, config: ModelConfig, scopes: tuple[Scope, ...], params: Params) -> None:
        self.config = config
        self.is_sparse = "sparse" in scopes
        for leaf in leaves_of(config, scopes):
            setattr(self, leaf, nnx.Param(params[leaf]))

    def __call__(
        self, x_BTD: Array, rope: KeyValue, mask_BTS: Array, cached: KeyValue | None, lengths_B: Array | None
    ) -> tuple[Array, KeyValue]:
        """Returns the residual stream and the keys and values: the updated cache, or without one the prompt's own."""
        x_BTD, kept, _ = self.with_router(x_BTD, rope, mask_BTS, cached, lengths_B)
        return x_BTD, kept

    def with_router(
        self, x_BTD: Array, rope: KeyValue, mask_BTS: Array, cached: KeyValue | None, lengths_B: Array | None
    ) -> tuple[Array, KeyValue, Array | None]:
        """The same, and the router's logits [B, T, E] if there is a router."""
        with jax.named_scope("input_norm"):
            h_BTD = rms_norm(x_BTD, self.input_norm[...], self.config.rms_norm_eps)
        q_BTKGH, k_BTKH, v_BTKH = self.project(h_BTD, rope)
        k_BKSH, v_BKSH, kept = self.remember(k_BTKH, v_BTKH, cached, lengths_B)
        mixed_BTKGH = attention(q_BTKGH, k_BKSH, v_BKSH, mask_BTS)
        out_BTD = self.attended(mixed_BTKGH)
        with jax.named_scope("attention_residual"):
            x_BTD = x_BTD + out_BTD
        with jax.named_scope("post_norm"):
            h_BTD = rms_norm(x_BTD, self.post_norm[...], self.config.rms_norm_eps)
        mixed_BTD, logits_BTE = self.experts(h_BTD) if self.is_sparse else (self.mlp(h_BTD), None)
        with jax.named_scope("mlp_residual"):
            return x_BTD + mixed_BTD, kept, logits_BTE

    def project(self, h_BTD: Array, rope: KeyValue) -> tuple[Array, Array, Array]:
        """Queries [B, T, K, G, H], keys and values [B, T, K, H]; queries and keys normed (Qwen3) and rotated."""
        return self.rotated(self.packed_qkv(h_BTD), rope)

    def packed_qkv(self, h_BTD: Array, products: Products = PLAIN) -> Array:
        """Of each KV head its G queries, key and value as projected, [B, T, K, G + 2, H]."""
        with jax.named_scope("qkv_proj"):
            qkv_BTKJH = products.contract("qkv_proj", h_BTD, self.qkv_proj[...])
            return qkv_BTKJH + self.qkv_bias[...] if self.config.qkv_bias else qkv_BTKJH

    def rotated(self, qkv_BTKJH: Array, rope: KeyValue) -> tuple[Array, Array, Array]:
        """The same apart, queries and keys normed (Qwen3) and rotated."""
        q_BTKGH, k_BTKH, v_BTKH = qkv_BTKJH[..., :-2, :], qkv_BTKJH[..., -2, :], qkv_BTKJH[..., -1, :]
        if self.config.qk_norm:
            with jax.named_scope("qk_norm"):
                q_BTKGH = rms_norm(q_BTKGH, self.q_norm[...], self.config.rms_norm_eps)
                k_BTKH = rms_norm(k_BTKH, self.k_norm[...], self.config.rms_norm_eps)
        with jax.named_scope("rope"):
            batch, tokens, kv_heads, group, head_dim = q_BTKGH.shape
            q_BTNH = apply_rope(q_BTKGH.reshape(batch, tokens, kv_heads * group, head_dim), *rope)
            return q_BTNH.reshape(q_BTKGH.shape), apply_rope(k_BTKH, *rope), v_BTKH

    def remember(
        self, k_BTKH: Array, v_BTKH: Array, cached: KeyValue | None, lengths_B: Array | None
    ) -> tuple[Array, Array, KeyValue]:
        """Keys and values to attend, [B, K, S, H], and what to keep.

        A prompt starts at position 0 and attends itself; only what follows it (with lengths) reads the cache.
        """
        dtype = k_BTKH.dtype
        if cached is not None:
            with jax.named_scope("cache"):
                k_BTKH, v_BTKH = rounded(k_BTKH, cached[0].dtype), rounded(v_BTKH, cached[1].dtype)
        if cached is not None and lengths_B is not None:
            with jax.named_scope("cache"):
                kept = append(cached[0], k_BTKH, lengths_B), append(cached[1], v_BTKH, lengths_B)
                return kept[0].astype(dtype), kept[1].astype(dtype), kept
        k_BKTH, v_BKTH = k_BTKH.transpose(0, 2, 1, 3), v_BTKH.transpose(0, 2, 1, 3)
        if cached is None:
            return k_BKTH, v_BKTH, (k_BKTH, v_BKTH)
        with jax.named_scope("cache"):
            kept = fill(cached[0], k_BKTH), fill(cached[1], v_BKTH)
            return k_BKTH.astype(dtype), v_BKTH.astype(dtype), kept

    def attended(self, mixed_BTKGH: Array, products: Products = PLAIN) -> Array:
        """What attention adds to the residual stream, [B, T, D]."""
        with jax.named_scope("o_proj"):
            out_BTD = products.contract("o_proj", mixed_BTKGH, self.o_proj[...])
            return out_BTD + self.o_bias[...] if self.config.attention_o_bias else out_BTD

    def mlp(self, h_BTD: Array, products: Products = PLAIN) -> Array:
        """down(silu(gate) * up)."""
        hidden_BTF = products.gated(("gate_up_proj", "swiglu"), h_BTD, self.gate_up_proj[...])
        with jax.named_scope("down_proj"):
            return products.contract("down_proj", hidden_BTF, self.down_proj[...])

    def experts(self, h_BTD: Array, products: Products | None = None) -> tuple[Array, Array]:
        """The routed experts' weighted sum, plus the shared expert's output times its own gate (Qwen2-MoE), and the
        router's logits."""
        config, products = self.config, products or PLAIN
        logits_BTE = router_logits(h_BTD, self.router[...])
        weights_BTA, chosen_BTA = products.choose(logits_BTE, config.num_experts_per_tok, config.norm_topk_prob)
        stacks = self.experts_gate_up_proj[...], self.experts_down_proj[...]
        routed_BTD = products.experts(h_BTD, weights_BTA, chosen_BTA, *stacks)
        if not config.has_shared_expert:
            return routed_BTD, logits_BTE
        ops = "shared_gate_up_proj", "shared_swiglu"
        hidden_BTF = products.gated(ops, h_BTD, self.shared_gate_up_proj[...])
        with jax.named_scope("shared_down_proj"):
            shared_BTD = products.contract("shared_down_proj", hidden_BTF, self.shared_down_proj[...])
        with jax.named_scope("shared_expert_gate"):
            gate_BT = jax.nn.sigmoid(contract("shared_expert_gate", h_BTD, self.shared_expert_gate[...]))
            return routed_BTD + gate_BT[..., None] * shared_BTD, logits_BTE


@cache
def block_graph(config: ModelConfig, scopes: tuple[Scope, ...]) -> nnx.GraphDef[Block]:
    shapes = {leaf: jax.ShapeDtypeStruct(sizes, jnp.float32) for leaf, (sizes, _) in leaves_of(config, scopes).items()}
    return nnx.graphdef(Block(config, scopes, shapes))


def _run_block(
    config: ModelConfig,
    scopes: tuple[Scope, ...],
    params: Params,
    x_BTD: Array,
    rope: KeyValue,
    mask_BTS: Array,
    cached: KeyValue | None,
    lengths_B: Array | None,
) -> tuple[Array, KeyValue]:
    block: Block = nnx.merge(block_graph(config, scopes), params)
    return block(x_BTD, rope, mask_BTS, cached, lengths_B)


run_block = jax.jit(_run_block, static_argnames=("config", "scopes"))


@partial(jax.jit, static_argnames=("config", "scopes"))
def run_block_to_train(
    config: ModelConfig, scopes: tuple[Scope, ...], params: Params, x_BTD: Array, rope: KeyValue, mask_BTS: Array
) -> tuple[Array, Array | None]:
    """A block on whole sequences, nothing cached: the residual stream, and the router's logits if it has one."""
    block: Block = nnx.merge(block_graph(config, scopes), params)
    x_BTD, _, logits_BTE = block.with_router(x_BTD, rope, mask_BTS, None, None)
    return x_BTD, logits_BTE
