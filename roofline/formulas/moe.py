"""Sparse blocks: widths, activated weights, distinct experts of a batch and the bytes that a decode step reads.

E experts, A (`experts_per_token`) of them for each token. Routing is taken as uniform and independent between tokens,
which is exact in expectation under that assumption; skewed routing touches fewer experts and loads them unevenly.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, expm1, log1p
from typing import TYPE_CHECKING, Literal, NamedTuple

from qwenjax.errors import InputError
from roofline.formulas.params import (
    mlp_params,
    moe_block_params,
    num_active_params,
    num_params,
    num_sparse_layers,
)

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

Experts = Literal["expected", "all"] | int
Embedding = Literal["none", "rows", "table"]


def expert_params(hidden: int, expert_width: int) -> int:
    """Weights of one expert, 3*D*F (S000-205)."""
    return mlp_params(hidden, expert_width)


def active_ffn_width(experts_per_token: int, expert_width: int, shared_width: int = 0) -> int:
    """Feed-forward width that one token sees, A*F + Fs (S000-183)."""
    return experts_per_token * expert_width + shared_width


def total_ffn_width(experts: int, expert_width: int, shared_width: int = 0) -> int:
    """Feed-forward width of one sparse block, E*F + Fs (S000-198)."""
    return experts * expert_width + shared_width


def moe_active_params(
    hidden: int, experts: int, experts_per_token: int, expert_width: int, shared_width: int = 0
) -> int:
    """Weights of one sparse block that one token uses: the whole router, A experts, the shared expert (S000-292,
    S001-041).
    """
    idle = (experts - experts_per_token) * expert_params(hidden, expert_width)
    return moe_block_params(hidden, experts, expert_width, shared_width) - idle


def num_expert_params(config: ModelConfig) -> int:
    """Weights of all routed experts of all sparse layers."""
    sparse = num_sparse_layers(config)
    return (
        sparse * config.num_experts * expert_params(config.hidden_size, config.moe_intermediate_size) if sparse else 0
    )


def active_fraction(config: ModelConfig) -> Fraction:
    """Activated over all parameters, both embedding matrices in both (S000-211, S001-045)."""
    return Fraction(num_active_params(config), num_params(config))


def distinct_experts(experts: int, experts_per_token: int, tokens: int) -> float:
    """Expected distinct experts that `tokens` tokens touch in one layer, E*(1 - (1 - A/E)^B) (S000-228)."""
    if tokens == 0:
        return 0.0
    if experts_per_token == experts:
        return float(experts)
    expected = -experts * expm1(tokens * log1p(-experts_per_token / experts))
    # Rounding must not take it outside what any routing can do.
    return float(min(max(expected, experts_per_token), experts, tokens * experts_per_token))


def most_distinct_experts(experts: int, experts_per_token: int, tokens: int) -> int:
    """The most distinct experts that `tokens` tokens can touch, min(E, A*B): what vLLM's counter charges."""
    return min(experts, experts_per_token * tokens)


def tokens_to_touch(experts: int, experts_per_token: int, fraction: float) -> int:
    """Smallest batch whose expected distinct experts reach `fraction` of all: 35 for 8 of 64 at 0.99 (S000-247)."""
    miss, idle = 1 - Fraction(str(fraction)), 1 - Fraction(experts_per_token, experts)
    if not 0 < miss < 1:
        raise InputError("fraction", fraction, "is not between 0 and 1", "Give the share of the experts, such as 0.99.")
    if not idle:
        return 1
    tokens = max(ceil(log1p(-float(fraction)) / log1p(-experts_per_token / experts)), 1)
    while idle**tokens > miss:  # the logarithms can be off by one at a whole number
        tokens += 1
    while tokens > 1 and idle ** (tokens - 1) <= miss:
        tokens -= 1
    return tokens


def touched_experts(experts: int, experts_per_token: int, tokens: int, count: Experts = "expected") -> float:
    """Distinct experts of one layer by the named convention; a number is taken as measured."""
    if count == "expected":
        return distinct_experts(experts, experts_per_token, tokens)
    return experts if count == "all" else count


def resident_params(config: ModelConfig, *, embedding_table: bool = False) -> int:
    """Parameters that every step reads whatever the routing: all but the experts and the input table, of which it reads
    rows.

    A tied table stays, since the output head reads all of it. `embedding_table=True` counts it anyway (S000-229).
    """
    lookup = 0 if embedding_table or config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return num_params(config) - num_expert_params(config) - lookup


def step_weight_bytes(
    config: ModelConfig,
    tokens: int = 1,
    *,
    weight_bytes: float = 2,
    experts: Experts = "expected",
    embedding: Embedding = "none",
) -> float:
    """Bytes of weights that one step over `tokens` tokens reads, each once: decode of a batch B has B tokens
    (S000-297).

    Dense models read `2 * (total - V*D)` at two bytes a weight (S000-153). "rows" adds the looked-up rows of the
    embedding, "table" all of it. Norms and biases are taken at `weight_bytes` too; quantisation scales are left out.
    Whole-number inputs with "all", a number of experts or a dense model give an exact whole number.
    """
    hidden, sparse = config.hidden_size, num_sparse_layers(config)
    read: float = resident_params(config, embedding_table=embedding == "table")
    if sparse:
        touched = touched_experts(config.num_experts, config.num_experts_per_tok, tokens, experts)
        read += sparse * touched * expert_params(hidden, config.moe_intermediate_size)
    if embedding == "rows":
        read += tokens * hidden
    return read * weight_bytes


class ExpertRow(NamedTuple):
    """One line of the table batch -> experts -> bytes."""

    batch: int
    distinct_experts: float
    weight_bytes: float
    weight_bytes_per_token: float
    fraction_of_all: float


def expert_row(config: ModelConfig, batch: int, *, weight_bytes: float = 2) -> ExpertRow:
    """What a decode step of `batch` sequences reads of the weights, and its share of all that a step can read
    (S000-229).
    """
    read = step_weight_bytes(config, batch, weight_bytes=weight_bytes)
    return ExpertRow(
        batch=batch,
        distinct_experts=distinct_experts(config.num_experts, config.num_experts_per_tok, batch),
        weight_bytes=read,
        weight_bytes_per_token=read / batch,
        fraction_of_all=read / step_weight_bytes(config, batch, weight_bytes=weight_bytes, experts="all"),
    )


def load_imbalance(tokens_by_expert: list[int]) -> float:
    """Greatest load over mean load: how much longer the step of the busiest expert is than a balanced one
    (S000-252).
    """
    return max(tokens_by_expert) * len(tokens_by_expert) / sum(tokens_by_expert)
