"""One training step as a single jitted function, on a state whose buffers it reuses."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from qwenjax.config import ModelConfig
from qwenjax.ops import weights_of
from qwenjax.train.loss import Losses, count_labels, labels_of, lm_loss
from qwenjax.train.settings import TrainConfig
from qwenjax.weights import Params

Array = jax.Array


class TrainState(NamedTuple):
    """All that a run needs to go on: `step` steps are done, and `rng` (a key's data) gives the batches of all steps."""

    params: Params
    opt_state: Any
    step: Array
    rng: Array


class Metrics(NamedTuple):
    """Of one step, before its update: losses in nats, the gradient's norm before clipping, the rate that was used."""

    loss: Array
    next_token_loss: Array
    balance_loss: Array
    grad_norm: Array
    learning_rate: Array


def learning_rate_schedule(settings: TrainConfig) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if settings.warmup_steps else settings.learning_rate,
        peak_value=settings.learning_rate,
        warmup_steps=settings.warmup_steps,
        decay_steps=settings.steps,
        end_value=settings.learning_rate * settings.final_learning_rate_fraction,
    )


def optimizer_of(config: ModelConfig, settings: TrainConfig) -> optax.GradientTransformation:
    """AdamW after clipping by the global norm; matrices decay, norms and biases don't."""
    adamw = optax.adamw(
        learning_rate_schedule(settings),
        b1=settings.beta1,
        b2=settings.beta2,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        mask=partial(decay_mask, config),
    )
    return adamw if settings.clip_norm is None else optax.chain(optax.clip_by_global_norm(settings.clip_norm), adamw)


def decay_mask(config: ModelConfig, params: Params) -> Any:
    """True for the leaves that weight decay pulls towards 0: those the inventory starts at random."""
    decayed = {weight.leaf for weight in weights_of(config) if weight.init == "normal"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in decayed, params)


def init_state(config: ModelConfig, settings: TrainConfig, params: Params) -> TrainState:
    """The state before the first step. It copies the parameters, as `train_step` donates its own."""
    params = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    rng = jax.random.key_data(jax.random.key(settings.seed, impl="threefry2x32"))
    return TrainState(params, optimizer_of(config, settings).init(params), jnp.zeros((), jnp.int32), rng)


def train_step_impl(
    config: ModelConfig, settings: TrainConfig, state: TrainState, tokens_BT: Array, mask_BT: Array | None = None
) -> tuple[TrainState, Metrics]:
    """One update from [B, T] tokens, of which the mask's are counted (all by default).

    The parts of an accumulated batch sum to the next-token gradient of the whole; the router's balance is each part's
    own, averaged, since the shares of a part aren't those of the whole.
    """
    losses, gradients = accumulate(config, settings, state.params, tokens_BT, mask_BT)
    updates, opt_state = optimizer_of(config, settings).update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    rate = jnp.asarray(learning_rate_schedule(settings)(state.step), jnp.float32)
    metrics = Metrics(*losses, optax.tree.norm(gradients), rate)
    return TrainState(params, opt_state, state.step + 1, state.rng), metrics


def accumulate(
    config: ModelConfig, settings: TrainConfig, params: Params, tokens_BT: Array, mask_BT: Array | None
) -> tuple[Losses, Params]:
    """Losses and gradients of a batch, one part after the other, with the memory of one part and one more gradient."""
    parts = settings.accumulation_steps
    mask_BT = jnp.ones(tokens_BT.shape, bool) if mask_BT is None else mask_BT
    num_labels = count_labels(labels_of(tokens_BT, mask_BT))
    coef = settings.router_aux_loss_coef

    def loss_of(params: Params, tokens_BT: Array, mask_BT: Array) -> tuple[Array, Losses]:
        part_coef = None if coef is None else coef / parts
        losses = lm_loss(
            config,
            params,
            tokens_BT,
            mask_BT,
            router_aux_loss_coef=part_coef,
            remat=settings.remat,
            num_labels=num_labels,
        )
        return losses.total, losses._replace(balance=losses.balance / parts)

    gradient_of = jax.grad(loss_of, has_aux=True)
    if parts == 1:
        gradients, losses = gradient_of(params, tokens_BT, mask_BT)
        return losses, gradients

    def add(sums: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient_of(params, *part)), None

    zero = jnp.zeros((), jnp.float32)
    sums: Any = jax.tree.map(jnp.zeros_like, params), Losses(zero, zero, zero)
    split = tuple(array.reshape(parts, -1, array.shape[1]) for array in (tokens_BT, mask_BT))
    (gradients, losses), _ = jax.lax.scan(add, sums, split)
    return losses, gradients


train_step = jax.jit(train_step_impl, static_argnums=(0, 1), donate_argnames="state")
