"""FLOPs of the attention kernel: (query, key) pairs times a cost for each pair.

One pair costs 2*H for its score and 2*H for its share of the value sum, in each query head; grouped KV heads save
memory, not these FLOPs (Ainslie et al. 2023). Softmax, scaling and the mask are in `elementwise`. All results are whole
numbers.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING, Literal

from qwenjax.errors import InputError

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

Attention = Literal["causal", "dense"]


def attention_flops_per_pair(heads: int, head_dim: int, layers: int = 1) -> int:
    """FLOPs of one query attending one key, 4*N*H in each layer: the decode constant per context token (S000-088)."""
    return 4 * heads * head_dim * layers


def prefill_attention_flops_per_token_squared(heads: int, head_dim: int, layers: int = 1) -> int:
    """The causal prefill constant 2*N*H*L: FLOPs over S^2 to leading order, short of the diagonal by 1 + 1/S
    (S000-084).
    """
    return 2 * heads * head_dim * layers


def causal_pairs(query_len: int, kv_len: int | None = None, window: int | None = None) -> int:
    """Pairs of one causal sequence: T new tokens, the last of which attends S keys, itself included.

    S is `kv_len`, T itself by default (a prefill from nothing). With a window each query keeps its last `window` keys.
    T*S - T*(T-1)/2 without a window; with one, the first queries grow up to it and the others stay at it (S000-085).
    """
    last = _attended(query_len, kv_len)
    first = last - query_len + 1
    if window is None or window >= last:
        return query_len * (first + last) // 2
    growing = min(max(window - first + 1, 0), query_len)
    return growing * (2 * first + growing - 1) // 2 + (query_len - growing) * window


def dense_pairs(query_len: int, kv_len: int | None = None) -> int:
    """Pairs of an unmasked product, T*S: what a kernel that computes and then masks multiplies (S002-064)."""
    return query_len * _attended(query_len, kv_len)


def attention_pairs(
    query_len: int, kv_len: int | None = None, *, attention: Attention = "causal", window: int | None = None
) -> int:
    """Pairs by the named convention; "dense" ignores the window along with the mask."""
    return dense_pairs(query_len, kv_len) if attention == "dense" else causal_pairs(query_len, kv_len, window)


def attention_flops(
    config: ModelConfig,
    query_len: int,
    kv_len: int | None = None,
    *,
    batch: int = 1,
    attention: Attention = "causal",
) -> int:
    """FLOPs of both attention products over all layers and their windows, of `batch` equal sequences.

    T = `query_len` new tokens, the last of which attends S = `kv_len` keys, itself included: a prefill where S is left
    out (S000-086), a chunk of one where S > T (Agrawal et al. 2023), a decode step where T is 1 (S000-093).
    """
    pairs = sum(
        attention_pairs(query_len, kv_len, attention=attention, window=window) for window in config.sliding_windows
    )
    return batch * pairs * attention_flops_per_pair(config.num_attention_heads, config.head_dim)


def half_square_attention_flops(heads: int, head_dim: int, layers: int, length: int) -> int:
    """FLOPs of a causal prefill taken as S^2/2, without the half diagonal (S000-055); windows are left out."""
    return prefill_attention_flops_per_token_squared(heads, head_dim, layers) * length * length


def _attended(query_len: int, kv_len: int | None) -> int:
    if kv_len is None:
        return query_len
    if kv_len < query_len:
        raise InputError("kv_len", kv_len, f"is less than query_len = {query_len}", "Count the new tokens in it.")
    return kv_len


def attention_flops_fraction(attention_flops: float, other_flops: float) -> float:
    """Share of attention in the FLOPs of a step, a / (a + rest) (S000-101)."""
    return attention_flops / (attention_flops + other_flops)


def crossover_length(flops_per_token: float, flops_per_token_squared: float, fixed_flops: float = 0) -> float:
    """Prompt length at which attention costs as much as the weights: the root of c*S^2 = w*S + h (S000-096, S000-097).

    w is `flops_per_token` of the backbone, c the attention constant of the wanted convention and h (`fixed_flops`) one
    output head. Without h it is w / c, and exact for whole numbers that divide.
    """
    if not fixed_flops:
        return flops_per_token / flops_per_token_squared
    linear, square = flops_per_token, flops_per_token_squared
    return (linear + sqrt(linear * linear + 4 * square * fixed_flops)) / (2 * square)


def kv_head_of(query_head: int, heads: int, kv_heads: int) -> int:
    """KV head that a query head reads, floor(h / (N/K)) (Ainslie et al. 2023; S000-070, S001-021)."""
    return query_head // (heads // kv_heads)


def attention_scale(head_dim: int) -> float:
    """Factor on the scores, 1/sqrt(H) (Vaswani et al. 2017; S002-042); QK-norm does not remove it."""
    return 1 / sqrt(head_dim)
