"""Several sequences in one row, one after the other, as if each stood alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qwenjax.block import run_block
from qwenjax.config import ModelConfig
from qwenjax.layers import causal_mask, rope_tables
from qwenjax.model import _unembed, check_runnable
from qwenjax.weights import Params, layer_scopes

Array = jax.Array


def segment_starts(segments_BT: Array) -> Array:
    """Where each token's sequence begins, [B, T]: a sequence is a run of equal segment ids."""
    places_T = jnp.arange(segments_BT.shape[1])
    changed_BT = jnp.diff(segments_BT, axis=1, prepend=segments_BT[:, :1]) != 0
    return jax.lax.cummax(jnp.where(changed_BT, places_T, 0), axis=1)


def forward_packed_impl(config: ModelConfig, params: Params, tokens_BT: Array, segments_BT: Array) -> Array:
    """Logits of every position, [B, T, V]: positions count from the start of each sequence, which sees only itself.

    `segments` holds one id for each token, equal along a sequence; padding is a sequence of its own.
    """
    check_runnable(config)
    places_T = jnp.arange(tokens_BT.shape[1])
    places_BT = jnp.broadcast_to(places_T, tokens_BT.shape)
    starts_BT = segment_starts(segments_BT)
    same_BTS = starts_BT[:, :, None] == starts_BT[:, None, :]
    with jax.named_scope("embed"):
        x_BTD = params["embed_tokens"][tokens_BT]
    positions_BT = places_BT - starts_BT
    with jax.named_scope("rope"):
        rope = rope_tables(positions_BT, config.head_dim, config.rope_theta, config.rope_scaling, x_BTD.dtype)
    with jax.named_scope("softmax"):
        windows = set(config.sliding_windows)
        masks = {window: causal_mask(places_BT, places_T, window) & same_BTS for window in windows}
    for i, window in enumerate(config.sliding_windows):
        scopes = layer_scopes(config, i)
        x_BTD, _ = run_block(config, scopes, params["layers"][i], x_BTD, rope, masks[window], None, None)
    return _unembed(config, params, x_BTD)


forward_packed = jax.jit(forward_packed_impl, static_argnums=0)
