"""The decoder in Flax: a module of blocks whose parameters come from the inventory, and the pure functions that run it.

jit sees functions of (config, params, ...): `params` is a plain dict of arrays, the state of a `Decoder`. On a GPU the
steps with a cache run the fused blocks of `qwenjax.fused` in place of the plain ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from qwenjax.block import Block, KeyValue, run_block, run_block_to_train
from qwenjax.cache import KVCache, advanced, cache_shapes
from qwenjax.config import ModelConfig, check_architecture
from qwenjax.errors import InputError
from qwenjax.fused import Stream, add_norm, fused_run_block
from qwenjax.kernels.choice import NO_KERNELS, Kernels, resolved
from qwenjax.layers import causal_mask, contract, rms_norm, rope_tables
from qwenjax.weights import Params, init_params, layer_scopes, leaves_of, param_shapes

Array = jax.Array


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
        x_BTD, kv = run_block(
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


def _run_cached(
    config: ModelConfig,
    params: Params,
    tokens_BT: Array,
    positions_BT: Array,
    cache: KVCache,
    lengths_B: Array | None,
    last_B: Array | None,
    kernels: Kernels | None,
) -> tuple[Array, tuple[Array, ...], tuple[Array, ...]]:
    """Logits [B, V] after the token at `last` of each row, or its only one, and every layer's keys and values.

    `lengths` are the tokens that the cache holds before these, None of an empty one.
    """
    chosen = resolved(kernels)
    key_positions_S = positions_BT[0] if lengths_B is None else jnp.arange(cache.capacity)
    if chosen == NO_KERNELS:
        x_BTD, kept = _hidden(config, params, tokens_BT, positions_BT, key_positions_S, cache, lengths_B)
        logits_BUV = _unembed(config, params, _last(x_BTD, last_B))
    else:
        x_BTD, rope, masks = _start(config, params, tokens_BT, positions_BT, key_positions_S)
        stream: Stream = x_BTD, None
        kept = []
        for i, window in enumerate(config.sliding_windows):
            cached, layer = (cache.keys[i], cache.values[i]), params["layers"][i]
            stream, kv = fused_run_block(
                config, layer_scopes(config, i), window, chosen, layer, stream, rope, masks[window], cached, lengths_B
            )
            kept.append(kv)
        stream = jax.tree.map(lambda x: _last(x, last_B), stream)
        scopes = "mlp_residual", "final_norm"
        _, x_BUD = add_norm(chosen, scopes, stream, params["final_norm"], config.rms_norm_eps)
        logits_BUV = _logits(config, params, x_BUD)
    keys, values = zip(*kept, strict=True)
    return logits_BUV[:, 0], keys, values


def _last(x_BTD: Array, last_B: Array | None) -> Array:
    """The one position of each row that the output head sees, [B, 1, D]."""
    if last_B is None:
        return x_BTD
    with jax.named_scope("final_norm"):
        return jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)


def _final_norm(config: ModelConfig, params: Params, x_BTD: Array) -> Array:
    with jax.named_scope("final_norm"):
        return rms_norm(x_BTD, params["final_norm"], config.rms_norm_eps)


def _unembed(config: ModelConfig, params: Params, x_BUD: Array) -> Array:
    return _logits(config, params, _final_norm(config, params, x_BUD))


def _logits(config: ModelConfig, params: Params, normed_BUD: Array) -> Array:
    head_VD = params[_head(config, params)]
    with jax.named_scope("unembed"):
        return contract("unembed", normed_BUD, head_VD)


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
    config: ModelConfig,
    params: Params,
    tokens_BT: Array,
    lengths_B: Array,
    cache: KVCache,
    *,
    kernels: Kernels | None = None,
) -> tuple[Array, KVCache]:
    """Runs prompts of `lengths` tokens, right-padded to T, into an empty cache: last logits [B, V], and the cache.

    `kernels` as in `qwenjax.kernels.choice`: by default all that this process's one GPU can run.
    """
    positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
    with jax.named_scope("final_norm"):
        last_B = lengths_B - 1
    logits_BV, keys, values = _run_cached(config, params, tokens_BT, positions_BT, cache, None, last_B, kernels)
    return logits_BV, KVCache(keys, values, lengths_B.astype(jnp.int32))


def extend_impl(
    config: ModelConfig,
    params: Params,
    tokens_BT: Array,
    counts_B: Array,
    cache: KVCache,
    *,
    kernels: Kernels | None = None,
) -> tuple[Array, KVCache]:
    """Runs `counts` more tokens of each row, right-padded to T, after what the cache holds: last logits [B, V], cache.

    A row may add none; its logits mean nothing then. Pieces of a prompt one after the other equal the whole prefill.
    """
    positions_BT = cache.lengths[:, None] + jnp.arange(tokens_BT.shape[1])
    with jax.named_scope("final_norm"):
        last_B = jnp.maximum(counts_B - 1, 0)
    logits_BV, keys, values = _run_cached(
        config, params, tokens_BT, positions_BT, cache, cache.lengths, last_B, kernels
    )
    return logits_BV, KVCache(keys, values, advanced(cache, counts_B))


def decode_step_impl(
    config: ModelConfig, params: Params, tokens_B: Array, cache: KVCache, *, kernels: Kernels | None = None
) -> tuple[Array, KVCache]:
    """Runs one token of each row at its own position: logits [B, V], and the cache one longer.

    A full row stays as it is, and its logits mean nothing: its token has no place.
    """
    logits_BV, keys, values = _run_cached(
        config, params, tokens_B[:, None], cache.lengths[:, None], cache, cache.lengths, None, kernels
    )
    return logits_BV, KVCache(keys, values, advanced(cache, 1))


forward = jax.jit(forward_impl, static_argnums=0)
hidden_states = jax.jit(hidden_states_impl, static_argnums=0)
prefill = jax.jit(prefill_impl, static_argnums=0, static_argnames="kernels", donate_argnames="cache")
extend = jax.jit(extend_impl, static_argnums=0, static_argnames="kernels", donate_argnames="cache")
decode_step = jax.jit(decode_step_impl, static_argnums=0, static_argnames="kernels", donate_argnames="cache")

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
