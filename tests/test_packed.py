"""Sequences packed into one row against each alone, and against changes in their neighbours."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.model import forward
from qwenjax.packed import forward_packed, segment_starts

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CONFIGS = {
    "qwen2": tiny.config("qwen2", num_hidden_layers=2),
    "windowed": tiny.config("qwen3", num_hidden_layers=2, **WINDOWED),
    "experts": tiny.moe_config("qwen3_moe", num_hidden_layers=2),
}
LENGTHS = (9, 1, 5)  # and one token of padding
SEGMENTS = np.repeat([3, 0, 7, 3], [*LENGTHS, 1])
ENDS = np.cumsum(LENGTHS)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_sequences_equal_each_alone(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), np.asarray(tiny.tokens(name, 2, 16))
    segments_BT = np.stack([SEGMENTS, np.full(16, 1)])  # the second row is one sequence
    packed_BTV = np.asarray(forward_packed(config, params, tokens_BT, segments_BT))
    whole_BTV = np.asarray(forward(config, params, tokens_BT))
    np.testing.assert_allclose(packed_BTV[1], whole_BTV[1], rtol=0, atol=2e-5)
    assert np.abs(packed_BTV[0, LENGTHS[0] :] - whole_BTV[0, LENGTHS[0] :]).max() > 0.1
    for end, length in zip(ENDS, LENGTHS, strict=True):
        own = slice(end - length, end)
        alone = np.zeros((1, 9), np.int32)  # padded, so that one compiled function serves all
        alone[0, :length] = tokens_BT[0, own]
        expected_TV = np.asarray(forward(config, params, alone))[0, :length]
        np.testing.assert_allclose(packed_BTV[0, own], expected_TV, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen2", "windowed"])
def test_a_neighbour_changes_nothing(name: str) -> None:
    config = CONFIGS[name]
    params, tokens_BT = tiny.params(config), np.array(tiny.tokens(name, 1, 16))
    before = np.asarray(forward_packed(config, params, tokens_BT, SEGMENTS[None]))
    tokens_BT[0, : ENDS[0]] = tiny.tokens("other", ENDS[0])
    after = np.asarray(forward_packed(config, params, tokens_BT, SEGMENTS[None]))
    np.testing.assert_array_equal(after[:, ENDS[0] :], before[:, ENDS[0] :])
    assert np.abs(after[:, : ENDS[0]] - before[:, : ENDS[0]]).max() > 0.1


@given(runs=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_sequences_begin_where_the_id_changes(runs: list[tuple[int, int]]) -> None:
    ids: list[int] = [segment for segment, length in runs for _ in range(length)]
    ids += [9] * (16 - len(ids))
    expected: list[Any] = []
    for place, segment in enumerate(ids):
        expected.append(place if place == 0 or segment != ids[place - 1] else expected[-1])
    assert segment_starts(jnp.array([ids])).tolist() == [expected]
