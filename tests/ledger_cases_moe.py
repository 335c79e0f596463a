"""Ledger cases of seed 001: Qwen3-32B against Qwen3-30B-A3B. Numerics of routing are elsewhere."""

from __future__ import annotations

from dataclasses import replace

from ledger_models import (
    GB,
    QWEN2_57B,
    QWEN3_8B,
    QWEN3_30B,
    QWEN3_32B,
    QWEN25_7B,
    Case,
    group,
    in_out,
    letters,
    params,
    per_layer,
    product_of,
)
from ledger_tiny import kv_heads_read

from qwenjax.config import ModelConfig
from roofline import formulas as f

DENSE, MOE = QWEN3_32B, QWEN3_30B


def both(field: str) -> list[object]:
    return [getattr(DENSE, field), getattr(MOE, field)]


def without_norms(experts: int) -> int:
    """The seed's sum: embeddings and, in each layer, attention, router and some experts."""
    expert = f.expert_params(2048, 768)
    return group(MOE, "embedding", "lm_head", "attention", "router") + 48 * experts * expert


def capacity_follows_total() -> bool:
    """Twice the experts: nearly twice the resident bytes, the same FLOPs but for the wider router."""
    wider = replace(MOE, num_experts=256)
    extra_flops = params(wider).flops_per_token["total"] - params(MOE).flops_per_token["total"]
    grown = params(wider).weight_bytes / params(MOE).weight_bytes
    return extra_flops == f.linear_flops(group(MOE, "router")) and grown > 1.9


def narrower_and_shallower() -> bool:
    return all(getattr(MOE, n) < getattr(DENSE, n) for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))


def breaks_the_square() -> bool:
    square = [product_of(c, "NH") == c.hidden_size for c in (DENSE, MOE, QWEN3_8B)]
    return square == [False, False, True]


def default_of_norm_topk_prob() -> bool:
    minimal = {
        "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "max_position_embeddings": 512, "rope_theta": 1e6,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return ModelConfig.from_hf(minimal).norm_topk_prob


CASES: dict[str, Case] = {
    "S001-004": capacity_follows_total,
    "S001-006": lambda: both("num_hidden_layers"),
    "S001-007": lambda: both("hidden_size"),
    "S001-008": lambda: both("num_attention_heads"),
    "S001-009": lambda: both("head_dim"),
    "S001-010": lambda: both("num_key_value_heads"),
    "S001-011": lambda: [DENSE.intermediate_size, MOE.moe_intermediate_size],
    "S001-012": lambda: [MOE.num_experts, MOE.num_experts_per_tok],
    "S001-013": lambda: both("tie_word_embeddings"),
    "S001-014": narrower_and_shallower,
    "S001-015": lambda: params(MOE).num_params / GB,
    "S001-016": lambda: params(MOE).num_active_params / GB,
    "S001-018": lambda: letters(MOE, "EA"),
    "S001-019": lambda: f.mlp_params(2048, 768) / f.matrix_params(2048, 768),
    "S001-020": lambda: product_of(MOE, "G"),
    "S001-021": lambda: kv_heads_read(32, 4, (0, 7, 8, 15, 16, 31)),
    "S001-022": lambda: [DENSE.hidden_size, product_of(DENSE, "NH")],
    "S001-023": lambda: in_out(DENSE, "q_proj"),
    "S001-024": lambda: [MOE.hidden_size, product_of(MOE, "NH")],
    "S001-025": breaks_the_square,
    "S001-026": lambda: [params(c).kv_bytes_per_token for c in (DENSE, MOE)],
    "S001-027": lambda: letters(MOE, "DE"),
    "S001-030": default_of_norm_topk_prob,
    "S001-032": lambda: [in_out(MOE, name, 768) for name in ("gate_proj", "up_proj", "down_proj")],
    "S001-033": lambda: DENSE.intermediate_size / DENSE.hidden_size,
    "S001-034": lambda: per_layer(MOE, "experts") / 1e6,
    "S001-035": lambda: in_out(MOE, "down_proj", 768)[1],
    "S001-036": lambda: group(MOE, "embedding", "lm_head"),
    "S001-037": lambda: per_layer(MOE, "attention"),
    "S001-038": lambda: per_layer(MOE, "router"),
    "S001-039": lambda: per_layer(MOE, "experts"),
    "S001-040": lambda: without_norms(128) / GB,
    "S001-041": lambda: without_norms(8) / GB,
    "S001-042": lambda: params(MOE).num_params - params(MOE).num_active_params,
    "S001-043": lambda: [params(MOE).num_params, params(MOE).num_active_params, params(DENSE).num_params],
    "S001-044": lambda: dense_layer(),
    "S001-045": lambda: 100 * float(f.active_fraction(MOE)),
    "S001-047": lambda: [params(MOE).weight_bytes / GB, f.step_weight_bytes(MOE) / GB],
    "S001-049": lambda: [c.vocab_size for c in (QWEN25_7B, QWEN2_57B, QWEN3_8B, DENSE, MOE)],
}


def dense_layer() -> list[int]:
    attention, mlp = per_layer(DENSE, "attention"), per_layer(DENSE, "mlp")
    norms = f.layer_norm_params(DENSE.hidden_size) + per_layer(DENSE, "qk_norm")
    return [attention, mlp, norms, attention + mlp + norms]
