"""The decoder in Flax: modules whose parameters come from the inventory, and the pure functions that run them.

jit sees functions of (config, params, ...): `params` is a plain dict of arrays, the state of a `Decoder`. Layers of one
kind share one traced function, so tracing and lowering take as long as one layer, whatever the depth.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from qwenjax.cache import KVCache, advanced, append, cache_shapes, fill, rounded
from qwenjax.config import ModelConfig, check_architecture
from qwenjax.errors import InputError
from qwenjax.layers import apply_rope, attention, causal_mask, contract, rms_norm, rope_tables, swiglu
from qwenjax.moe import choose_experts, router_logits, run_experts
from qwenjax.ops import Scope
from qwenjax.weights import Params, init_params, layer_scopes, leaves_of, param_shapes

Array = jax.Array
KeyValue = tuple[Array, Array]


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
        with jax.named_scope("o_proj"):
            out_BTD = contract("o_proj", mixed_BTKGH, self.o_proj[...])
            if self.config.attention_o_bias:
                out_BTD = out_BTD + self.o_bias[...]
        with jax.named_scope("attention_residual"):
            x_BTD = x_BTD + out_BTD
        with jax.named_scope("post_norm"):
            h_BTD = rms_norm(x_BTD, self.post_norm[...], self.config.rms_norm_eps)
        mixed_BTD, logits_BTE = self.experts(h_BTD) if self.is_sparse else (self.mlp(h_BTD), None)
        with jax.named_scope("mlp_residual"):
            return x_BTD + mixed_BTD, kept, logits_BTE

    def project(self, h_BTD: Array, rope: KeyValue) -> tuple[Array, Array, Array]:
        """Queries [B, T, K, G, H], keys and values [B, T, K, H]; queries and keys normed (Qwen3) and rotated."""
        with jax.named_scope("qkv_proj"):
            qkv_BTKJH = contract("qkv_proj", h_BTD, self.qkv_proj[...])
            if self.config.qkv_bias:
                qkv_BTKJH = qkv_BTKJH + self.qkv_bias[...]
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

    def mlp(self, h_BTD: Array) -> Array:
        """down(silu(gate) * up)."""
        with jax.named_scope("gate_up_proj"):
            gate_up_BTCF = contract("gate_up_proj", h_BTD, self.gate_up_proj[...])
        with jax.named_scope("swiglu"):
            hidden_BTF = swiglu(gate_up_BTCF)
        with jax.named_scope("down_proj"):
            return contract("down_proj", hidden_BTF, self.down_proj[...])

    def experts(self, h_BTD: Array) -> tuple[Array, Array]:
        """The routed experts' weighted sum, plus the shared expert's output times its own gate (Qwen2-MoE), and the
        router's logits."""
        config = self.config
        logits_BTE = router_logits(h_BTD, self.router[...])
        weights_BTA, chosen_BTA = choose_experts(logits_BTE, config.num_experts_per_tok, config.norm_topk_prob)
        stacks = self.experts_gate_up_proj[...], self.experts_down_proj[...]
        routed_BTD = run_experts(h_BTD, weights_BTA, chosen_BTA, *stacks)
        if not config.has_shared_expert:
            return routed_BTD, logits_BTE
        with jax.named_scope("shared_gate_up_proj"):
            gate_up_BTCF = contract("shared_gate_up_proj", h_BTD, self.shared_gate_up_proj[...])
        with jax.named_scope("shared_swiglu"):
            hidden_BTF = swiglu(gate_up_BTCF)
        with jax.named_scope("shared_down_proj"):
            shared_BTD = contract("shared_down_proj", hidden_BTF, self.shared_down_proj[...])
        with jax.named_scope("shared_expert_gate"):
            gate_BT = jax.nn.sigmoid(contract("shared_expert_gate", h_BTD, self.shared_expert_gate[...]))
            return routed_BTD + gate_BT[..., None] * shared_BTD, logits_BTE


class Decoder(nnx.Module):
    """A whole model as a Flax module; `nnx.to_pure_dict(nnx.state(decoder))` is the `params` of the functions below."""

    def __init__(
        self, config: ModelConfig, params: Params | None = None, *, seed: int = 0, dtype: str = "float32"
    ) -> None:
        params = init_params(config, seed, dtype) if params is None else params
        self.config = config
        _head(config, params)
        for leaf in leaves_of(config, ("model",)):
            setattr(self, leaf, nnx.Param(params[leaf]))
        self.layers = nnx.List(
            [Block(config, layer_scopes(config, i), params["layers"][i]) for i in range(config.num_hidden_layers)]
        )

    def __call__(self, tokens_BT: Array) -> Array:
        logits_BTV: Array = forward(self.config, nnx.to_pure_dict(nnx.state(self, nnx.Param)), tokens_BT)
        return logits_BTV


@cache
def _block_graph(config: ModelConfig, scopes: tuple[Scope, ...]) -> nnx.GraphDef[Block]:
    shapes = {leaf: jax.ShapeDtypeStruct(sizes, jnp.float32) for leaf, (sizes, _) in leaves_of(config, scopes).items()}
    return nnx.graphdef(Block(config, scopes, shapes))


@partial(jax.jit, static_argnames=("config", "scopes"))
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
    block: Block = nnx.merge(_block_graph(config, scopes), params)
    return block(x_BTD, rope, mask_BTS, cached, lengths_B)


@partial(jax.jit, static_argnames=("config", "scopes"))
def run_block_to_train(
    config: ModelConfig, scopes: tuple[Scope, ...], params: Params, x_BTD: Array, rope: KeyValue, mask_BTS: Array
) -> tuple[Array, Array | None]:
    """A block on whole sequences, nothing cached: the residual stream, and the router's logits if it has one."""
    block: Block = nnx.merge(_block_graph(config, scopes), params)
    x_BTD, _, logits_BTE = block.with_router(x_BTD, rope, mask_BTS, None, None)
    return x_BTD, logits_BTE


def _hidden(
    config: ModelConfig,
    params: Params,
    tokens_BT: Array,
    positions_BT: Array,
    key_positions_S: Array,
    cache: KVCache | None,
    lengths_B: Array | None,
) -> tuple[Array, list[KeyValue]]:
    """The residual stream after the last layer, and each layer's keys and values."""
    x_BTD, rope, masks = _start(config, params, tokens_BT, positions_BT, key_positions_S)
    kept = []
    for i, window in enumerate(config.sliding_windows):
        cached = None if cache is None else (cache.keys[i], cache.values[i])
        x_BTD, kv = _run_block(
            config, layer_scopes(config, i), params["layers"][i], x_BTD, rope, masks[window], cached, lengths_B
        )
        kept.append(kv)
    return x_BTD, kept


def _start(
    config: ModelConfig, params: Params, tokens_BT: Array, positions_BT: Array, key_positions_S: Array
) -> tuple[Array, KeyValue, dict[int | None, Array]]:
    """What the first layer gets: the embedded tokens, the rotations, and the mask of each width of window."""
    check_runnable(config)
    with jax.named_scope("embed"):
        x_BTD = params["embed_tokens"][tokens_BT]
    with jax.named_scope("rope"):
        rope = rope_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, x_BTD.dtype)
    with jax.named_scope("softmax"):
        masks = {window: causal_mask(positions_BT, key_positions_S, window) for window in set(config.sliding_windows)}
    return x_BTD, rope, masks


def _final_norm(config: ModelConfig, params: Params, x_BTD: Array) -> Array:
    with jax.named_scope("final_norm"):
        return rms_norm(x_BTD, params["final_norm"], config.rms_norm_eps)


def _unembed(config: ModelConfig, params: Params, x_BUD: Array) -> Array:
    head_VD = params[_head(config, params)]
    x_BUD = _final_norm(config, params, x_BUD)
    with jax.named_scope("unembed"):
        return contract("unembed", x_BUD, head_VD)


def _head(config: ModelConfig, params: Params) -> str:
    """The leaf that is the output head; refuses the parameters of an embedding model, which have none."""
    head = "embed_tokens" if config.tie_word_embeddings else "lm_head"
    if head not in params:
        problem = "isn't among the parameters, and logits need it"
        raise InputError(head, None, problem, "Load the checkpoint with its output head, or use hidden_states.")
    return head


def forward_impl(config: ModelConfig, params: Params, tokens_BT: Array) -> Array:
    """Logits of every position, [B, T, V], of [B, T] token ids, without a cache."""
    positions_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
    x_BTD, _ = _hidden(config, params, tokens_BT, positions_BT, positions_T, None, None)
    return _unembed(config, params, x_BTD)


def hidden_states_impl(config: ModelConfig, params: Params, tokens_BT: Array) -> Array:
    """What the output head would see, [B, T, D]: the last layer's output, normed. It needs no output head.

    Embedding models take a text's vector from the last position (transformers' last_hidden_state of the base model).
    """
    positions_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
    x_BTD, _ = _hidden(config, params, tokens_BT, positions_BT, positions_T, None, None)
    return _final_norm(config, params, x_BTD)


def forward_to_train(
    config: ModelConfig, params: Params, tokens_BT: Array, run_block: Callable[..., Any] = run_block_to_train
) -> tuple[Array, tuple[Array, ...]]:
    """Logits of every position, [B, T, V], and of the router of each sparse layer, [B, T, E].

    `run_block` runs a block in place of `run_block_to_train`: the same one, but recomputed in the backward pass, say.
    """
    positions_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
    x_BTD, rope, masks = _start(config, params, tokens_BT, positions_BT, positions_T)
    routers = []
    for i, window in enumerate(config.sliding_windows):
        x_BTD, logits_BTE = run_block(config, layer_scopes(config, i), params["layers"][i], x_BTD, rope, masks[window])
        routers += [] if logits_BTE is None else [logits_BTE]
    return _unembed(config, params, x_BTD), tuple(routers)


def prefill_impl(
    config: ModelConfig, params: Params, tokens_BT: Array, lengths_B: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Runs prompts of `lengths` tokens, right-padded to T, into an empty cache: last logits [B, V], and the cache."""
    positions_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(positions_T, tokens_BT.shape)
    x_BTD, kept = _hidden(config, params, tokens_BT, positions_BT, positions_T, cache, None)
    with jax.named_scope("final_norm"):  # the output head sees one position of each row
        last_BUD = jnp.take_along_axis(x_BTD, (lengths_B - 1)[:, None, None], axis=1)
    logits_BUV = _unembed(config, params, last_BUD)
    keys, values = zip(*kept, strict=True)
    return logits_BUV[:, 0], KVCache(keys, values, lengths_B.astype(jnp.int32))


def extend_impl(
    config: ModelConfig, params: Params, tokens_BT: Array, counts_B: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Runs `counts` more tokens of each row, right-padded to T, after what the cache holds: last logits [B, V], cache.

    A row may add none; its logits mean nothing then. Pieces of a prompt one after the other equal the whole prefill.
    """
    positions_BT = cache.lengths[:, None] + jnp.arange(tokens_BT.shape[1])
    key_positions_S = jnp.arange(cache.capacity)
    x_BTD, kept = _hidden(config, params, tokens_BT, positions_BT, key_positions_S, cache, cache.lengths)
    with jax.named_scope("final_norm"):
        last_BUD = jnp.take_along_axis(x_BTD, jnp.maximum(counts_B - 1, 0)[:, None, None], axis=1)
    logits_BUV = _unembed(config, params, last_BUD)
    keys, values = zip(*kept, strict=True)
    return logits_BUV[:, 0], KVCache(keys, values, advanced(cache, counts_B))


def decode_step_impl(config: ModelConfig, params: Params, tokens_B: Array, cache: KVCache) -> tuple[Array, KVCache]:
    """Runs one token of each row at its own position: logits [B, V], and the cache one longer.

    A full row stays as it is, and its logits mean nothing: its token has no place.
    """
    key_positions_S = jnp.arange(cache.capacity)
    x_BTD, kept = _hidden(
        config, params, tokens_B[:, None], cache.lengths[:, None], key_positions_S, cache, cache.lengths
    )
    logits_BUV = _unembed(config, params, x_BTD)
    keys, values = zip(*kept, strict=True)
    return logits_BUV[:, 0], KVCache(keys, values, advanced(cache, 1))


forward = jax.jit(forward_impl, static_argnums=0)
hidden_states = jax.jit(hidden_states_impl, static_argnums=0)
prefill = jax.jit(prefill_impl, static_argnums=0, donate_argnames="cache")
extend = jax.jit(extend_impl, static_argnums=0, donate_argnames="cache")
decode_step = jax.jit(decode_step_impl, static_argnums=0, donate_argnames="cache")

Phase = Literal["prefill", "decode"]


def check_runnable(config: ModelConfig) -> ModelConfig:
    """Refuses what the estimates can count and this model code can't run."""
    check_architecture(config)
    if config.quantization is not None:
        raise InputError(
            "quantization_config",
            config.quantization.method,
            "quantised weights don't run here; only their costs are known",
            "Use the unquantised checkpoint.",
        )
    return config


def step_shapes(
    config: ModelConfig, phase: Phase, batch: int, query_len: int, context: int, dtype: str = "bfloat16"
) -> tuple[Params, tuple[jax.ShapeDtypeStruct, ...], KVCache]:
    """Arguments of `prefill` or `decode_step` as shapes: params, what follows them, and the cache."""
    ids = jax.ShapeDtypeStruct((batch, query_len) if phase == "prefill" else (batch,), jnp.int32)
    lengths = (jax.ShapeDtypeStruct((batch,), jnp.int32),) if phase == "prefill" else ()
    return param_shapes(config, dtype), (ids, *lengths), cache_shapes(config, batch, context, dtype)
