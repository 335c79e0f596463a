"""Generation against the model's own forward pass, rows alone, whole prompts against pieces, and counts of traces."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import qwenjax
from qwenjax import generation, model
from qwenjax.cache import KVCache, init_cache
from qwenjax.errors import InputError
from qwenjax.generation import Options, State, bucket, complete, generate, prefill_rows, stream
from qwenjax.model import extend, forward, prefill

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CONFIGS = {
    "qwen2": tiny.config("qwen2", num_hidden_layers=2, tie_word_embeddings=True),
    "windowed": tiny.config("qwen3", num_hidden_layers=2, **WINDOWED),
}
CONFIG = CONFIGS["windowed"]
LENGTHS = (9, 3, 14)
each_config = pytest.mark.parametrize("name", CONFIGS)


def prompt(name: str, length: int) -> list[int]:
    return np.asarray(tiny.tokens(name, length)).tolist()


PROMPTS = [prompt(f"prompt {length}", length) for length in LENGTHS]


@cache
def params(name: str = "windowed") -> Any:
    return tiny.params(CONFIGS[name])


def close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def greedy_by_forward(name: str, row: list[int], steps: int) -> tuple[list[int], list[float]]:
    """The most likely continuation by whole forward passes; padding to one length keeps one compiled function."""
    tokens, log_probs = list(row), []
    for _ in range(steps):
        padded = np.zeros((1, 24), np.int32)
        padded[0, : len(tokens)] = tokens
        logits_V = np.asarray(forward(CONFIGS[name], params(name), padded)[0, len(tokens) - 1], np.float64)
        tokens.append(int(logits_V.argmax()))
        log_probs.append(logits_V.max() - np.log(np.exp(logits_V).sum()))
    return tokens[len(row) :], log_probs


# Greedy


@each_config
def test_unequal_prompts_give_what_forward_gives_each_alone(name: str) -> None:
    completions = complete(CONFIGS[name], params(name), PROMPTS, Options(max_new_tokens=8))
    for row, completion in zip(PROMPTS, completions, strict=True):
        tokens, log_probs = greedy_by_forward(name, row, 8)
        assert completion.tokens == tokens
        close(completion.log_probs, log_probs)
        assert completion.reason == "max_new_tokens"
    assert generate(CONFIGS[name], params(name), PROMPTS, 8) == [completion.tokens for completion in completions]
    assert qwenjax.generate is generate


def test_pad_ids_in_a_prompt_are_tokens_like_others() -> None:
    """Lengths are explicit: id 0, which fills the padding, stands at the end, in the middle and alone."""
    rows = [[5, 0, 7, 0, 0], [0], [0, 0, 8]]
    assert generate(CONFIG, params(), rows, 6) == [greedy_by_forward("windowed", row, 6)[0] for row in rows]


# Sampling


SAMPLED: dict[str, Any] = {
    "temperature": [1.3, 0.0, 0.8],
    "top_k": [20, None, 50],
    "top_p": [0.95, None, 0.8],
    "min_p": 0.01,
    "repetition_penalty": [1.2, 1.3, None],
    "seed": [7, 8, 7],
}


def test_sampled_rows_equal_each_alone() -> None:
    together = complete(CONFIG, params(), PROMPTS, Options(max_new_tokens=8, **SAMPLED))
    for i, row in enumerate(PROMPTS):
        own = {key: [value[i]] if isinstance(value, list) else value for key, value in SAMPLED.items()}
        alone = complete(CONFIG, params(), [row], Options(max_new_tokens=8, **own))[0]
        assert together[i].tokens == alone.tokens
        close(together[i].log_probs, alone.log_probs)


def test_one_seed_gives_each_row_its_own_stream_and_repeats() -> None:
    rows = [PROMPTS[0]] * 3
    first = generate(CONFIG, params(), rows, 8, temperature=1.5, seed=4)
    assert first == generate(CONFIG, params(), rows, 8, temperature=1.5, seed=4)
    assert len({tuple(row) for row in first}) == 3
    assert generate(CONFIG, params(), rows, 8, temperature=1.5, seed=[6, 4, 5]) == [first[2], first[0], first[1]]


def test_a_repetition_penalty_counts_prompt_and_new_tokens() -> None:
    """A penalty so large that no seen id can win: every new id is new, until none is left."""
    config = tiny.config("qwen3", num_hidden_layers=1, vocab_size=12)
    positive = tiny.params(config)
    rows = [[1, 2, 3], [4, 4, 4]]
    new = generate(config, positive, rows, 8, repetition_penalty=1e9)
    for row, tokens in zip(rows, new, strict=True):
        assert len({*row, *tokens}) == len(set(row)) + 8


# Ends


@each_config
def test_each_row_ends_at_its_own_eos(name: str) -> None:
    whole = generate(CONFIGS[name], params(name), PROMPTS, 8)
    ends = [whole[0][2], whole[1][5]]
    expected = []
    for tokens in whole:
        stop = next((i for i, token in enumerate(tokens) if token in ends), 7)
        expected.append(tokens[: stop + 1])
    assert len({len(tokens) for tokens in expected}) > 1
    completions = complete(CONFIGS[name], params(name), PROMPTS, Options(max_new_tokens=8, eos=ends))
    assert [completion.tokens for completion in completions] == expected
    reasons = ["eos" if tokens[-1] in ends else "max_new_tokens" for tokens in expected]
    assert [completion.reason for completion in completions] == reasons


def test_eos_comes_from_the_config_unless_given() -> None:
    token = generate(CONFIG, params(), PROMPTS[:1], 8)[0][3]
    config = tiny.config("qwen3", num_hidden_layers=2, eos_token_id=[99, token], **WINDOWED)
    ended = generate(config, params(), PROMPTS[:1], 8)[0]
    assert ended[-1] == token
    assert len(ended) <= 4
    assert len(generate(config, params(), PROMPTS[:1], 8, eos=[])[0]) == 8
    assert generate(CONFIG, params(), PROMPTS[:1], 8, eos=token)[0] == ended


def test_a_full_cache_ends_a_row_cleanly() -> None:
    """Capacity 16: rows of 9, 3 and 14 tokens have places for 8, 14 and 3 tokens, the last one unseen."""
    whole = generate(CONFIG, params(), PROMPTS, 10)
    completions = complete(CONFIG, params(), PROMPTS, Options(max_new_tokens=10, capacity=16))
    assert [len(completion.tokens) for completion in completions] == [8, 10, 3]
    assert [completion.tokens for completion in completions] == [
        tokens[:length] for tokens, length in zip(whole, (8, 10, 3), strict=True)
    ]
    assert [completion.reason for completion in completions] == ["cache_full", "max_new_tokens", "cache_full"]
    full = complete(CONFIG, params(), [prompt("full", 16)], Options(max_new_tokens=10, capacity=16))
    assert (len(full[0].tokens), full[0].reason) == (1, "cache_full")


def test_nothing_asked_is_nothing_done() -> None:
    assert generate(CONFIG, params(), []) == []
    assert generate(CONFIG, params(), PROMPTS, 0) == [[], [], []]
    assert list(stream(CONFIG, params(), [])) == []
    assert list(stream(CONFIG, params(), PROMPTS, Options(max_new_tokens=0))) == []


# The two loops


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"temperature": 1.0, "capacity": 16}], ids=["greedy", "all", "full"])
def test_the_host_loop_equals_the_loop_on_the_device(settings: dict[str, Any]) -> None:
    eos = generate(CONFIG, params(), PROMPTS, 8)[0][2]
    options = Options(max_new_tokens=8, eos=[eos], **settings)
    completions = complete(CONFIG, params(), PROMPTS, options)
    steps = list(stream(CONFIG, params(), PROMPTS, options))
    for row, completion in enumerate(completions):
        new = [step[row] for step in steps]
        count = len(completion.tokens)
        assert [token.id for token in new[:count] if token] == completion.tokens
        assert new[count:] == [None] * (len(steps) - count)
        close([token.log_prob for token in new[:count] if token], completion.log_probs)
    assert len(steps) == max(len(completion.tokens) for completion in completions)


def test_a_caller_ends_a_row_of_a_stream() -> None:
    whole = generate(CONFIG, params(), PROMPTS, 8)
    asked: list[tuple[int, int]] = []

    def stopped(row: int, token: int) -> bool:
        asked.append((row, token))
        return row == 1 and len([1 for other, _ in asked if other == 1]) == 2

    steps = list(stream(CONFIG, params(), PROMPTS, Options(max_new_tokens=8), stopped))
    got = [[step[row].id for step in steps if step[row] is not None] for row in range(3)]  # type: ignore[union-attr]
    assert got == [whole[0], whole[1][:2], whole[2]]
    assert Counter(row for row, _ in asked) == {0: 8, 1: 2, 2: 8}


def test_a_stream_yields_before_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    advance = generation.advance

    def counted(*args: Any) -> Any:
        calls.append(1)
        return advance(*args)

    monkeypatch.setattr(generation, "advance", counted)
    tokens = stream(CONFIG, params(), PROMPTS, Options(max_new_tokens=8))
    next(tokens)
    assert len(calls) == 0
    next(tokens)
    assert len(calls) == 1


def test_a_row_that_is_done_keeps_its_place_in_the_cache() -> None:
    rules, rows = generation._prepare(CONFIG, PROMPTS, Options(max_new_tokens=8))
    state = generation._start(CONFIG, params(), rules, rows, Options(max_new_tokens=8))
    state = state.replace(done=jnp.array([False, True, False]))  # type: ignore[attr-defined]
    before = [np.asarray(part) for part in (state.tokens, state.log_probs, state.counts, state.cache.lengths)]
    after: State = generation.advance(CONFIG, params(), rules, state)
    for old, new in zip(before, (after.tokens, after.log_probs, after.counts, after.cache.lengths), strict=True):
        assert new[1] == old[1]
    assert (after.cache.lengths - before[3]).tolist() == [1, 0, 1]
    assert all(leaf.is_deleted() for leaf in (*state.cache.keys, *state.cache.values)), "the cache is donated"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params()))


# Prompts in pieces


@each_config
@given(lengths=st.tuples(*[st.integers(1, 14)] * 2), piece=st.sampled_from([4, 6]))
@hypothesis_settings(max_examples=8, deadline=None)
def test_pieces_equal_the_whole_prefill(name: str, lengths: tuple[int, int], piece: int) -> None:
    config = CONFIGS[name]
    rows = [prompt(f"{name} {i}", length) for i, length in enumerate(lengths)]
    whole_BV, whole = prefill_rows(config, params(name), rows, 20)
    parts_BV, parts = prefill_rows(config, params(name), rows, 20, chunk_tokens=piece)
    close(parts_BV, whole_BV)
    np.testing.assert_array_equal(parts.lengths, lengths)
    for ours, theirs in zip((*parts.keys, *parts.values), (*whole.keys, *whole.values), strict=True):
        for row, length in enumerate(lengths):
            close(ours[row, :, :length], theirs[row, :, :length])


def test_pieces_go_on_where_each_row_is() -> None:
    """Three pieces with counts of their own for each row, one of them nothing, against a whole prompt."""
    counts = [(4, 1), (0, 4), (3, 2)]
    rows = [prompt("first", 7), prompt("second", 7)]
    cache: KVCache = init_cache(CONFIG, 2, 8, "float32")
    last: list[Any] = [None, None]
    for piece in counts:
        at = np.asarray(cache.lengths)
        tokens = np.full((2, 4), 77, np.int32)
        for row, count in enumerate(piece):
            tokens[row, :count] = rows[row][at[row] : at[row] + count]
        logits_BV, cache = extend(CONFIG, params(), tokens, jnp.array(piece), cache)
        last = [logits_BV[row] if count else last[row] for row, count in enumerate(piece)]
    assert cache.lengths.tolist() == [7, 7]
    whole_BV, _ = prefill(CONFIG, params(), jnp.array(rows), jnp.array([7, 7]), init_cache(CONFIG, 2, 8, "float32"))
    close(jnp.stack(last), whole_BV)


def test_long_prompts_generate_the_same_in_pieces() -> None:
    for options in (Options(max_new_tokens=6), Options(max_new_tokens=6, capacity=16)):
        whole = complete(CONFIG, params(), PROMPTS, options)
        parts = complete(CONFIG, params(), PROMPTS, Options(**(vars(options) | {"chunk_tokens": 5})))
        assert [row.tokens for row in parts] == [row.tokens for row in whole]
        assert [row.reason for row in parts] == [row.reason for row in whole]


# Buckets and traces


def test_buckets_hold_their_lengths_and_grow_by_a_half_at_the_most() -> None:
    sizes = [bucket(length) for length in range(1, 5000)]
    assert all(size >= length for length, size in enumerate(sizes, 1))
    assert sorted(set(sizes))[:8] == [16, 24, 32, 48, 64, 96, 128, 192]
    assert all(size < 1.5 * length for length, size in enumerate(sizes, 1) if length > 16)


def test_lengths_in_one_bucket_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, lengths, settings' values and seeds retrace nothing; the next bucket's prompts do once."""
    traced: Counter[str] = Counter()
    hidden = model._hidden

    def counted(config: Any, weights: Any, tokens_BT: Any, *rest: Any) -> Any:
        traced[f"{tokens_BT.shape[1]} tokens"] += 1
        return hidden(config, weights, tokens_BT, *rest)

    monkeypatch.setattr(model, "_hidden", counted)
    batch = 5  # a batch size that no other test runs

    def rows(length: int) -> list[list[int]]:
        return [prompt(f"{i}", 1 + (length + i) % length) for i in range(batch - 1)] + [prompt("long", length)]

    for length, temperature in ((16, 0.7), (1, 0.9), (11, 1.1)):
        options = Options(max_new_tokens=4, temperature=temperature, seed=length)
        complete(CONFIG, params(), rows(length), options)
    assert traced == {"16 tokens": 1, "1 tokens": 1}
    for length in (1, 16, 5):
        list(stream(CONFIG, params(), rows(length), Options(max_new_tokens=4)))
    assert traced == {"16 tokens": 1, "1 tokens": 2}, "the host loop has its own step"
    complete(CONFIG, params(), rows(17), Options(max_new_tokens=4, temperature=0.7))
    complete(CONFIG, params(), rows(24), Options(max_new_tokens=4, temperature=0.7))
    assert traced == {"16 tokens": 1, "1 tokens": 2, "24 tokens": 1}, "both have caches of 32 tokens"
    for length in (27, 32, 30):
        prefill_rows(CONFIG, params(), rows(length), 48, chunk_tokens=8)
    assert traced == {"16 tokens": 1, "1 tokens": 2, "24 tokens": 1, "8 tokens": 1}


def test_bfloat16_caches_follow_the_parameters() -> None:
    narrow = tiny.params(CONFIG, "bfloat16")
    _, cache = prefill_rows(CONFIG, narrow, PROMPTS, 16)
    assert {leaf.dtype for leaf in (*cache.keys, *cache.values)} == {jnp.dtype("bfloat16")}


def test_a_narrower_cache_changes_no_loop_and_no_piece() -> None:
    options = Options(max_new_tokens=6, kv_dtype="float8_e4m3fn")
    whole = complete(CONFIG, params(), PROMPTS, options)
    parts = complete(CONFIG, params(), PROMPTS, Options(**(vars(options) | {"chunk_tokens": 5})))
    steps = list(stream(CONFIG, params(), PROMPTS, options))
    for row, completion in enumerate(whole):
        assert parts[row].tokens == completion.tokens == [step[row].id for step in steps]  # type: ignore[union-attr]
        close(parts[row].log_probs, completion.log_probs)
    assert generate(CONFIG, params(), PROMPTS, 6, kv_dtype="float8_e4m3fn") == [row.tokens for row in whole]
    _, cache = prefill_rows(CONFIG, params(), PROMPTS, 16, kv_dtype="bfloat16")
    assert {leaf.dtype for leaf in (*cache.keys, *cache.values)} == {jnp.dtype("bfloat16")}


# Refusals


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[1], []], {}, "prompts[1]: has no tokens. Give at least one, such as the bos id."),
        ([[1, 101]], {}, "prompts[0] = 101: is no id of this model, whose vocab_size is 101. Use its own tokenizer."),
        ([[-1]], {}, "prompts[0] = -1: is no id of this model, whose vocab_size is 101. Use its own tokenizer."),
        (["hello"], {}, "prompts[0] = 'hello': must be a list of token ids. Encode texts with a tokenizer first."),
        ([1, 2], {}, "prompts[0] = 1: must be a list of token ids. Encode texts with a tokenizer first."),
        (
            [[1, 2, 3]],
            {"capacity": 2},
            "prompts[0]: has 3 tokens, and the cache's capacity is 2. Shorten it or raise capacity.",
        ),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens = -1: must be an integer, 0 or more. Change the setting."),
        (
            [[1]],
            {"max_new_tokens": 2**31},
            "max_new_tokens = 2147483648: is more than a position can count (1073741824). Change the setting.",
        ),
        (
            [[1]],
            {"kv_dtype": "int8"},
            "kv_dtype = 'int8': is no dtype of keys and values. "
            "Known: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2.",
        ),
        ([[1]], {"eos": -1}, "eos = -1: must be an id or a list of ids. Give [] for none."),
        ([[1]], {"capacity": 0}, "capacity = 0: must be an integer, 1 or more. Change the setting."),
        ([[1]], {"chunk_tokens": 0}, "chunk_tokens = 0: must be an integer, 1 or more. Change the setting."),
        (
            [[1]],
            {"temperature": -1.0},
            "temperature = -1.0: must be 0 or more, or 1 such values, one a row. Change the setting.",
        ),
    ],
)
def test_what_cannot_be_generated_from_is_refused(prompts: Any, settings: dict[str, Any], message: str) -> None:
    for run in (complete, stream):
        with pytest.raises(InputError) as caught:
            run(CONFIG, params(), prompts, Options(**settings))
        assert str(caught.value) == message
