"""Bytes of the KV cache, and how many tokens and requests a pool holds.

`element_bytes` is 2 for bfloat16, 1 for float8; scales that a quantised cache keeps beside it are left out. Where it is
a whole number so is the result; a `Fraction` keeps half-byte elements exact.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from roofline.formulas.attention import causal_pairs

if TYPE_CHECKING:
    from qwenjax.config import ModelConfig

Number = TypeVar("Number", int, float, Fraction)


def kv_elements_per_token(layers: int, kv_heads: int, head_dim: int) -> int:
    """Elements of K and V that one token leaves in the cache, 2*L*K*H; query heads do not enter (S000-274,
    S003-015).
    """
    return 2 * layers * kv_heads * head_dim


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, element_bytes: Number) -> Number:
    """Bytes of K and V that one token leaves in the cache, 2*L*K*H*b (Pope et al. 2022; S003-016)."""
    return kv_elements_per_token(layers, kv_heads, head_dim) * element_bytes


def hidden_bytes_per_token(layers: int, hidden: int, element_bytes: Number) -> Number:
    """Bytes of caching each layer's input instead of K and V, L*D*b (S000-143); K and V would then be computed
    again.
    """
    return layers * hidden * element_bytes


def hidden_over_kv_ratio(hidden: int, kv_heads: int, head_dim: int) -> Fraction:
    """How much dearer caching hidden states is than caching K and V, D / (2*K*H) (S000-144)."""
    return Fraction(hidden, 2 * kv_heads * head_dim)


def kv_bytes_per_request(bytes_per_token: Number, tokens: int) -> Number:
    """Bytes that `tokens` cached tokens of one sequence take, every layer keeping every row (S000-155)."""
    return bytes_per_token * tokens


def attended_rows(query_len: int, kv_len: int, window: int | None = None) -> int:
    """Rows of one layer's cache that a step reads for a sequence: S, or with a window the W + T - 1 that any query can
    see.
    """
    return kv_len if window is None else min(kv_len, window + query_len - 1)


def kv_read_bytes(config: ModelConfig, query_len: int, kv_len: int, element_bytes: Number, *, batch: int = 1) -> Number:
    """Bytes of K and V that one step reads: each attended row once, the new ones included, whatever the number of query
    heads.

    That is the least a kernel can read; one that walks the queries in blocks reads rows again in prefill (S000-147).
    """
    rows = sum(attended_rows(query_len, kv_len, window) for window in config.sliding_windows)
    return batch * rows * kv_elements_per_token(1, config.num_key_value_heads, config.head_dim) * element_bytes


def kv_write_bytes(config: ModelConfig, query_len: int, element_bytes: Number, *, batch: int = 1) -> Number:
    """Bytes of K and V that one step appends, B*T rows in each layer (S000-146 at B = T = 1)."""
    layers, kv_heads = config.num_hidden_layers, config.num_key_value_heads
    return batch * query_len * kv_elements_per_token(layers, kv_heads, config.head_dim) * element_bytes


def kv_pool_bytes(capacity_bytes: float, utilization: float, weight_bytes: float, overhead_bytes: float) -> float:
    """Bytes left for the cache, capacity * utilization - weights - overhead (Kwon et al. 2023; S000-163).

    Overhead is what the caller can source: context, activations, graphs, fragmentation. Negative where the weights do
    not fit.
    """
    return capacity_bytes * utilization - weight_bytes - overhead_bytes


def implied_overhead_bytes(
    capacity_bytes: float, utilization: float, weight_bytes: float, measured_pool_bytes: float
) -> float:
    """The overhead that a measured pool implies, capacity * utilization - weights - pool (S000-170)."""
    return capacity_bytes * utilization - weight_bytes - measured_pool_bytes


def kv_tokens(pool_bytes: float, bytes_per_token: float, *, block_size: int = 16) -> int:
    """Tokens that a pool holds in whole blocks; 16 is vLLM's default block, 1 does not round (S000-166, S000-275)."""
    return block_size * int(pool_bytes // (block_size * bytes_per_token))


def concurrency(tokens: int, tokens_per_request: int) -> float:
    """Requests of that length that a pool of `tokens` holds, with the fraction, as vLLM logs it (S000-167)."""
    return tokens / tokens_per_request


def requests_that_fit(tokens: int, tokens_per_request: int, *, block_size: int = 1) -> int:
    """Whole requests that fit, each taking whole blocks; by default its exact length (S000-172, S003-060)."""
    return tokens // (-(-tokens_per_request // block_size) * block_size)


def decode_read_rows(prompt: int, output: int) -> int:
    """Rows of one layer's cache that the O - 1 decode steps of a request read together, sum of P+1 .. P+O-1."""
    return causal_pairs(output - 1, prompt + output - 1)
