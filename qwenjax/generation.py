"""From prompts to new tokens: padded or chunked prefill, then one decode step a token, as a host loop or on the device.

Prompts are right-padded to a bucket and carry their lengths, so that all lengths in one bucket share compiled
functions and the pad id means nothing. What a batch generates equals what each prompt generates alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from qwenjax.cache import KVCache, check_cache_dtype, init_cache
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.field_reader import plain_integer
from qwenjax.model import decode_step_impl, extend, prefill
from qwenjax.sampling import PerRow, Sampling, choose, mark_seen, sampling_of, seen_tokens
from qwenjax.weights import Params

Array = jax.Array
Prompts = Sequence[Sequence[int]]
Reason = Literal["eos", "max_new_tokens", "cache_full"]
_SMALLEST_BUCKET = 16
_MOST = 2**30  # tokens: prompt and new ones together then still have int32 positions


@dataclass(frozen=True)
class Options:
    """How to generate. The processors take one value or one for each row; see `qwenjax.sampling`.

    eos: the ids that end a row, None for the config's. capacity: tokens that a row may hold in the cache, None for
    room enough. chunk_tokens: longer prompts are run in pieces of this size. kv_dtype: of the cache, None for that of
    the parameters.
    """

    max_new_tokens: int = 16
    temperature: PerRow = 0.0
    top_k: int | Sequence[int | None] | None = None
    top_p: PerRow = None
    min_p: PerRow = None
    repetition_penalty: PerRow = None
    seed: int | Sequence[int] = 0
    eos: int | Sequence[int] | None = None
    capacity: int | None = None
    chunk_tokens: int = 512
    kv_dtype: str | None = None


class Completion(NamedTuple):
    """A row's new ids, an ending eos included, their log-probabilities under the model, and what ended it."""

    tokens: list[int]
    log_probs: list[float]
    reason: Reason


class Token(NamedTuple):
    """One new id and its natural log-probability under the model's own distribution."""

    id: int
    log_prob: float


@struct.dataclass
class Rules:
    """What ends and chooses tokens: settings of the rows, eos ids, and the most tokens each row may generate, [B]."""

    sampling: Sampling
    eos: Array
    limits: Array


@struct.dataclass
class State:
    """A batch between two steps: the cache without the newest tokens, those tokens, and how far each row is, [B]."""

    cache: KVCache
    tokens: Array
    log_probs: Array
    counts: Array
    done: Array
    seen: Array | None


def generate(
    config: ModelConfig,
    params: Params,
    prompts: Prompts,
    max_new_tokens: int = 16,
    temperature: PerRow = 0.0,
    top_k: int | Sequence[int | None] | None = None,
    top_p: PerRow = None,
    min_p: PerRow = None,
    repetition_penalty: PerRow = None,
    seed: int | Sequence[int] = 0,
    eos: int | Sequence[int] | None = None,
    capacity: int | None = None,
    chunk_tokens: int = Options.chunk_tokens,
    kv_dtype: str | None = None,
) -> list[list[int]]:
    """New ids of each prompt, an ending eos included. Temperature 0 is greedy; see `Options` for the rest."""
    options = Options(
        max_new_tokens,
        temperature,
        top_k,
        top_p,
        min_p,
        repetition_penalty,
        seed,
        eos,
        capacity,
        chunk_tokens,
        kv_dtype,
    )
    return [completion.tokens for completion in complete(config, params, prompts, options)]


def complete(config: ModelConfig, params: Params, prompts: Prompts, options: Options | None = None) -> list[Completion]:
    """Each prompt's new ids with log-probabilities and reasons; the decode loop runs on the device as a whole."""
    options = options or Options()
    rules, rows = _prepare(config, prompts, options)
    if not rows or options.max_new_tokens == 0:
        return [Completion([], [], "max_new_tokens") for _ in rows]
    state = _start(config, params, rules, rows, options)
    result = run_to_end(config, params, rules, state, options.max_new_tokens)
    tokens_BN, log_probs_BN, counts_B = (np.asarray(part) for part in (*result[:2], result[2].counts))
    completions = []
    for tokens_N, log_probs_N, count in zip(tokens_BN, log_probs_BN, counts_B.tolist(), strict=True):
        tokens = tokens_N[:count].tolist()
        completions.append(Completion(tokens, log_probs_N[:count].tolist(), _reason(tokens, rules, options)))
    return completions


def stream(
    config: ModelConfig,
    params: Params,
    prompts: Prompts,
    options: Options | None = None,
    stopped: Callable[[int, int], bool] | None = None,
) -> Iterator[list[Token | None]]:
    """The same tokens step by step, one entry for each row, None once a row has ended.

    `stopped(row, id)` is asked about each new id and ends the row where it answers True, as for a stop string.
    """
    options = options or Options()
    rules, rows = _prepare(config, prompts, options)
    if not rows or options.max_new_tokens == 0:
        return iter(())
    return _stream(config, params, rules, rows, options, stopped or (lambda row, token: False))


def _stream(
    config: ModelConfig,
    params: Params,
    rules: Rules,
    rows: list[list[int]],
    options: Options,
    stopped: Callable[[int, int], bool],
) -> Iterator[list[Token | None]]:
    state = _start(config, params, rules, rows, options)
    done_B = np.zeros(len(rows), bool)
    while True:
        tokens, log_probs, ended_B = (np.asarray(part) for part in (state.tokens, state.log_probs, state.done))
        new: list[Token | None] = [
            None if done else Token(int(token), float(log_prob))
            for done, token, log_prob in zip(done_B, tokens, log_probs, strict=True)
        ]
        done_B = ended_B | [token is not None and stopped(row, token.id) for row, token in enumerate(new)] | done_B
        yield new
        if done_B.all():
            return
        state = advance(config, params, rules, state.replace(done=jnp.asarray(done_B)))  # type: ignore[attr-defined]


def bucket(length: int) -> int:
    """The least of 16, 24, 32, 48, 64, 96, ... tokens that holds this many: at most a third is padding above 16."""
    size = _SMALLEST_BUCKET
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def prefill_rows(
    config: ModelConfig,
    params: Params,
    rows: Prompts,
    capacity: int,
    chunk_tokens: int = Options.chunk_tokens,
    kv_dtype: str | None = None,
) -> tuple[Array, KVCache]:
    """Logits after each prompt's last token, [B, V], and a cache of that capacity, in kv_dtype or the parameters' own.

    Up to `chunk_tokens` a bucket of prompts is run at once; longer ones piece after piece against the cache.
    """
    longest = max(map(len, rows))
    cache = init_cache(config, len(rows), capacity, kv_dtype or params["embed_tokens"].dtype.name)
    if bucket(longest) <= chunk_tokens:
        tokens_BT, lengths_B = _padded(rows, min(bucket(longest), capacity))
        first: tuple[Array, KVCache] = prefill(config, params, tokens_BT, lengths_B, cache)
        return first
    tokens_BT, lengths_B = _padded(rows, -(-longest // chunk_tokens) * chunk_tokens)
    logits_BV: Array | None = None
    for start in range(0, longest, chunk_tokens):
        counts_B = np.clip(lengths_B - start, 0, chunk_tokens)
        piece_BT = tokens_BT[:, start : start + chunk_tokens]
        last_BV, cache = extend(config, params, piece_BT, counts_B, cache)
        logits_BV = last_BV if logits_BV is None else jnp.where(counts_B[:, None] > 0, last_BV, logits_BV)
    assert logits_BV is not None
    return logits_BV, cache


def _padded(rows: Prompts, width: int) -> tuple[np.ndarray[Any, np.dtype[np.int32]], np.ndarray[Any, Any]]:
    tokens_BT = np.zeros((len(rows), width), np.int32)
    for padded_T, row in zip(tokens_BT, rows, strict=True):
        padded_T[: len(row)] = row
    return tokens_BT, np.array([len(row) for row in rows], np.int32)


def _start(config: ModelConfig, params: Params, rules: Rules, rows: list[list[int]], options: Options) -> State:
    """The state with each row's first new token."""
    longest = max(map(len, rows))
    capacity = options.capacity or _round_up(bucket(longest) + options.max_new_tokens, _SMALLEST_BUCKET)
    logits_BV, cache = prefill_rows(config, params, rows, capacity, options.chunk_tokens, options.kv_dtype)
    seen_BV = None
    if rules.sampling.repetition_penalty is not None:
        seen_BV = _seen(*_padded(rows, bucket(longest)), config.vocab_size)
    state: State = _choose_first(rules, logits_BV, cache, seen_BV)
    return state


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _choose_next(rules: Rules, logits_BV: Array, cache: KVCache, counts_B: Array, seen_BV: Array | None) -> State:
    tokens_B, log_probs_B = choose(logits_BV, rules.sampling, counts_B, seen_BV)
    done_B = jnp.isin(tokens_B, rules.eos) | (counts_B + 1 >= rules.limits)
    seen_BV = None if seen_BV is None else mark_seen(seen_BV, tokens_B[:, None])
    return State(cache, tokens_B, log_probs_B, counts_B + 1, done_B, seen_BV)


def _choose_first_impl(rules: Rules, logits_BV: Array, cache: KVCache, seen_BV: Array | None) -> State:
    return _choose_next(rules, logits_BV, cache, jnp.zeros(logits_BV.shape[0], jnp.int32), seen_BV)


def advance_impl(config: ModelConfig, params: Params, rules: Rules, state: State) -> State:
    """Runs each row's newest token and chooses the next; a row that is done stays as it is."""

    def kept(old_B: Array, new_B: Array) -> Array:
        return jnp.where(state.done, old_B, new_B)

    logits_BV, cache = decode_step_impl(config, params, state.tokens, state.cache)
    new = _choose_next(rules, logits_BV, cache, state.counts, state.seen)
    lengths_B = kept(state.cache.lengths, cache.lengths)
    return State(
        KVCache(cache.keys, cache.values, lengths_B),
        kept(state.tokens, new.tokens),
        kept(state.log_probs, new.log_probs),
        kept(state.counts, new.counts),
        state.done | new.done,
        new.seen,
    )


def run_to_end_impl(
    config: ModelConfig, params: Params, rules: Rules, state: State, steps: int
) -> tuple[Array, Array, State]:
    """Steps until every row is done, at most `steps` tokens each: ids and log-probabilities [B, N], and the last state.

    Columns beyond a row's count mean nothing.
    """
    Carry = tuple[Array, Array, Array, State]

    def column(new_B: Array) -> Array:
        return jnp.zeros((new_B.shape[0], steps), new_B.dtype).at[:, 0].set(new_B)

    def body(carry: Carry) -> Carry:
        step, tokens_BN, log_probs_BN, state = carry
        state = advance_impl(config, params, rules, state)
        tokens_BN = tokens_BN.at[:, step].set(state.tokens)
        return step + 1, tokens_BN, log_probs_BN.at[:, step].set(state.log_probs), state

    def unfinished(carry: Carry) -> Array:
        return ~carry[3].done.all()

    first = (jnp.int32(1), column(state.tokens), column(state.log_probs), state)
    return jax.lax.while_loop(unfinished, body, first)[1:]


advance = jax.jit(advance_impl, static_argnums=0, donate_argnames="state")
run_to_end = jax.jit(run_to_end_impl, static_argnames=("config", "steps"), donate_argnames="state")
_choose_first = jax.jit(_choose_first_impl, donate_argnames="cache")
_seen = partial(jax.jit, static_argnums=2)(seen_tokens)


def _reason(tokens: list[int], rules: Rules, options: Options) -> Reason:
    if tokens[-1] in np.asarray(rules.eos):
        return "eos"
    return "max_new_tokens" if len(tokens) == options.max_new_tokens else "cache_full"


def _prepare(config: ModelConfig, prompts: Prompts, options: Options) -> tuple[Rules, list[list[int]]]:
    """The checked prompts and rules. A row may generate until its newest token has no place in the cache."""
    for name in ("max_new_tokens", "capacity", "chunk_tokens"):
        value, least = getattr(options, name), 0 if name == "max_new_tokens" else 1
        if not (plain_integer(value) and value >= least) and not (name == "capacity" and value is None):
            raise InputError(name, value, f"must be an integer, {least} or more", "Change the setting.")
        if value is not None and value > _MOST:
            raise InputError(name, value, f"is more than a position can count ({_MOST})", "Change the setting.")
    if options.kv_dtype is not None:
        check_cache_dtype(options.kv_dtype, "kv_dtype")
    rows = [check_prompt(f"prompts[{i}]", prompt, config, options.capacity) for i, prompt in enumerate(prompts)]
    sampling = sampling_of(
        len(rows),
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        seed=options.seed,
    )
    eos = config.eos_token_id if options.eos is None else options.eos
    ends = [eos] if isinstance(eos, int) else [operator.index(token) for token in eos]
    if not all(0 <= token < 2**31 for token in ends):
        raise InputError("eos", eos, "must be an id or a list of ids", "Give [] for none.")
    most = options.max_new_tokens
    limits = [min(most, most if options.capacity is None else options.capacity - len(row) + 1) for row in rows]
    return Rules(sampling, jnp.asarray(np.array(ends, np.int32)), jnp.asarray(np.array(limits, np.int32))), rows


def check_prompt(name: str, prompt: Sequence[int], config: ModelConfig, capacity: int | None) -> list[int]:
    """The ids as plain integers, each one the model's own, and few enough for a cache of that capacity."""
    try:
        row = [operator.index(token) for token in prompt]
    except TypeError:
        raise InputError(name, prompt, "must be a list of token ids", "Encode texts with a tokenizer first.") from None
    if not row:
        raise InputError(name, None, "has no tokens", "Give at least one, such as the bos id.")
    wrong = next((token for token in row if not 0 <= token < config.vocab_size), None)
    if wrong is not None:
        raise InputError(
            name, wrong, f"is no id of this model, whose vocab_size is {config.vocab_size}", "Use its own tokenizer."
        )
    if capacity is not None and len(row) > capacity:
        raise InputError(
            name,
            None,
            f"has {len(row)} tokens, and the cache's capacity is {capacity}",
            "Shorten it or raise capacity.",
        )
    return row
