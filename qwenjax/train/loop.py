"""A whole run: it goes on where the folder's state ends, saves as it goes, and tells its progress on stderr."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import numpy as np

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.train.data import Tokens, sample_batch
from qwenjax.train.settings import TrainConfig
from qwenjax.train.state_file import load_state, save_state
from qwenjax.train.step import Metrics, TrainState, init_state, train_step
from qwenjax.weights import Params, init_params


def train(
    config: ModelConfig,
    settings: TrainConfig,
    tokens: Tokens,
    folder: Path,
    params: Params | None = None,
    *,
    stop_at: int | None = None,
    log_every: int = 50,
    save_every: int = 500,
) -> TrainState:
    """Trains to the settings' last step, or to `stop_at`, and returns the state, which the folder then holds too.

    Starts from the folder's state, else from `params`, else from random ones of the settings' seed. Steps in one run or
    in several give the same bits. A loss that isn't finite ends the run, with the last saved state as it was.
    """
    state = load_state(folder, config, settings)
    if state is None:
        state = init_state(config, settings, init_params(config, settings.seed) if params is None else params)
    first, last = int(state.step), min(settings.steps, settings.steps if stop_at is None else stop_at)
    rng, since, told = np.asarray(state.rng), time.perf_counter(), first
    for step in range(first, last):
        batch = sample_batch(tokens, rng, step, settings.batch_size, settings.sequence_len)
        state, metrics = train_step(config, settings, state, batch)
        done = step + 1
        if done % log_every == 0 or done % save_every == 0 or done == last:
            _check_finite(settings, done, metrics)  # waits for the device
            rate = (done - told) * batch.size / (time.perf_counter() - since)
            print(_line(settings, done, metrics, rate), file=sys.stderr, flush=True)
            since, told = time.perf_counter(), done
        if done % save_every == 0 or done == last:
            save_state(folder, config, settings, state)
    return state


def _check_finite(settings: TrainConfig, step: int, metrics: Metrics) -> None:
    if not math.isfinite(float(metrics.loss)):
        problem = f"the loss is {float(metrics.loss)} at step {step}"
        remedy = "Lower it, warm up for longer, or clip the gradient's norm lower."
        raise InputError("learning_rate", settings.learning_rate, problem, remedy)


def _line(settings: TrainConfig, step: int, metrics: Metrics, tokens_per_s: float) -> str:
    balance = "" if settings.router_aux_loss_coef is None else f"  balance {float(metrics.balance_loss):.3f}"
    return (
        f"step {step}/{settings.steps}  loss {float(metrics.next_token_loss):.4f}{balance}"
        f"  gradient norm {float(metrics.grad_norm):.3f}  learning rate {float(metrics.learning_rate):.2e}"
        f"  {tokens_per_s:.0f} tokens/s"
    )
