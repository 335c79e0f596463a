"""A decoder layer for a GPU: the plain block with its small steps joined into few kernels, each of which can be off.

A layer hands on the residual stream and what it adds to it apart, so that the next norm's kernel does the sum.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qwenjax.block import PLAIN, Block, KeyValue, Products, block_graph
from qwenjax.cache import check_room
from qwenjax.config import ModelConfig
from qwenjax.kernels import decode_attention as decoding
from qwenjax.kernels import experts as routed
from qwenjax.kernels import norm as norms
from qwenjax.kernels import prefill_attention as prefilling
from qwenjax.kernels import product as narrow
from qwenjax.kernels import rope_fill, routing
from qwenjax.kernels.choice import Kernels
from qwenjax.layers import attention, rms_norm
from qwenjax.ops import Scope
from qwenjax.weights import Params

Array = jax.Array
Stream = tuple[Array, Array | None]  # the residual stream [B, T, D], and what is to be added to it


def _fused_run_block(
    config: ModelConfig,
    scopes: tuple[Scope, ...],
    window: int | None,
    kernels: Kernels,
    params: Params,
    stream: Stream,
    rope: KeyValue,
    mask_BTS: Array,
    cached: KeyValue,
    lengths_B: Array | None,
) -> tuple[Stream, KeyValue]:
    """One layer over T new tokens of each row, which follow `lengths` cached ones (none in a prefill)."""
    block: Block = nnx.merge(block_graph(config, scopes), params)
    x_BTD, h_BTD = add_norm(kernels, ("mlp_residual", "input_norm"), stream, block.input_norm[...], config.rms_norm_eps)
    products = _products(kernels)
    qkv_BTKJH = block.packed_qkv(h_BTD, products)
    mixed_BTKGH, kept = _attend(kernels, block, window, qkv_BTKJH, rope, mask_BTS, cached, lengths_B)
    stream = x_BTD, block.attended(mixed_BTKGH, products)
    x_BTD, h_BTD = add_norm(
        kernels, ("attention_residual", "post_norm"), stream, block.post_norm[...], config.rms_norm_eps
    )
    return (x_BTD, block.experts(h_BTD, products)[0] if block.is_sparse else block.mlp(h_BTD, products)), kept


fused_run_block = jax.jit(_fused_run_block, static_argnames=("config", "scopes", "window", "kernels"))


def add_norm(
    kernels: Kernels, scopes: tuple[str, str], stream: Stream, weight_D: Array, eps: float
) -> tuple[Array, Array]:
    """The sum of a stream and its RMSNorm; `scopes` name the two ops."""
    x_BTD, delta_BTD = stream

    def plain(x_ND: Array, *rest: Array) -> tuple[Array, Array]:
        *delta, weight_D = rest
        with jax.named_scope(scopes[0]):
            x_ND = x_ND + delta[0] if delta else x_ND
        with jax.named_scope(scopes[1]):
            return x_ND, rms_norm(x_ND, weight_D, eps)

    def kernel(x_ND: Array, *rest: Array, interpret: bool = False) -> tuple[Array, Array]:
        if len(rest) == 1:
            return x_ND, norms.norm(x_ND, *rest, eps=eps, interpret=interpret)
        return norms.add_norm(x_ND, *rest, eps=eps, interpret=interpret)

    rows = [_rows(x) for x in (x_BTD, delta_BTD) if x is not None]
    with jax.named_scope(scopes[1]):
        total_ND, normed_ND = kernels.run("norm", norms.fits(rows[0], weight_D), kernel, plain, *rows, weight_D)
    return total_ND.reshape(x_BTD.shape), normed_ND.reshape(x_BTD.shape)


def _products(kernels: Kernels) -> Products:
    """Products of few rows by their own kernels."""

    def multiply(op: str, x: Array, weight: Array) -> Array:
        plain = partial(PLAIN.contract, op)
        result = jax.eval_shape(plain, x, weight).shape

        def merged(x: Array, weight: Array) -> tuple[Array, Array]:
            """Rows and summed axes of x merged, [M, D], and those of a weight, whose columns come first, [F, D]."""
            x_MD = x.reshape(prod(x.shape[:2]), -1)
            return x_MD, weight.reshape(-1, x_MD.shape[1])

        def kernel(x: Array, weight: Array, interpret: bool = False) -> Array:
            return narrow.product(*merged(x, weight), interpret=interpret).reshape(result)

        made: Array = kernels.run("product", narrow.fits(*merged(x, weight)), kernel, plain, x, weight)
        return made

    def gated(ops: tuple[str, str], h_BTD: Array, gate_up_CFD: Array) -> Array:
        def kernel(h_BTD: Array, gate_up_CFD: Array, interpret: bool = False) -> Array:
            with jax.named_scope(ops[0]):
                hidden_NF = narrow.gated(_rows(h_BTD), gate_up_CFD, interpret=interpret)
            return hidden_NF.reshape(*h_BTD.shape[:2], -1)

        fits = narrow.fits(_rows(h_BTD), gate_up_CFD)
        hidden_BTF: Array = kernels.run("product", fits, kernel, partial(PLAIN.gated, ops), h_BTD, gate_up_CFD)
        return hidden_BTF

    return Products(multiply, gated, partial(_choose, kernels), partial(_experts, kernels))


def _choose(kernels: Kernels, logits_BTE: Array, per_token: int, renormalise: bool) -> tuple[Array, Array]:
    """Weights and indices of each token's experts, both [B, T, A]."""

    def kernel(logits_BTE: Array, interpret: bool = False) -> tuple[Array, ...]:
        chosen = routing.choose(
            _rows(logits_BTE), experts_per_token=per_token, renormalise=renormalise, interpret=interpret
        )
        return tuple(array_NA.reshape(*logits_BTE.shape[:2], per_token) for array_NA in chosen)

    def plain(logits_BTE: Array) -> tuple[Array, Array]:
        return PLAIN.choose(logits_BTE, per_token, renormalise)

    fits = routing.fits_choose(_rows(logits_BTE), per_token)
    weights_BTA, chosen_BTA = kernels.run("experts", fits, kernel, plain, logits_BTE)
    return weights_BTA, chosen_BTA


def _experts(kernels: Kernels, x_BTD: Array, weights_BTA: Array, chosen_BTA: Array, *stacks: Array) -> Array:
    """Each token's weighted sum over its experts, [B, T, D]."""

    def kernel(x_BTD: Array, weights_BTA: Array, chosen_BTA: Array, *stacks: Array, interpret: bool = False) -> Array:
        rows = _rows(x_BTD), _rows(weights_BTA), _rows(chosen_BTA)
        return routed.experts(*rows, *stacks, interpret=interpret).reshape(x_BTD.shape)

    fits = routed.fits(_rows(x_BTD), _rows(weights_BTA), *stacks)
    mixed_BTD: Array = kernels.run("experts", fits, kernel, PLAIN.experts, x_BTD, weights_BTA, chosen_BTA, *stacks)
    return mixed_BTD


def _rows(x: Array) -> Array:
    """One row for each token of each sequence."""
    return x.reshape(-1, x.shape[-1])


def _attend(
    kernels: Kernels,
    block: Block,
    window: int | None,
    qkv_BTKJH: Array,
    rope: KeyValue,
    mask_BTS: Array,
    cached: KeyValue,
    lengths_B: Array | None,
) -> tuple[Array, KeyValue]:
    """Attention of packed projections, [B, T, K, G, H], and the caches with the new keys and values."""
    config = block.config
    eps = config.rms_norm_eps if config.qk_norm else None
    weights = (block.q_norm[...], block.k_norm[...]) if config.qk_norm else ()

    def plain(qkv_BTKJH: Array, cos: Array, sin: Array, lengths_B: Array | None, *rest: Array) -> Any:
        q_BTKGH, k_BTKH, v_BTKH = block.rotated(qkv_BTKJH, (cos, sin))
        k_BKSH, v_BKSH, kept = block.remember(k_BTKH, v_BTKH, (rest[0], rest[1]), lengths_B)
        return attention(q_BTKGH, k_BKSH, v_BKSH, mask_BTS), kept

    def one(qkv_BTKJH: Array, cos: Array, sin: Array, *rest: Array, interpret: bool = False) -> Any:
        with jax.named_scope("scores"):
            mixed_BKGH, *kept = decoding.decode_attention(
                qkv_BTKJH[:, 0], cos[:, 0], sin[:, 0], *rest, window=window, eps=eps, interpret=interpret
            )
        return mixed_BKGH[:, None], tuple(kept)

    def several(
        qkv_BTKJH: Array, cos: Array, sin: Array, lengths_B: Array | None, *rest: Array, interpret: bool = False
    ) -> Any:
        keys, values, *norm_weights = rest
        starts_B = jnp.zeros(len(qkv_BTKJH), jnp.int32) if lengths_B is None else lengths_B
        q_norm, k_norm = norm_weights or (None, None)
        filled = rope_fill.rope_fill(
            qkv_BTKJH, q_norm, k_norm, cos, sin, starts_B, keys, values, eps=config.rms_norm_eps, interpret=interpret
        )
        mixed_BTKGH = prefilling.prefill_attention(*filled, starts_B, window=window, interpret=interpret)
        return mixed_BTKGH, filled[1:]

    batch, tokens = qkv_BTKJH.shape[:2]
    if lengths_B is None:
        check_room(batch, tokens, cached[0])
    decodes = lengths_B is not None and tokens == 1
    queries = qkv_BTKJH[..., :-2, :]
    fits = (
        decoding.fits(qkv_BTKJH[:, 0], *cached)
        if decodes
        else rope_fill.fits(qkv_BTKJH, *cached) and prefilling.fits(queries, *cached)
    )
    kernel = one if decodes else several
    mixed_BTKGH, kept = kernels.run("attention", fits, kernel, plain, qkv_BTKJH, *rope, lengths_B, *cached, *weights)
    return mixed_BTKGH, kept
