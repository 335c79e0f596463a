"""The losses of transformers' causal models: next token, and the router's balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from qwenjax.block import run_block_to_train
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.model import forward_to_train
from qwenjax.train.settings import Remat
from qwenjax.weights import Params

Array = jax.Array
IGNORED = -100  # a label that doesn't count, as in torch's cross_entropy


class Losses(NamedTuple):
    """What is minimised, and its parts: nats per label, and the balance (0 where it isn't asked for)."""

    total: Array
    next_token: Array
    balance: Array


def labels_of(tokens_BT: Array, mask_BT: Array | None) -> Array:
    """The tokens as labels, -100 where the mask is 0."""
    return tokens_BT if mask_BT is None else jnp.where(mask_BT.astype(bool), tokens_BT, IGNORED)


def count_labels(labels_BT: Array) -> Array:
    """Labels that count: the first of each row is nobody's next token."""
    return (labels_BT[:, 1:] != IGNORED).sum()


def next_token_loss(logits_BTV: Array, labels_BT: Array, num_labels: Array | None = None) -> Array:
    """Mean cross-entropy, nats, of each position's logits in float32 against the next label; -100 doesn't count.

    The sum is divided by `num_labels`, by default this batch's own: a part of a batch gets the whole's. Without any
    label it is nan, as in torch.
    """
    wanted_BT = labels_BT[:, 1:]
    counts_BT = wanted_BT != IGNORED
    log_probs_BTV = jax.nn.log_softmax(logits_BTV[:, :-1].astype(jnp.float32), axis=-1)
    picked_BT = jnp.take_along_axis(log_probs_BTV, jnp.where(counts_BT, wanted_BT, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(counts_BT, picked_BT, 0).sum() / (counts_BT.sum() if num_labels is None else num_labels)


def load_balancing_loss(routers_BTE: Sequence[Array], experts_per_token: int, mask_BT: Array | None = None) -> Array:
    """E x sum over experts of (share of tokens that chose it) x (its mean probability), over all sparse layers at once.

    transformers' `load_balancing_loss_func` after Switch Transformer (arXiv 2101.03961, equations 4 to 6). Even routing
    gives experts_per_token. Masked tokens don't count. Probabilities in float32; no layers, no loss: 0.
    """
    if not routers_BTE:
        return jnp.zeros((), jnp.float32)
    num_experts = routers_BTE[0].shape[-1]
    weights_BT = jnp.ones(routers_BTE[0].shape[:2]) if mask_BT is None else mask_BT.astype(jnp.float32)
    chosen_E, probs_E = jnp.zeros(num_experts), jnp.zeros(num_experts)
    for logits_BTE in routers_BTE:
        probs_BTE = jax.nn.softmax(logits_BTE.astype(jnp.float32), axis=-1)
        _, chosen_BTA = jax.lax.top_k(probs_BTE, experts_per_token)
        weights_BTA = jnp.broadcast_to(weights_BT[..., None], chosen_BTA.shape)
        chosen_E = chosen_E.at[chosen_BTA].add(weights_BTA)
        probs_E = probs_E + (probs_BTE * weights_BT[..., None]).sum(axis=(0, 1))
    num_tokens = len(routers_BTE) * weights_BT.sum()
    return num_experts * jnp.sum(chosen_E / num_tokens * (probs_E / num_tokens))


def lm_loss(
    config: ModelConfig,
    params: Params,
    tokens_BT: Array,
    mask_BT: Array | None = None,
    *,
    router_aux_loss_coef: float | None = None,
    remat: Remat = "none",
    num_labels: Array | None = None,
) -> Losses:
    """The next-token loss of right-padded rows, and the router's weighted balance if its coefficient is given.

    The mask is 1 for a token and 0 for padding, which neither is a label nor counts as routed.
    """
    labels_BT = labels_of(tokens_BT, mask_BT)
    logits_BTV, routers_BTE = forward_to_train(config, params, tokens_BT, block_runner(remat))
    next_token = next_token_loss(logits_BTV, labels_BT, num_labels)
    if router_aux_loss_coef is None:
        return Losses(next_token, next_token, jnp.zeros((), jnp.float32))
    balance = load_balancing_loss(routers_BTE, config.num_experts_per_tok, mask_BT)
    return Losses(next_token + router_aux_loss_coef * balance, next_token, balance)


def block_runner(remat: Remat) -> Callable[..., Any]:
    """How a block runs under this policy: as it is, or recomputed in the backward pass.

    `full` keeps each block's input alone; `dots` also what comes out of products with weights, but not the scores.
    """
    if remat == "none":
        return run_block_to_train
    saveable = jax.checkpoint_policies
    if remat == "full":
        policy = saveable.nothing_saveable
    elif remat == "dots":
        policy = saveable.dots_with_no_batch_dims_saveable
    else:
        raise InputError("remat", remat, "is no known policy", "Use one of none, full, dots.")
    runner: Callable[..., Any] = partial(jax.checkpoint, policy=policy, static_argnums=(0, 1))(run_block_to_train)
    return runner
