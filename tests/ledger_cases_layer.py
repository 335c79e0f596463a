"""Ledger cases of seed 002, one Qwen3-8B layer: counts and shapes. Numerics and the toy layer are elsewhere."""

from __future__ import annotations

from dataclasses import replace

from ledger_models import QWEN3_8B, Case, group, in_out, letters, params, per_layer, percent_of, product_of, step_sum
from ledger_tiny import kv_heads_read, rope_partners

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.layers import rope_frequencies
from qwenjax.ops import weights_of
from roofline import formulas as f

M = QWEN3_8B
MHA_8B = replace(M, num_key_value_heads=32)


def layer_params(config: ModelConfig = M) -> int:
    norms = f.layer_norm_params(M.hidden_size)
    return per_layer(config, "attention", "mlp", "qk_norm", "attention_bias") + norms


def split_shape(name: str, heads: str) -> list[int]:
    return [*in_out(M, name), *letters(M, heads + "H")]


def dense_attention(tokens: int) -> int:
    """Scores and values of one layer, full square."""
    return f.attention_flops_per_pair(32, 128) * f.dense_pairs(tokens)


def linear(tokens: int) -> int:
    return f.linear_flops(per_layer(M, "attention", "mlp"), tokens)


def crossovers() -> list[float]:
    dense, causal = f.attention_flops_per_pair(32, 128), f.prefill_attention_flops_per_token_squared(32, 128)
    return [f.crossover_length(linear(1), constant) for constant in (dense, causal)]


def kv_ratio() -> list[float]:
    kv = [f.matrix_params(*shape(c)) for c in (M, MHA_8B)]
    q = [f.matrix_params(c.hidden_size, product_of(c, "NH")) for c in (M, MHA_8B)]
    return [params(MHA_8B).kv_bytes_per_token / params(M).kv_bytes_per_token, kv[1] / kv[0], q[1] / q[0]]


def shape(config: ModelConfig) -> list[int]:
    return in_out(config, "k_proj")


def qk_norm_shapes() -> list[int]:
    return [product_of(M, weight.letters) for weight in weights_of(M) if weight.group == "qk_norm"]


def flops_are_a_bound() -> bool:
    """The bound is the greater of two times, so FLOPs over peak alone can't stand for a latency."""
    flops, moved = step_sum(M, Step.decode(1, 1024), "flops"), step_sum(M, Step.decode(1, 1024), "bytes")
    time_s = f.bound_time_s(flops, moved, 165.2e12, 1008e9)
    return time_s == moved / 1008e9 > 50 * flops / 165.2e12


CASES: dict[str, Case] = {
    "S002-001": lambda: letters(M, "DNKHFL"),
    "S002-022": lambda: split_shape("q_proj", "N"),
    "S002-023": lambda: split_shape("k_proj", "K"),
    "S002-024": lambda: split_shape("v_proj", "K"),
    "S002-025": lambda: product_of(M, "KH"),
    "S002-026": lambda: group(M, "attention_bias"),
    "S002-029": lambda: qk_norm_shapes()[0],
    "S002-030": qk_norm_shapes,
    "S002-034": lambda: len(rope_frequencies(M.head_dim, M.rope_theta, None)[0]),
    "S002-037": lambda: rope_partners(M.head_dim, (0, 1)),
    "S002-038": lambda: rope_frequencies(2, 1e6, None)[0][0],
    "S002-040": lambda: kv_heads_read(32, 8, (0, 3, 4, 7, 31)),
    "S002-042": lambda: f.attention_scale(M.head_dim),
    "S002-043": lambda: [params(c).attention_flops["decode_per_context_token"] for c in (M, MHA_8B)],
    "S002-050": lambda: [*letters(M, "NH"), product_of(M, "NH")],
    "S002-052": lambda: [in_out(M, name) for name in ("gate_proj", "up_proj", "down_proj")],
    "S002-056": lambda: per_layer(M, "attention"),
    "S002-057": lambda: per_layer(M, "mlp"),
    "S002-058": lambda: per_layer(M, "attention", "mlp"),
    "S002-059": lambda: f.layer_norm_params(M.hidden_size) + per_layer(M, "qk_norm"),
    "S002-060": layer_params,
    "S002-061": lambda: params(M).num_params,
    "S002-062": lambda: percent_of(group(M, "mlp"), group(M, "attention", "mlp")),
    "S002-063": lambda: linear(128) / 1e9,
    "S002-064": lambda: dense_attention(128) / 1e9,
    "S002-065": lambda: [linear(256) / linear(128), dense_attention(256) / dense_attention(128)],
    "S002-066": crossovers,
    "S002-067": lambda: f.kv_bytes_per_token(1, 8, 128, 2),
    "S002-068": lambda: params(M).kv_bytes_per_token / 1024,
    "S002-081": kv_ratio,
    "S002-082": lambda: (
        1 < layer_params(MHA_8B) / layer_params() < 4 and params(MHA_8B).num_params < 4 * params(M).num_params
    ),
    "S002-087": flops_are_a_bound,
}
