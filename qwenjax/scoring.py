"""How likely a model finds a text: log-probabilities of its tokens, each given those before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from qwenjax.cache import KVCache, advanced, init_cache
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.generation import bucket, check_prompt
from qwenjax.model import _hidden, _unembed
from qwenjax.sampling import log_probability
from qwenjax.weights import Params

Array = jax.Array


def score_tokens(
    config: ModelConfig,
    params: Params,
    tokens: Sequence[int],
    piece_tokens: int = 512,
    kv_dtype: str | None = None,
) -> list[float]:
    """Natural log-probability of every token but the first, in float32, given all tokens before it.

    The text runs against a cache in pieces of `piece_tokens`, so that only one piece's logits are held at a time.
    The cache's dtype is kv_dtype, or that of the parameters.
    """
    ids = check_prompt("tokens", tokens, config, None)
    if len(ids) < 2:
        raise InputError("tokens", None, "only one token, and the first one has no probability", "Give a longer text.")
    width = min(piece_tokens, bucket(len(ids)))
    pieces = -(-len(ids) // width)
    padded_T = np.zeros(pieces * width + 1, np.int32)
    padded_T[: len(ids)] = ids
    cache = init_cache(config, 1, bucket(pieces * width), kv_dtype or params["embed_tokens"].dtype.name)
    found: list[float] = []
    for start in range(0, pieces * width, width):
        piece_BT, next_BT = (padded_T[None, start + shift : start + shift + width] for shift in (0, 1))
        log_probs_BT, cache = _score_piece(config, params, piece_BT, next_BT, cache)
        found += np.asarray(log_probs_BT)[0].tolist()
    return found[: len(ids) - 1]


def perplexity(log_probs: Sequence[float]) -> float:
    """exp of the mean negative log-probability (natural), as from transformers' loss on the same tokens."""
    return math.exp(-math.fsum(log_probs) / len(log_probs))


@partial(jax.jit, static_argnums=0, donate_argnames="cache")
def _score_piece(
    config: ModelConfig, params: Params, tokens_BT: Array, next_BT: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    positions_BT = cache.lengths[:, None] + jnp.arange(tokens_BT.shape[1])
    key_positions_S = jnp.arange(cache.capacity)
    x_BTD, kept = _hidden(config, params, tokens_BT, positions_BT, key_positions_S, cache, cache.lengths)
    log_probs_BT = log_probability(_unembed(config, params, x_BTD), next_BT)
    keys, values = zip(*kept, strict=True)
    return log_probs_BT, KVCache(keys, values, advanced(cache, tokens_BT.shape[1]))
