"""The kernels of routed experts, in Pallas's interpreter, against the plain ways through them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwenjax.kernels import experts as kernel
from qwenjax.kernels.routing import choose, fits_choose, group
from qwenjax.moe import choose_experts, run_experts

FLOAT32, BFLOAT16 = (jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)  # with the tolerance
run = jax.jit(partial(kernel.experts, interpret=True))
reference = jax.jit(partial(run_experts, way="dense"))


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """Nearly all the time would be XLA's; what is compared is compiled alike, and unoptimised."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def normal(seed: int, *sizes: int, scale: float = 1.0, dtype: Any = np.float32) -> Any:
    return (scale * np.random.default_rng(seed).standard_normal(sizes)).astype(dtype)


def check(chosen_NA: Any, experts: int, width: int, hidden: int, dtype: Any, tolerance: float) -> None:
    """The kernel against the dense way, within a tolerance of the greatest expected value."""
    tokens, per_token = chosen_NA.shape
    arrays = (
        normal(1, tokens, hidden, dtype=dtype),
        np.random.default_rng(2).uniform(0.05, 0.5, (tokens, per_token)).astype(dtype),
        chosen_NA.astype(np.int32),
    )
    gate_up_ECFD = normal(3, experts, 2, width, hidden, scale=hidden**-0.5, dtype=dtype)
    down_EDF = normal(4, experts, hidden, width, scale=width**-0.5, dtype=dtype)
    out_ND = run(*arrays, gate_up_ECFD, down_EDF)
    expected = reference(*(array[None] for array in arrays), gate_up_ECFD, down_EDF)
    assert (out_ND.dtype, out_ND.shape) == (dtype, (tokens, hidden))
    wide = np.asarray(expected).astype(np.float32)[0]
    actual = np.asarray(out_ND).astype(np.float32)
    np.testing.assert_allclose(actual, wide, rtol=0, atol=tolerance * np.abs(wide).max())


def routed(tokens: int, experts: int, per_token: int, skew: float = 1.0) -> Any:
    """Different experts for each token; the more skew, the more tokens of the first ones."""
    scores_NE = np.random.default_rng(5).gumbel(size=(tokens, experts)) - skew * np.log1p(np.arange(experts))
    return np.argsort(-scores_NE, axis=1)[:, :per_token]


@pytest.mark.parametrize(
    ("experts", "per_token", "width", "hidden", "dtype", "tolerance"),
    [
        (16, 8, 96, 128, *BFLOAT16),
        (60, 4, 88, 160, *FLOAT32),  # Qwen1.5-MoE: neither experts nor widths are powers of two
        (7, 5, 130, 264, *FLOAT32),  # experts of a token that aren't either, and sums that end within a block
    ],
)
def test_one_token(experts: int, per_token: int, width: int, hidden: int, dtype: Any, tolerance: float) -> None:
    check(routed(1, experts, per_token), experts, width, hidden, dtype, tolerance)


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token", "width", "hidden", "dtype", "tolerance"),
    [
        (2, 60, 4, 88, 160, *FLOAT32),  # most experts without rows
        (20, 12, 3, 100, 72, *FLOAT32),  # tiles of 16 alone; no axis a multiple of its block
        (60, 6, 4, 96, 128, *FLOAT32),  # 40 rows an expert, tiles of up to 64
        (40, 8, 3, 96, 128, *BFLOAT16),  # 15
    ],
)
def test_several_tokens(
    tokens: int, experts: int, per_token: int, width: int, hidden: int, dtype: Any, tolerance: float
) -> None:
    check(routed(tokens, experts, per_token), experts, width, hidden, dtype, tolerance)


def test_many_rows_an_expert() -> None:
    """Tiles of every size: 400 rows of the favoured expert are three of 128 and one of 16, 95 are 64 and 32."""
    per_expert = [400, 0, 95, 17, 0]
    chosen_N1 = np.random.default_rng(6).permutation(np.repeat(np.arange(5), per_expert))[:, None]
    check(np.concatenate([chosen_N1, np.full_like(chosen_N1, 4)], 1), 5, 40, 48, *FLOAT32)


@pytest.mark.parametrize("expert", [0, 8])
def test_all_rows_of_one_expert(expert: int) -> None:
    check(np.full((37, 1), expert), 9, 48, 64, *FLOAT32)


@pytest.mark.parametrize(("rows", "experts"), [(8, 64), (256, 60), (2500, 9), (1024, 5)])
def test_rows_are_grouped_as_a_stable_sort_does(rows: int, experts: int) -> None:
    chosen_R = np.random.default_rng(7).integers(0, experts, rows) ** 2 // experts  # not every expert
    order_R, starts_E, ends_E = group(jnp.asarray(chosen_R, jnp.int32), experts, interpret=True)
    assert order_R.tolist() == np.argsort(chosen_R, kind="stable").tolist()
    counts_E = np.bincount(chosen_R, minlength=experts)
    assert (np.asarray(ends_E) - np.asarray(starts_E)).tolist() == counts_E.tolist()
    assert ends_E.tolist() == np.cumsum(counts_E).tolist()


@pytest.mark.parametrize(
    ("experts", "per_token", "renormalise", "dtype", "tolerance"),
    [(128, 8, True, *BFLOAT16), (60, 4, False, *BFLOAT16), (60, 4, True, *FLOAT32), (7, 7, False, *FLOAT32)],
)
def test_the_choice_of_experts(experts: int, per_token: int, renormalise: bool, dtype: Any, tolerance: float) -> None:
    """Indices exactly: the first token's scores are all equal and the second's in threes, so that the lower wins."""
    logits_NE = normal(8, 5, experts)
    logits_NE[0], logits_NE[1] = 0.5, np.arange(experts) // 3
    logits_NE = jnp.asarray(logits_NE, dtype)
    weights, chosen = choose(logits_NE, experts_per_token=per_token, renormalise=renormalise, interpret=True)
    expected, expected_chosen = choose_experts(logits_NE, per_token, renormalise)
    assert chosen.tolist() == expected_chosen.tolist()
    assert chosen[0].tolist() == list(range(per_token))
    assert (weights.dtype, chosen.dtype) == (expected.dtype, expected_chosen.dtype)
    np.testing.assert_allclose(np.asarray(weights, np.float32), np.asarray(expected, np.float32), rtol=tolerance)


def test_scores_that_are_no_numbers_choose_an_expert_that_exists() -> None:
    _, chosen = choose(jnp.full((1, 5), jnp.nan, jnp.bfloat16), experts_per_token=2, renormalise=True, interpret=True)
    assert np.asarray(chosen).max() < 5


def test_what_the_kernels_take() -> None:
    def shapes(tokens: int, dtype: Any) -> Any:
        sizes = ((tokens, 32), (tokens, 2), (4, 2, 24, 32), (4, 32, 24))
        return [jax.ShapeDtypeStruct(size, dtype) for size in sizes]

    assert kernel.fits(*shapes(3, jnp.bfloat16))
    assert kernel.fits(*shapes(1, jnp.float16))
    assert not kernel.fits(*shapes(3, jnp.float32))
    assert not kernel.fits(*shapes(3, jnp.bfloat16)[:3], shapes(3, jnp.float16)[3])
    assert not kernel.fits(*shapes(0, jnp.bfloat16))
    assert fits_choose(jax.ShapeDtypeStruct((3, 60), jnp.bfloat16), 4)
    assert not fits_choose(jax.ShapeDtypeStruct((3, 60), jnp.bfloat16), 61)
    assert not fits_choose(jax.ShapeDtypeStruct((3, 60), jnp.float32), 4)
