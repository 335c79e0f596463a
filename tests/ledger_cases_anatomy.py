"""Ledger cases of seed 000 up to section 09.1: parameters, FLOPs and attention of Qwen2.5-7B. Numerics are
elsewhere.
"""

from __future__ import annotations

from functools import partial

from ledger_models import (
    GB,
    MHA_7B,
    QWEN25_7B,
    Case,
    causal_attention,
    group,
    in_out,
    letters,
    params,
    per_layer,
    percent_of,
    product_of,
    row,
    seed_prefill,
    step_sum,
)
from ledger_tiny import kv_heads_read, rope_partners

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline import formulas as f
from roofline.bill import layer_matmuls
from roofline.count import count_step

M = QWEN25_7B
ROUNDED_BACKBONE = 13_050_000_000  # the seed's "13.05 GFLOP", which some of its figures start from
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def shape_row(name: str) -> list[int]:
    matrix = next(m for m in layer_matmuls(M) if m.name == name)
    return [matrix.in_features, matrix.out_features, matrix.weights, matrix.flops_per_token]


def no_norms() -> int:
    """Parameters of Qwen2.5-7B without norms and biases."""
    return group(M, "embedding", "attention", "mlp", "lm_head")


def seed_request() -> f.RequestFlops:
    return f.request_flops(M, 1024, 256, convention="seed")


def exact_request() -> f.RequestFlops:
    return f.request_flops(M, 1024, 256)


def vllm_request(chunk: int | None = None) -> int:
    return f.request_flops(M, 1024, 256, convention="vllm-0.26", chunk=chunk).total


def elementwise() -> list[int]:
    by_kind = f.elementwise_flops_per_token(M)
    kinds = [by_kind[kind] for kind in ("rms_norm", "rope", "bias", "silu_product", "residual")]
    return [*kinds, sum(by_kind.values())]


def logits_saved() -> int:
    """Positions of a 1024-token prefill that get no logits."""
    every = row(M, "unembed", Step.prefill(1, 1024), logits="all").flops
    return int((every - row(M, "unembed", Step.prefill(1, 1024)).flops) // params(M).flops_per_token["lm_head"])


def share(name_or_group: int) -> list[float]:
    return [name_or_group, percent_of(name_or_group, params(M).num_params)]


def attention_share(length: int) -> float:
    return 100 * f.attention_flops_fraction(*seed_prefill(length))


def weights_dominate_below_crossover() -> bool:
    return all(attention < weights for attention, weights in map(seed_prefill, (1024, 8192, 32768, 65020)))


def prefill_ignores_batch_weights() -> list[int]:
    # o_proj is the same square as q_proj, which runs fused with k and v.
    return [int(row(M, "o_proj", Step.prefill(1, new)).weight_bytes) // 28 for new in (1, 8, 4096)]


def decode_reads_kv_heads_only() -> bool:
    wide = ModelConfig(
        model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
        num_attention_heads=56, num_key_value_heads=4, head_dim=128, qkv_bias=True,
    )  # fmt: skip
    step = Step.decode(1, 1152)
    return step_sum(wide, step, "kv_read_bytes") == step_sum(M, step, "kv_read_bytes") == 1152 * 57_344


def causal_ratio() -> bool:
    pairs = [f.causal_pairs(s) for s in (1, 2, 3, 1024)]
    return pairs == [1, 3, 6, 524_800] and 2 * pairs[-1] / 1024**2 == 1 + 1 / 1024


def kernel_matmul_steps() -> list[int]:
    """Positions of the matmuls among the kernel's five steps."""
    five = ("scores", "scale", "mask", "softmax", "values")
    contractions = {r.op for r in count_step(M, Step()) if r.kind == "attention"}
    return [i for i, name in enumerate(five, 1) if name in contractions]


def crossovers() -> list[float]:
    matmul, trunk = f.num_matmul_params(M, lm_head=False), f.num_backbone_params(M)
    constant = f.prefill_attention_flops_per_token_squared(28, 128, 28)
    return [
        f.crossover_length(f.linear_flops(matmul), constant),
        f.crossover_length(f.linear_flops(trunk), constant),
        f.crossover_length(f.linear_flops(trunk), constant, f.flops_per_token(M).lm_head),
    ]


CASES: dict[str, Case] = {
    "S000-001": lambda: M.num_hidden_layers,
    "S000-006": lambda: len(layer_matmuls(M)),
    "S000-008": lambda: in_out(M, "k_proj")[::-1],
    "S000-010": lambda: f.matrix_params(*in_out(M, "k_proj")),
    "S000-013": prefill_ignores_batch_weights,
    **{f"S000-{14 + i:03}": partial(shape_row, name) for i, name in enumerate(PROJECTIONS)},
    "S000-021": lambda: [per_layer(M, "attention", "mlp"), params(M).flops_per_token["backbone"] // 28],
    "S000-022": lambda: [
        row(M, op, Step.prefill(1, 1024), attention="dense").flops // 28 for op in ("scores", "values")
    ],
    "S000-023": lambda: [3, f.matmul_operations(1, 3, 1) - 3, f.matmul_operations(1, 3, 1), f.matmul_flops(1, 3, 1)],
    "S000-024": lambda: 100 * f.matmul_overcount_fraction(3584),
    "S000-027": lambda: f.matmul_operations(2, 3, 2),
    "S000-028": lambda: f.matmul_flops(2, 3, 2),
    "S000-029": lambda: f.matmul_flops(2, 3, 2) - f.matmul_operations(2, 3, 2),
    "S000-030": lambda: 100 * f.matmul_overcount_fraction(3),
    "S000-031": lambda: f.matrix_params(*in_out(M, "q_proj")),
    "S000-032": lambda: f.linear_flops(f.matrix_params(*in_out(M, "q_proj"))) / 1e6,
    "S000-033": lambda: [f.linear_flops(f.matrix_params(*in_out(M, "q_proj")), tokens) for tokens in (1, 7)],
    "S000-034": elementwise,
    "S000-035": lambda: row(M, "embed", Step()).flops,
    "S000-036": lambda: params(M).num_params,
    "S000-037": lambda: group(M, "embedding"),
    "S000-038": lambda: f.resident_params(M),
    "S000-039": lambda: f.linear_flops(f.resident_params(M)) / GB,
    "S000-040": lambda: f.num_backbone_params(M),
    "S000-041": lambda: f.linear_flops(f.num_backbone_params(M)) / GB,
    "S000-042": lambda: group(M, "lm_head"),
    "S000-043": lambda: params(M).flops_per_token["lm_head"] / GB,
    "S000-044": lambda: 28 * f.layer_norm_params(3584),
    "S000-045": lambda: group(M, "attention_bias"),
    "S000-046": lambda: group(M, "norm") - 28 * f.layer_norm_params(3584),
    "S000-047": lambda: group(M, "norm", "attention_bias"),
    "S000-048": lambda: percent_of(group(M, "norm", "attention_bias"), f.resident_params(M)),
    "S000-049": lambda: [f.num_matmul_params(M, lm_head=False), params(M).num_active_matmul_params],
    "S000-050": logits_saved,
    "S000-052": lambda: seed_request().backbone / GB,
    "S000-053": lambda: exact_request().lm_head_runs,
    "S000-054": lambda: seed_request().lm_head / GB,
    "S000-055": lambda: seed_request().prefill_attention / GB,
    "S000-056": lambda: seed_request().decode_attention / GB,
    "S000-057": lambda: seed_request().total / GB,
    "S000-058": lambda: seed_request().total / 256 / GB,
    "S000-059": lambda: [exact_request().total / GB, exact_request().total / 256 / GB],
    "S000-060": lambda: exact_request().backbone_tokens,
    "S000-061": lambda: vllm_request() == exact_request().total,
    "S000-062": lambda: [vllm_request(chunk) / 256 / GB for chunk in (None, 512)],
    "S000-063": lambda: [in_out(M, name) for name in PROJECTIONS[:4]],
    "S000-064": lambda: product_of(M, "KH"),
    "S000-065": lambda: row(M, "scores", Step()).weight_bytes + row(M, "values", Step()).weight_bytes,
    "S000-066": kernel_matmul_steps,
    "S000-067": lambda: letters(M, "BNTH", Step.prefill(1, 6)),
    "S000-068": lambda: product_of(M, "NH"),
    "S000-070": lambda: kv_heads_read(28, 4, (0, 6, 7, 13, 14, 27)),
    "S000-072": lambda: params(MHA_7B).kv_bytes_per_token / params(M).kv_bytes_per_token,
    "S000-073": lambda: [params(c).attention_flops["decode_per_context_token"] for c in (M, MHA_7B)],
    "S000-074": decode_reads_kv_heads_only,
    "S000-075": lambda: row(M, "rope", Step()).weight_bytes,
    "S000-076": lambda: [f.rope_frequencies(128, M.rope_theta)[i] for i in (0, 1, 32, 63)],
    "S000-077": lambda: rope_partners(128, (0, 1, 63)),
    "S000-081": lambda: f.attention_flops_per_pair(1, 128),
    "S000-082": lambda: f.attention_flops_per_pair(28, 128),
    "S000-083": lambda: f.prefill_attention_flops_per_token_squared(28, 128),
    "S000-084": lambda: params(M).attention_flops["prefill_causal_per_token_squared"],
    "S000-085": causal_ratio,
    "S000-086": lambda: [causal_attention(M, Step.prefill(1, s)) for s in (1024, 8192)],
    "S000-087": lambda: f.attention_flops_per_pair(1, 128) * f.causal_pairs(1, 1),
    "S000-088": lambda: params(M).attention_flops["decode_per_context_token"],
    "S000-089": lambda: f.attention_flops_per_pair(28, 128) / f.prefill_attention_flops_per_token_squared(28, 128),
    # History only, t = 0..S-1 keys: the pairs of a causal square without its diagonal.
    "S000-090": lambda: f.attention_flops_per_pair(28, 128, 28) * f.causal_pairs(8191),
    "S000-091": lambda: f.half_square_attention_flops(28, 128, 28, 8192),
    "S000-092": lambda: f.causal_pairs(8191) / (f.dense_pairs(8192) / 2),
    "S000-093": lambda: f.causal_pairs(1, 1151 + 1),
    "S000-094": lambda: [sum(f.attention_flops(M, 1, t) for t in range(1, 8193)), f.attention_flops(M, 8192)],
    "S000-095": lambda: seed_prefill(1024)[1] / GB,
    "S000-096": lambda: f.crossover_length(ROUNDED_BACKBONE, 200_704),
    "S000-097": crossovers,
    "S000-098": lambda: ModelConfig.from_hf("Qwen2.5-7B-Instruct").max_position_embeddings,
    "S000-099": lambda: attention_share(32768),
    "S000-100": weights_dominate_below_crossover,
    "S000-101": lambda: [attention_share(length) for length in (1024, 8192, 32768)],
    "S000-102": lambda: f.OperationCounts().softmax,
    "S000-103": lambda: f.softmax_flops_per_pair(28, 28) / 2,
    "S000-104": lambda: product_of(M, "NL"),
    "S000-105": lambda: f.scale_flops_per_pair(28, 28) / 2,
    "S000-106": lambda: percent_of(f.softmax_flops_per_pair(28), f.attention_flops_per_pair(28, 128)),
    "S000-107": lambda: percent_of(f.scale_flops_per_pair(28), f.attention_flops_per_pair(28, 128)),
    "S000-108": lambda: [params(c).kv_bytes_per_token for c in (M, MHA_7B)],
    "S000-109": lambda: percent_of(
        params(MHA_7B).flops_per_token["total"] - params(M).flops_per_token["total"], params(M).flops_per_token["total"]
    ),
    "S000-110": lambda: group(M, "mlp") / group(M, "attention"),
    "S000-111": lambda: [f.mlp_params(1, 1), f.mlp_params(1, 1, matrices=2)],
    "S000-112": lambda: M.intermediate_size / M.hidden_size,
    "S000-113": lambda: f.matrix_params(*in_out(M, "up_proj")),
    "S000-114": lambda: [in_out(M, name) for name in PROJECTIONS[4:]],
    "S000-120": lambda: share(group(M, "embedding")),
    "S000-121": lambda: share(group(M, "attention")),
    "S000-122": lambda: share(group(M, "attention_bias")),
    "S000-123": lambda: share(group(M, "mlp")),
    "S000-124": lambda: share(28 * f.layer_norm_params(3584)),
    "S000-125": lambda: share(group(M, "norm") - 28 * f.layer_norm_params(3584)),
    "S000-126": lambda: share(group(M, "lm_head")),
    "S000-127": lambda: params(M).num_params / GB,
    "S000-302": lambda: params(M).num_params - no_norms(),
}
