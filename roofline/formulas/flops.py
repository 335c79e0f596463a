"""FLOPs of the weight matmuls: by product, by token, by step. A multiply and an add are two FLOPs.

Elementwise work is in `elementwise` (0.03% of Qwen2.5-7B) and the attention products in `attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from roofline.formulas.attention import Attention, attention_flops
from roofline.formulas.params import num_matmul_params

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

Logits = Literal["last", "all"]


def matmul_flops(m: int, k: int, n: int) -> int:
    """FLOPs of [m, k] @ [k, n] as everybody counts them, 2*m*k*n (S000-028)."""
    return 2 * m * k * n


def matmul_operations(m: int, k: int, n: int) -> int:
    """Multiplies and adds that [m, k] @ [k, n] really takes, m*n*(2k - 1): the first product of a sum is not added
    (S000-027).
    """
    return m * n * (2 * k - 1)


def matmul_overcount_fraction(k: int) -> float:
    """By how much 2*m*k*n overstates, 1/(2k) of itself: 0.014% at k = 3584 (S000-024)."""
    return 1 / (2 * k)


def linear_flops(weights: int, tokens: int = 1) -> int:
    """FLOPs of a matrix of `weights` elements applied to `tokens` vectors, 2 * weights * tokens (S000-033)."""
    return 2 * weights * tokens


class FlopsPerToken(NamedTuple):
    """Weight-matmul FLOPs of one token: `backbone` always, `lm_head` for a position that needs logits."""

    backbone: int
    lm_head: int

    @property
    def total(self) -> int:
        return self.backbone + self.lm_head


def flops_per_token(config: ModelConfig) -> FlopsPerToken:
    """Weight-matmul FLOPs of one token, 2 * active matmul weights (Kaplan et al. 2020; S000-049, S000-295, S000-296).

    Independent of batch and length. Leaves out attention pairs, elementwise work and the lookup, which multiplies
    nothing.
    """
    return FlopsPerToken(
        backbone=linear_flops(num_matmul_params(config, experts="active", lm_head=False)),
        lm_head=linear_flops(config.vocab_size * config.hidden_size),
    )


class StepFlops(NamedTuple):
    """Matmul FLOPs of one step by where they arise."""

    backbone: int
    lm_head: int
    attention: int

    @property
    def total(self) -> int:
        return self.backbone + self.lm_head + self.attention


def step_flops(
    config: ModelConfig,
    query_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    attention: Attention = "causal",
    logits: Logits = "last",
) -> StepFlops:
    """Matmul FLOPs of one forward step: B sequences of T new tokens that attend S (S000-095, S003-013).

    Experts cost what the routed rows cost, B*T*A of them, however many distinct experts there are. Logits are taken at
    the last position of each sequence, or with "all" at every one.
    """
    per_token = flops_per_token(config)
    rows = batch if logits == "last" else batch * query_len
    return StepFlops(
        backbone=batch * query_len * per_token.backbone,
        lm_head=rows * per_token.lm_head,
        attention=attention_flops(config, query_len, kv_len, batch=batch, attention=attention),
    )


def cached_token_flops(
    flops_per_token: int, flops_per_context_token: int, context: int, *, lm_head_flops: int = 0
) -> int:
    """FLOPs of one new token with a KV cache, w + c*T + h, T = `context` keys attended (S000-137).

    w is the backbone's FLOPs per token, c the decode attention constant, h one output head where it is to count.
    """
    return flops_per_token + flops_per_context_token * context + lm_head_flops


def uncached_token_flops(
    flops_per_token: int, flops_per_token_squared: int, context: int, *, lm_head_flops: int = 0
) -> int:
    """FLOPs of one new token when all `context` tokens run again, w*T + c*T^2 + h (S000-138)."""
    return flops_per_token * context + flops_per_token_squared * context * context + lm_head_flops
