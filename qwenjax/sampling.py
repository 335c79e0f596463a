"""Choosing the next token: the processors of transformers in its order, with settings of each row, on [B, V] logits.

Repetition penalty, temperature, top-k, top-p, min-p (transformers' GenerationMixin and its logits processors, 5.24).
A row's random numbers come from its own seed and the number of tokens it has drawn, so its neighbours don't matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwenjax.errors import InputError
from qwenjax.field_reader import finite_number, plain_integer

Array = jax.Array
PerRow = float | Sequence[float | None] | None
_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)  # below it float32 divides by zero


@struct.dataclass
class Sampling:
    """Settings of each row, [B]; None switches a processor off for the whole batch, and costs nothing.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 leave a row as it is.
    """

    temperature: Array | None
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    repetition_penalty: Array | None
    seeds: Array


def sampling_of(
    batch: int,
    *,
    temperature: PerRow = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    repetition_penalty: PerRow = None,
    seed: int | Sequence[int] = 0,
) -> Sampling:
    """Checked settings of `batch` rows; one value holds for all, a sequence has one for each.

    One `seed` gives row i the seed `seed + i`.
    """
    integers = range(2**32)
    seed = _listed(seed)
    seeds = [seed + i for i in range(batch)] if isinstance(seed, int) else list(seed)
    if len(seeds) != batch or not all(plain_integer(value) and value in integers for value in seeds):
        last = len(seeds) if isinstance(seed, int) else 1  # so that every row's seed fits
        problem = f"must be an integer from 0 to 2**32 - {last}, or {batch} of them, one a row"
        raise InputError("seed", seed, problem, "Choose another seed.")
    warm = _per_row("temperature", temperature, batch, 0.0, "0 or more", lambda value: value >= 0)
    counts = _per_row("top_k", top_k, batch, 0, "a whole number, 0 or more", _is_count)
    masses = _per_row("top_p", top_p, batch, 1.0, "from 0 to 1", _is_fraction)
    floors = _per_row("min_p", min_p, batch, 0.0, "from 0 to 1", _is_fraction)
    penalties = _per_row("repetition_penalty", repetition_penalty, batch, 1.0, "above 0", lambda value: value > 0)
    return Sampling(
        temperature=_switch(warm, 0.0),
        top_k=_switch(counts.clip(max=2**31 - 1), 0, jnp.int32) if warm.any() else None,
        top_p=_switch(masses, 1.0) if warm.any() else None,
        min_p=_switch(floors, 0.0) if warm.any() else None,
        repetition_penalty=_switch(penalties, 1.0),
        seeds=jnp.asarray(np.array(seeds, np.uint32)),
    )


def _listed(value: Any) -> Any:
    """The value with arrays as lists and their scalars as plain numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_fraction(value: float) -> bool:
    return 0 <= value <= 1


def _is_count(value: float) -> bool:
    return value >= 0 and plain_integer(value)


def _per_row(
    name: str, value: Any, batch: int, off: float, must: str, allowed: Callable[[float], bool]
) -> np.ndarray[Any, np.dtype[Any]]:
    value = _listed(value)
    rows = [value] * batch if value is None or isinstance(value, int | float) else list(value)
    filled = [off if row is None else row for row in rows]
    if len(filled) != batch or not all(finite_number(row) and allowed(row) for row in filled):
        raise InputError(name, value, f"must be {must}, or {batch} such values, one a row", "Change the setting.")
    return np.asarray(filled)


def _switch(values: np.ndarray[Any, np.dtype[Any]], off: float, dtype: Any = jnp.float32) -> Array | None:
    """The rows' values, or None where every row leaves the processor off."""
    if np.all(values == off):
        return None
    return jnp.asarray(np.asarray(values, np.float64).clip(max=_LARGEST) if dtype == jnp.float32 else values, dtype)


def seen_tokens(tokens_BT: Array, lengths_B: Array, vocab_size: int) -> Array:
    """Which ids stand in each row's first `lengths` tokens, [B, V] of bool: what the repetition penalty reads."""
    batch, longest = tokens_BT.shape
    counted_BT = jnp.where(jnp.arange(longest) < lengths_B[:, None], tokens_BT, vocab_size)
    return mark_seen(jnp.zeros((batch, vocab_size), bool), counted_BT)


def mark_seen(seen_BV: Array, tokens_BT: Array) -> Array:
    """The same table with these tokens added; an id of V or more adds nothing."""
    return seen_BV.at[jnp.arange(seen_BV.shape[0])[:, None], tokens_BT].set(True, mode="drop")


def process(logits_BV: Array, sampling: Sampling, seen_BV: Array | None = None) -> Array:
    """Logits after every processor, float32 with -inf where removed, up to a constant a row.

    A greedy row keeps its penalised logits. Equal logits at the border of top-k all stay, as in transformers.
    """
    scores_BV = penalise(logits_BV.astype(jnp.float32), sampling, seen_BV)
    if sampling.temperature is None:
        return scores_BV
    warped_BV = _cool(scores_BV, sampling.temperature)
    if sampling.top_k is not None or sampling.top_p is not None:
        warped_BV = _keep_top(warped_BV, sampling.top_k, sampling.top_p)
    if sampling.min_p is not None:
        warped_BV = _keep_likely(warped_BV, sampling.min_p)
    return jnp.where(_is_greedy(sampling.temperature)[:, None], scores_BV, warped_BV)


def penalise(scores_BV: Array, sampling: Sampling, seen_BV: Array | None) -> Array:
    """Repetition penalty (arXiv 1909.05858, as transformers signs it): seen ids move towards minus infinity."""
    if sampling.repetition_penalty is None or seen_BV is None:
        return scores_BV
    penalty_B1 = sampling.repetition_penalty[:, None]
    penalised_BV = jnp.where(scores_BV < 0, scores_BV * penalty_B1, scores_BV / penalty_B1)
    return jnp.where(seen_BV, penalised_BV, scores_BV)


def _is_greedy(temperature_B: Array) -> Array:
    return temperature_B < _SMALLEST


def _cool(scores_BV: Array, temperature_B: Array) -> Array:
    """Scores over temperature, the greatest moved to 0 first so that a tiny temperature overflows to -inf alone."""
    divisor_B = jnp.where(_is_greedy(temperature_B), 1.0, temperature_B)
    return (scores_BV - scores_BV.max(axis=-1, keepdims=True)) / divisor_B[:, None]


def _keep_top(scores_BV: Array, top_k_B: Array | None, top_p_B: Array | None) -> Array:
    """Top-k, then top-p on what is left, from one ascending sort."""
    vocab = scores_BV.shape[-1]
    order_BV = jnp.argsort(scores_BV, axis=-1)
    sorted_BV = jnp.take_along_axis(scores_BV, order_BV, axis=-1)
    if top_k_B is not None:
        kept_B = jnp.where(top_k_B > 0, jnp.minimum(top_k_B, vocab), vocab)
        border_B1 = jnp.take_along_axis(sorted_BV, (vocab - kept_B)[:, None], axis=-1)
        scores_BV = jnp.where(scores_BV < border_B1, -jnp.inf, scores_BV)
        sorted_BV = jnp.where(sorted_BV < border_B1, -jnp.inf, sorted_BV)
    if top_p_B is None:
        return scores_BV
    below_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, axis=-1), axis=-1)
    removed_BV = (below_BV <= 1 - top_p_B[:, None]) & (top_p_B[:, None] < 1)
    removed_BV = removed_BV.at[:, -1].set(False)
    rows_B1 = jnp.arange(scores_BV.shape[0])[:, None]
    removed_BV = jnp.zeros_like(removed_BV).at[rows_B1, order_BV].set(removed_BV, unique_indices=True)
    return jnp.where(removed_BV, -jnp.inf, scores_BV)


def _keep_likely(scores_BV: Array, min_p_B: Array) -> Array:
    """Min-p: what is less likely than min_p times the most likely goes."""
    probs_BV = jax.nn.softmax(scores_BV, axis=-1)
    floor_B1 = min_p_B[:, None] * probs_BV.max(axis=-1, keepdims=True)
    return jnp.where(probs_BV < floor_B1, -jnp.inf, scores_BV)


def choose(logits_BV: Array, sampling: Sampling, drawn_B: Array, seen_BV: Array | None = None) -> tuple[Array, Array]:
    """The next token of each row and its log-probability under the model's own distribution, [B] int32 and float32.

    `drawn` counts the tokens that a row has drawn before. The log-probability is that of the unprocessed logits.
    """
    scores_BV = process(logits_BV, sampling, seen_BV)
    if sampling.temperature is not None:
        noisy_BV = scores_BV + jax.vmap(_gumbel, (0, 0, None))(sampling.seeds, drawn_B, scores_BV.shape[-1])
        scores_BV = jnp.where(_is_greedy(sampling.temperature)[:, None], scores_BV, noisy_BV)
    tokens_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    return tokens_B, log_probability(logits_BV, tokens_B)


def log_probability(logits_BV: Array, tokens_B: Array) -> Array:
    """Natural log of the softmax of each row at its token, in float32."""
    log_probs_BV = jax.nn.log_softmax(logits_BV.astype(jnp.float32), axis=-1)
    return jnp.take_along_axis(log_probs_BV, tokens_B[..., None], axis=-1)[..., 0]


def _gumbel(seed: Array, drawn: Array, vocab: int) -> Array:
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), drawn)  # not rbg: that one mixes rows in vmap
    return jax.random.gumbel(key, (vocab,), jnp.float32)
