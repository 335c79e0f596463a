"""The sampling chain by hand-worked cases and by properties; tests/test_reference_generate.py has transformers' own."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.errors import InputError
from qwenjax.sampling import choose, process, sampling_of, seen_tokens

VOCAB = 37


def logits(name: str, batch: int = 1, vocab: int = VOCAB) -> Any:
    return jnp.asarray(6 * tiny.uniform(name, (batch, vocab)), jnp.float32)


def kept(scores_BV: Any) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(scores_BV)]


def from_probs(*probs: float) -> Any:
    return jnp.log(jnp.asarray([probs], jnp.float32))


# Each processor


def test_temperature_divides_and_keeps_the_greatest_at_zero() -> None:
    scores = process(jnp.array([[1.0, 3.0, -2.0]]), sampling_of(1, temperature=0.5))
    np.testing.assert_allclose(scores, [[-4.0, 0.0, -10.0]], rtol=1e-6)


def test_top_k_keeps_ties_at_its_border_and_may_exceed_the_vocabulary() -> None:
    tied = jnp.array([[1.0, 2.0, 2.0, 3.0, 0.0]])
    for top_k, expected in ((1, [3]), (2, [1, 2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (99, [0, 1, 2, 3, 4])):
        assert kept(process(tied, sampling_of(1, temperature=1.0, top_k=top_k))) == [expected]


def test_top_p_removes_the_unlikely_whose_sum_is_at_most_one_less_p() -> None:
    probs = from_probs(0.5, 0.0625, 0.25, 0.1875)
    for top_p, expected in ((1.0, [0, 1, 2, 3]), (0.9, [0, 2, 3]), (0.76, [0, 2, 3]), (0.74, [0, 2]), (0.4, [0])):
        assert kept(process(probs, sampling_of(1, temperature=1.0, top_p=top_p))) == [expected]
    assert kept(process(probs, sampling_of(1, temperature=1.0, top_p=0.0))) == [[0]]


def test_top_p_counts_what_top_k_left() -> None:
    probs = from_probs(0.4, 0.3, 0.2, 0.1)  # of the first two: 4/7 and 3/7
    assert kept(process(probs, sampling_of(1, temperature=1.0, top_k=2, top_p=0.6))) == [[0, 1]]
    assert kept(process(probs, sampling_of(1, temperature=1.0, top_k=2, top_p=0.55))) == [[0]]
    assert kept(process(probs, sampling_of(1, temperature=1.0, top_p=0.55))) == [[0, 1]]


def test_min_p_is_relative_to_the_most_likely_after_temperature() -> None:
    probs = from_probs(0.5, 0.3, 0.15, 0.05)
    assert kept(process(probs, sampling_of(1, temperature=1.0, min_p=0.5))) == [[0, 1]]
    assert kept(process(probs, sampling_of(1, temperature=2.0, min_p=0.5))) == [[0, 1, 2]]
    assert kept(process(probs, sampling_of(1, temperature=1.0, min_p=1.0))) == [[0]]


def test_repetition_penalty_lowers_seen_ids_once_whatever_their_sign() -> None:
    scores = jnp.array([[4.0, -4.0, 2.0, -2.0]])
    seen = seen_tokens(jnp.array([[0, 1, 1, 3]]), jnp.array([3]), 4)
    np.testing.assert_array_equal(seen, [[True, True, False, False]])
    penalised = process(scores, sampling_of(1, repetition_penalty=2.0), seen)
    np.testing.assert_array_equal(penalised, [[2.0, -8.0, 2.0, -2.0]])
    assert choose(scores, sampling_of(1, repetition_penalty=4.0), jnp.array([0]), seen)[0].tolist() == [2]


def test_padding_is_not_seen() -> None:
    seen = seen_tokens(jnp.array([[5, 0, 0], [0, 1, 2]]), jnp.array([1, 3]), 6)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(seen)] == [[5], [0, 1, 2]]


@given(
    temperature=st.floats(0.1, 3),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    name=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_the_most_likely_always_stays_and_order_holds(
    temperature: float, top_k: int, top_p: float, min_p: float, name: int
) -> None:
    scores = logits(str(name), 2)
    sampling = sampling_of(2, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    result = np.asarray(process(scores, sampling))
    assert np.isfinite(result[[0, 1], np.asarray(scores).argmax(-1)]).all()
    assert not np.isnan(result).any()
    for row, before in zip(result, np.asarray(scores), strict=True):
        assert before[np.isfinite(row)].min() >= before[~np.isfinite(row)].max(initial=-np.inf)


# Temperature 0, and small ones


def test_temperature_zero_is_argmax_inside_a_mixed_batch() -> None:
    scores = logits("mixed", 4)
    mixed = sampling_of(4, temperature=[0.0, 1.5, 0.0, 0.7], top_k=[None, 5, 3, None], top_p=[0.1, None, None, 0.8])
    processed = np.asarray(process(scores, mixed))
    assert not np.isnan(processed).any()
    for step in range(20):
        tokens, log_probs = choose(scores, mixed, jnp.full(4, step))
        np.testing.assert_array_equal(tokens[jnp.array([0, 2])], scores.argmax(-1)[jnp.array([0, 2])])
        assert np.isfinite(log_probs).all()
    alone = sampling_of(4)
    assert (alone.temperature, alone.top_k, alone.top_p, alone.min_p) == (None,) * 4
    np.testing.assert_array_equal(choose(scores, alone, jnp.zeros(4, int))[0], scores.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1.2e-38, 1e-40, 5e-324])
def test_a_tiny_temperature_is_greedy_without_nan(temperature: float) -> None:
    scores = logits("tiny", 2)
    sampling = sampling_of(2, temperature=temperature, top_p=0.9, min_p=0.1, top_k=5)
    assert not np.isnan(np.asarray(process(scores, sampling))).any()
    np.testing.assert_array_equal(choose(scores, sampling, jnp.array([3, 4]))[0], scores.argmax(-1))


def test_removed_ids_are_never_drawn_and_the_rest_by_their_probability() -> None:
    probs = from_probs(0.5, 0.3, 0.15, 0.05)
    rows = 4000
    sampling = sampling_of(rows, temperature=1.0, top_k=3, seed=7)
    tokens, _ = choose(jnp.broadcast_to(probs, (rows, 4)), sampling, jnp.zeros(rows, int))
    share = np.bincount(tokens, minlength=4) / rows
    assert share[3] == 0
    np.testing.assert_allclose(share[:3], np.array([0.5, 0.3, 0.15]) / 0.95, atol=0.03)


# Seeds


def test_a_rows_draws_depend_on_its_own_seed_and_count_alone() -> None:
    scores = logits("seeds", 3)
    seeds, drawn = [11, 5, 11], jnp.array([2, 9, 4])
    tokens, _ = choose(scores, sampling_of(3, temperature=2.0, seed=seeds), drawn)
    for row in range(3):
        alone = sampling_of(1, temperature=2.0, seed=[seeds[row]])
        assert choose(scores[row : row + 1], alone, drawn[row : row + 1])[0][0] == tokens[row]
    same = jnp.broadcast_to(logits("same"), (64, VOCAB))
    streams = [choose(same, sampling_of(64, temperature=2.0, seed=3), jnp.full(64, step))[0] for step in range(2)]
    assert len(set(streams[0].tolist())) > 8
    assert (streams[0] != streams[1]).sum() > 32
    again = choose(same[:5], sampling_of(5, temperature=2.0, seed=[3, 4, 5, 6, 7]), jnp.zeros(5, int))[0]
    np.testing.assert_array_equal(again, streams[0][:5])


def test_log_probabilities_are_the_models_own() -> None:
    scores = logits("log", 2).astype(jnp.bfloat16)
    sampling = sampling_of(2, temperature=1.7, top_k=2, repetition_penalty=3.0)
    seen = seen_tokens(jnp.array([[1], [2]]), jnp.array([1, 1]), VOCAB)
    tokens, log_probs = choose(scores, sampling, jnp.array([0, 0]), seen)
    wide = np.asarray(scores, np.float64)
    expected = wide[[0, 1], tokens] - np.log(np.exp(wide).sum(-1))
    np.testing.assert_allclose(log_probs, expected, rtol=1e-5)
    assert (tokens.dtype, log_probs.dtype) == (jnp.int32, jnp.float32)


def test_arrays_are_taken_as_settings() -> None:
    scores, drawn = logits("arrays", 3), jnp.zeros(3, int)
    plain = sampling_of(3, temperature=[1.5, 0.0, 0.5], top_k=[3, 4, 5], top_p=0.75, seed=[4, 5, 6])
    for array in (np.asarray, jnp.asarray):
        given_ = {"temperature": array([1.5, 0.0, 0.5]), "top_k": array([3, 4, 5]), "seed": array([4, 5, 6])}
        arrays = sampling_of(3, top_p=np.float32(0.75), **given_)  # type: ignore[arg-type]
        np.testing.assert_array_equal(process(scores, arrays), process(scores, plain))
        np.testing.assert_array_equal(choose(scores, arrays, drawn)[0], choose(scores, plain, drawn)[0])


# Refusals


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        (
            {"temperature": -1},
            "temperature = -1: must be 0 or more, or 2 such values, one a row. Change the setting.",
        ),
        (
            {"temperature": float("nan")},
            "temperature = nan: must be 0 or more, or 2 such values, one a row. Change the setting.",
        ),
        (
            {"top_p": [0.5, 1.5]},
            "top_p = [0.5, 1.5]: must be from 0 to 1, or 2 such values, one a row. Change the setting.",
        ),
        ({"min_p": -0.1}, "min_p = -0.1: must be from 0 to 1, or 2 such values, one a row. Change the setting."),
        (
            {"top_k": 2.5},
            "top_k = 2.5: must be a whole number, 0 or more, or 2 such values, one a row. Change the setting.",
        ),
        (
            {"top_k": [1, 2, 3]},
            "top_k = [1, 2, 3]: must be a whole number, 0 or more, or 2 such values, one a row. Change the setting.",
        ),
        (
            {"repetition_penalty": 0},
            "repetition_penalty = 0: must be above 0, or 2 such values, one a row. Change the setting.",
        ),
        (
            {"seed": -1},
            "seed = -1: must be an integer from 0 to 2**32 - 2, or 2 of them, one a row. Choose another seed.",
        ),
        (
            {"seed": [1]},
            "seed = [1]: must be an integer from 0 to 2**32 - 1, or 2 of them, one a row. Choose another seed.",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        sampling_of(2, **({"temperature": 1.0} | settings_))
    assert str(caught.value) == message


def test_greedy_rows_refuse_wrong_settings_too() -> None:
    with pytest.raises(InputError, match=r"^top_p = 2: must be from 0 to 1, or 1 such values, one a row\."):
        sampling_of(1, top_p=2)


def test_settings_beyond_float32_are_its_greatest_number() -> None:
    sampling = sampling_of(2, temperature=[1e39, 10**60], repetition_penalty=1e300)
    for values in (sampling.temperature, sampling.repetition_penalty):
        assert values is not None
        np.testing.assert_array_equal(values, np.finfo(np.float32).max)
