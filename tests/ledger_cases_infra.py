"""Ledger cases of seed 003: the bill of materials of Qwen2.5-7B without norms and biases, and its thought
experiments.
"""

from __future__ import annotations

from dataclasses import astuple, replace

from ledger_models import (
    GB,
    GIB,
    MEASURED_POOL_BYTES,
    MHA_7B,
    QWEN2_57B,
    QWEN3_32B,
    QWEN25_7B,
    TIED_7B,
    Case,
    group,
    in_out,
    params,
    per_layer,
    percent_of,
    product_of,
    row,
    seed_prefill,
    step_sum,
)

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline import formulas as f
from roofline.bill import bill_of_materials

M = QWEN25_7B
COUNTED = ("embedding", "attention", "mlp", "lm_head")  # the four rows of the seed's counter


def counted() -> int:
    return group(M, *COUNTED)


def flop_share(name: str) -> float:
    return percent_of(f.linear_flops(group(M, name)), params(M).flops_per_token["total"])


def change(of: str) -> float:
    """Percent by which a figure of the counter grows without grouped KV heads."""
    if of == "params":
        return percent_of(group(MHA_7B, *COUNTED) - counted(), counted())
    before, after = (params(c).flops_per_token["total"] for c in (M, MHA_7B))
    return percent_of(after - before, before)


def requests(config: ModelConfig) -> int:
    tokens = f.kv_tokens(MEASURED_POOL_BYTES, params(config).kv_bytes_per_token)
    return f.requests_that_fit(tokens, 1280)


def weights_are_fixed_and_kv_grows() -> bool:
    steps = [Step.decode(batch, 1024) for batch in (1, 8)]
    weights = [step_sum(M, s, "weight_bytes") - row(M, "embed", s).weight_bytes for s in steps]
    return weights[0] == weights[1] and [step_sum(M, s, "kv_read_bytes") for s in steps] == [
        1024 * 57_344,
        8192 * 57_344,
    ]


def weight_order() -> bool:
    matrices = {name: f.matrix_params(*in_out(M, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    q, k, v, o = matrices.values()
    kernel = row(M, "scores", Step()).weight_bytes + row(M, "values", Step()).weight_bytes
    return bool(per_layer(M, "mlp") > q == o > k == v > f.layer_norm_params(M.hidden_size) > 0 == kernel)


def kv_ignores_query_heads() -> bool:
    halved = replace(M, num_attention_heads=4)
    return params(halved).kv_bytes_per_token == params(M).kv_bytes_per_token


def memory_grows_compute_does_not() -> bool:
    """All experts are resident; a token's FLOPs are those of a dense model with A experts' width, router and gate
    apart.
    """
    active = f.active_ffn_elements(QWEN2_57B) // QWEN2_57B.num_hidden_layers
    dense = replace(QWEN2_57B, model_type="qwen2", num_experts=0, intermediate_size=active)
    extra = f.linear_flops(group(QWEN2_57B, "router", "shared_expert_gate"))
    same_flops = params(QWEN2_57B).flops_per_token["total"] - extra == params(dense).flops_per_token["total"]
    return same_flops and params(QWEN2_57B).weight_bytes > 4 * params(dense).weight_bytes


def prefill_hardly_faster_with_gqa() -> bool:
    grouped, full = (step_sum(c, Step.prefill(1, 1024), "flops") for c in (M, MHA_7B))
    return 0.9 < grouped / full < 1


def square_term_is_apart() -> bool:
    """What a prefill costs beyond 2 * weights is attention, and grows as the square of the length."""

    def extra(length: int) -> int:
        per_token = params(M).flops_per_token
        weights = length * per_token["backbone"] + per_token["lm_head"]
        return step_sum(M, Step.prefill(1, length), "flops", attention="dense") - weights

    return extra(1024) > 0 and extra(2048) == 4 * extra(1024)


CASES: dict[str, Case] = {
    "S003-002": lambda: len(astuple(bill_of_materials(M, params(M))[0])[1:]),
    "S003-003": weights_are_fixed_and_kv_grows,
    "S003-004": lambda: [percent_of(group(M, "mlp"), counted()), flop_share("mlp")],
    "S003-005": weight_order,
    "S003-006": kv_ignores_query_heads,
    "S003-007": counted,
    "S003-008": lambda: product_of(QWEN3_32B, "NH") == QWEN3_32B.hidden_size,
    "S003-009": lambda: per_layer(M, "attention"),
    "S003-010": lambda: per_layer(M, "mlp"),
    "S003-011": lambda: [group(c, "embedding", "lm_head") for c in (M, TIED_7B)],
    "S003-012": lambda: params(M).flops_per_token["total"] / GB,
    "S003-013": lambda: f.step_flops(M, 1024)[0] / GB + f.step_flops(M, 1024)[1] / GB,
    "S003-014": lambda: 100 * f.attention_flops_fraction(*seed_prefill(1024)),
    "S003-015": lambda: f.kv_bytes_per_token(28, 4, 128, 2),
    "S003-016": lambda: [params(replace(M, num_key_value_heads=heads)).kv_bytes_per_token for heads in (28, 4, 1)],
    "S003-017": lambda: params(MHA_7B).kv_bytes_per_token / params(M).kv_bytes_per_token,
    "S003-018": lambda: row(M, "rope", Step()).weight_bytes,
    "S003-019": memory_grows_compute_does_not,
    "S003-020": lambda: percent_of(group(M, "norm", "attention_bias"), params(M).num_params),
    "S003-021": lambda: params(M).num_params / GB,
    "S003-022": lambda: group(M, "embedding"),
    "S003-023": lambda: percent_of(group(M, "embedding"), counted()),
    "S003-024": lambda: row(M, "embed", Step()).flops,
    "S003-025": lambda: group(M, "attention"),
    "S003-026": lambda: percent_of(group(M, "attention"), counted()),
    "S003-027": lambda: f.linear_flops(group(M, "attention")) / GB,
    "S003-028": lambda: group(M, "mlp"),
    "S003-029": lambda: percent_of(group(M, "mlp"), counted()),
    "S003-030": lambda: f.linear_flops(group(M, "mlp")) / GB,
    "S003-031": lambda: group(M, "lm_head"),
    "S003-032": lambda: percent_of(group(M, "lm_head"), counted()),
    "S003-033": lambda: params(M).flops_per_token["lm_head"] / GB,
    "S003-034": counted,
    "S003-035": lambda: params(M).flops_per_token["total"] / GB,
    "S003-036": lambda: sum(percent_of(group(M, name), counted()) for name in COUNTED),
    "S003-038": lambda: percent_of(group(M, "mlp"), counted()),
    "S003-039": lambda: flop_share("mlp"),
    "S003-040": lambda: percent_of(group(M, "attention"), counted()),
    "S003-041": lambda: M.intermediate_size / M.hidden_size,
    "S003-042": lambda: M.num_hidden_layers,
    "S003-043": lambda: M.hidden_size,
    "S003-044": lambda: M.num_attention_heads,
    "S003-045": lambda: M.num_key_value_heads,
    "S003-046": lambda: M.intermediate_size,
    "S003-047": lambda: M.vocab_size,
    "S003-048": lambda: M.head_dim,
    "S003-049": lambda: params(M).weight_bytes < 24 * GIB,
    "S003-051": lambda: params(MHA_7B).kv_bytes_per_token / params(M).kv_bytes_per_token,
    "S003-052": lambda: [change("params"), change("flops")],
    "S003-053": lambda: percent_of(group(M, "attention"), group(M, "attention", "mlp")),
    "S003-054": lambda: [params(c).kv_bytes_per_token for c in (M, MHA_7B)],
    "S003-055": prefill_hardly_faster_with_gqa,
    "S003-056": lambda: [params(QWEN2_57B).num_params / GB, params(QWEN2_57B).num_active_params / GB],
    "S003-057": lambda: (params(M).num_params - params(TIED_7B).num_params) / GB,
    "S003-058": square_term_is_apart,
    "S003-059": lambda: [group(M, "mlp") / GB, counted() / GB],
    "S003-060": lambda: [requests(M), requests(MHA_7B)],
    "S003-061": lambda: [
        params(QWEN2_57B).num_params / params(M).num_params,
        params(QWEN2_57B).flops_per_token["total"] / params(M).flops_per_token["total"],
    ],
}
