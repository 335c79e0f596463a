"""Ledger cases of seed 000 from section 09 on: KV cache, memory, mixtures, decode roofline. Numerics are elsewhere."""

from __future__ import annotations

from functools import partial

from ledger_models import (
    GB,
    GIB,
    MEASURED_POOL_BYTES,
    QWEN2_57B,
    QWEN3_30B,
    QWEN25_7B,
    TIED_7B,
    Case,
    group,
    in_out,
    letters,
    params,
    per_layer,
    percent_of,
    product_of,
    step_sum,
)

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline import formulas as f
from roofline.count import distinct_experts, dtype_bits
from roofline.hardware import load_hardware
from roofline.memory import plan_memory
from roofline.moe import count_experts

M, MOE = QWEN25_7B, QWEN2_57B
BANDWIDTH = f.memory_bandwidth_bytes_per_s(384, 21e9)
KV = 57_344


def cached_over_uncached(backbone: int, lm_head: int = 0) -> tuple[int, int]:
    per_pair, square = f.attention_flops_per_pair(28, 128, 28), f.prefill_attention_flops_per_token_squared(28, 128, 28)
    cached = f.cached_token_flops(backbone, per_pair, 1152, lm_head_flops=lm_head)
    return cached, f.uncached_token_flops(backbone, square, 1152, lm_head_flops=lm_head)


def uncached_ratio(backbone: int, lm_head: int = 0) -> float:
    cached, uncached = cached_over_uncached(backbone, lm_head)
    return uncached / cached


def kv_read_gb(context: int) -> float:
    return step_sum(M, Step.decode(1, context), "kv_read_bytes") / GB


def kv_share(context: int) -> float:
    return percent_of(kv_read_gb(context) * GB, f.step_weight_bytes(M))


def cache_mib(tokens: int) -> float:
    return f.kv_bytes_per_request(params(M).kv_bytes_per_token, tokens) / 2**20


def hand_pool() -> float:
    return f.kv_pool_bytes(24 * GIB, 0.9, params(M).weight_bytes, 0.5 * GIB)


def requests(length: int) -> int:
    return f.requests_that_fit(f.kv_tokens(MEASURED_POOL_BYTES, KV), length)


def only_the_mlp_differs() -> bool:
    same = ("attention", "attention_bias", "qk_norm", "norm")
    return all(group(M, g) == group(MOE, g) for g in same) and group(MOE, "mlp") == 0 < group(M, "mlp")


def expert_row(config: ModelConfig, batch: int) -> list[float]:
    (line,) = count_experts(config, [batch])
    figures = [line.weight_bytes / GB, line.weight_bytes_per_token / GB, 100 * (1 - line.saving)]
    return [line.distinct_experts, *figures]


def union_is_bounded_and_grows() -> bool:
    touched = [distinct_experts(MOE, Step.decode(batch, 1)) for batch in range(1, 300)]
    bounded = all(8 <= n <= f.most_distinct_experts(64, 8, batch) + 1e-9 for batch, n in enumerate(touched, 1))
    return bounded and touched == sorted(touched) and touched[0] == 8


def does_not_fit(config: ModelConfig) -> bool:
    return not plan_memory(config, load_hardware("rtx-4090")).fits


def saves_compute_not_capacity() -> bool:
    counts = params(MOE)
    return counts.num_active_params < counts.num_params and counts.weight_bytes == 2 * counts.num_params


def implied(bytes_per_step: float) -> float:
    return f.implied_bandwidth_bytes_per_s(61.9, bytes_per_step) / GB


def implied_with_kv() -> list[float]:
    bandwidth = implied(f.step_weight_bytes(M) + 1152 * KV)
    return [bandwidth, 100 * f.shortfall_fraction(bandwidth, 887)]


def activated(config: ModelConfig) -> list[float]:
    counts = params(config)
    return [counts.num_params, counts.num_active_params, 100 * float(f.active_fraction(config))]


def both(field: str) -> list[object]:
    return [getattr(MOE, field), getattr(QWEN3_30B, field)]


def shared_expert_layer() -> int:
    return per_layer(MOE, "shared_expert", "shared_expert_gate")


def one_expert() -> int:
    return f.expert_params(3584, 2560)


def pool_is_full_at_its_concurrency() -> bool:
    """One more request than fits exceeds the pool; a cache of one byte an element holds twice as many."""
    card, pool = load_hardware("rtx-4090"), MEASURED_POOL_BYTES
    plan = plan_memory(M, card, kv_pool_bytes=pool)
    quantised = plan_memory(M, card, kv_pool_bytes=pool, kv_dtype="float8_e4m3fn")
    running, request = f.requests_that_fit(plan.kv_tokens, 1280), 1280 * plan.kv_bytes_per_token
    full = running * request <= pool < (running + 1) * request
    return full and quantised.kv_tokens == 2 * plan.kv_tokens


CASES: dict[str, Case] = {
    "S000-128": lambda: params(M).kv_bytes_per_token // 2 // product_of(M, "KH"),
    "S000-130": lambda: [letters(M, text, Step.decode(1, 1024 + 1)) for text in ("TNH", "TKH", "TKH", "NTS", "TNH")],
    "S000-131": lambda: f.written_kv_rows(1024, 2),
    "S000-133": lambda: [[f.kv_write_bytes(M, new, 2) // KV, product_of(M, "KH")] for new in (1024, 1)],
    "S000-137": lambda: cached_over_uncached(13_050_000_000)[0],
    "S000-138": lambda: cached_over_uncached(13_050_000_000)[1],
    "S000-139": lambda: uncached_ratio(13_050_000_000),
    "S000-140": lambda: uncached_ratio(f.linear_flops(f.num_backbone_params(M)), f.flops_per_token(M).lm_head),
    "S000-141": lambda: params(M).kv_bytes_per_token,
    "S000-142": lambda: [f.kv_bytes_per_token(1, 4, 128, 2) / 1024, params(M).kv_bytes_per_token / 1024],
    "S000-143": lambda: [f.hidden_bytes_per_token(layers, 3584, 2) / 1024 for layers in (1, 28)],
    "S000-144": lambda: float(f.hidden_over_kv_ratio(3584, 4, 128)),
    "S000-145": lambda: [f.kv_bytes_per_token(1, 28, 128, 2) / 1024, float(1 / f.hidden_over_kv_ratio(3584, 28, 128))],
    "S000-146": lambda: step_sum(M, Step.decode(1, 1152), "kv_write_bytes") / 1024,
    "S000-147": lambda: kv_read_gb(1152),
    "S000-148": lambda: kv_share(1152),
    "S000-149": lambda: kv_read_gb(8192),
    "S000-150": lambda: kv_share(8192),
    "S000-151": lambda: kv_read_gb(32768),
    "S000-152": lambda: kv_share(32768),
    "S000-153": lambda: f.step_weight_bytes(M) / GB,
    "S000-154": lambda: kv_share(1152) < 1 and kv_share(32768) > 13,
    "S000-155": lambda: cache_mib(1024),
    "S000-156": lambda: cache_mib(1152),
    "S000-157": lambda: cache_mib(1280),
    "S000-158": lambda: f.written_kv_rows(1024, 256),
    "S000-159": lambda: load_hardware("rtx-4090").memory_bytes / GIB,
    "S000-160": lambda: f.kv_pool_bytes(24, 0.9, 0, 0),
    "S000-161": lambda: params(M).weight_bytes / GIB,
    "S000-163": lambda: hand_pool() / GIB,
    "S000-164": lambda: hand_pool() / params(M).kv_bytes_per_token,
    "S000-165": lambda: f.kv_bytes_per_request(params(M).kv_bytes_per_token, 86_896) / GIB,
    "S000-166": lambda: plan_memory(M, load_hardware("rtx-4090"), kv_pool_bytes=MEASURED_POOL_BYTES).kv_tokens,
    "S000-167": lambda: (
        plan_memory(
            M, load_hardware("rtx-4090"), kv_pool_bytes=MEASURED_POOL_BYTES, max_model_len=8192
        ).concurrency_at_max_len
    ),
    "S000-169": lambda: -100 * f.shortfall_fraction(6.9, 4.64),
    "S000-170": lambda: f.implied_overhead_bytes(24, 0.9, 14.18, 4.64),
    "S000-171": lambda: f.implied_overhead_bytes(15.49 + 1.04 + 0.34, 1.0, 14.18, 0),
    "S000-172": lambda: requests(1280),
    "S000-173": lambda: requests(2048),
    "S000-174": lambda: requests(4096),
    "S000-175": lambda: 4.64 * 1024 / cache_mib(1280),
    "S000-176": only_the_mlp_differs,
    "S000-177": lambda: per_layer(M, "mlp") / 1e6,
    "S000-178": lambda: [MOE.num_experts, MOE.num_experts_per_tok],
    "S000-179": lambda: percent_of(group(M, "mlp"), params(M).num_params),
    "S000-180": lambda: MOE.shared_expert_intermediate_size,
    "S000-181": lambda: [MOE.intermediate_size, MOE.moe_intermediate_size, MOE.shared_expert_intermediate_size],
    "S000-182": lambda: f.active_ffn_width(MOE.num_experts_per_tok, MOE.moe_intermediate_size),
    "S000-183": lambda: f.active_ffn_elements(MOE) // 28,
    "S000-184": lambda: [8 * one_expert() / 1e6, per_layer(MOE, "shared_expert") / 1e6],
    "S000-185": lambda: f.matrix_params(*in_out(MOE, "gate_proj", 20480)),
    "S000-186": lambda: f.matrix_params(*in_out(MOE, "up_proj", 20480)),
    "S000-187": lambda: f.matrix_params(*in_out(MOE, "down_proj", 20480)),
    "S000-188": lambda: per_layer(MOE, "shared_expert"),
    "S000-189": lambda: per_layer(MOE, "shared_expert_gate"),
    "S000-190": shared_expert_layer,
    "S000-191": lambda: per_layer(MOE, "experts") // 64 * 8,
    "S000-192": lambda: per_layer(MOE, "router"),
    "S000-193": lambda: f.moe_active_params(3584, 64, 8, 2560, 20480),
    "S000-196": lambda: [in_out(MOE, "gate_proj", 2560), letters(MOE, "DE"), letters(MOE, "D1")],
    "S000-197": lambda: f.active_ffn_width(8, 2560, 20480) / M.intermediate_size,
    "S000-198": lambda: f.total_ffn_width(64, 2560, 20480),
    "S000-199": lambda: f.total_ffn_width(64, 2560, 20480) / M.intermediate_size,
    "S000-204": lambda: group(QWEN3_30B, "shared_expert", "shared_expert_gate"),
    "S000-205": one_expert,
    "S000-206": lambda: f.active_ffn_width(MOE.num_experts_per_tok, 1, 1),
    "S000-209": lambda: params(MOE).num_params / GB,
    "S000-210": lambda: params(MOE).num_active_params / GB,
    "S000-211": lambda: 100 * float(f.active_fraction(MOE)),
    "S000-212": lambda: params(MOE).num_active_params / params(MOE).num_params,
    "S000-213": lambda: [params(MOE).num_params / GB, params(MOE).num_active_params / GB],
    "S000-214": lambda: per_layer(MOE, "attention"),
    "S000-215": lambda: per_layer(MOE, "attention_bias"),
    "S000-216": lambda: f.layer_norm_params(MOE.hidden_size),
    "S000-217": lambda: per_layer(MOE, "router"),
    "S000-218": lambda: per_layer(MOE, "experts"),
    "S000-219": one_expert,
    "S000-220": shared_expert_layer,
    "S000-221": lambda: per_layer(MOE, "router", "experts", "shared_expert", "shared_expert_gate"),
    "S000-222": lambda: f.moe_active_params(3584, 64, 8, 2560, 20480),
    "S000-223": lambda: group(MOE, "embedding"),
    "S000-224": lambda: group(MOE, "lm_head"),
    "S000-225": lambda: params(MOE).num_params,
    "S000-226": lambda: params(MOE).num_active_params,
    "S000-227": union_is_bounded_and_grows,
    "S000-228": lambda: distinct_experts(MOE, Step.decode(8, 1)),
    **{f"S000-{229 + i}": partial(expert_row, MOE, 2**i) for i in range(9)},
    **{f"S000-{238 + i}": partial(expert_row, QWEN3_30B, 2**i) for i in range(9)},
    "S000-247": lambda: f.tokens_to_touch(MOE.num_experts, MOE.num_experts_per_tok, 0.99),
    "S000-248": lambda: params(MOE).weight_bytes / GB,
    "S000-249": lambda: does_not_fit(MOE),
    "S000-251": saves_compute_not_capacity,
    "S000-252": lambda: f.load_imbalance([4, 4, 4, 4]) == 1 < f.load_imbalance([7, 3, 3, 3]) == 7 / 4,
    **{
        f"S000-{253 + i}": partial(both, field)
        for i, field in enumerate(
            (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "shared_expert_intermediate_size",
                "norm_topk_prob",
                "qkv_bias",
                "qk_norm",
            )
        )
    },
    "S000-260": lambda: [product_of(c, "NH") - product_of(c, "D") for c in (MOE, QWEN3_30B)],
    "S000-261": lambda: both("num_hidden_layers"),
    "S000-262": lambda: both("hidden_size"),
    "S000-263": lambda: both("num_key_value_heads"),
    "S000-264": lambda: activated(MOE),
    "S000-265": lambda: activated(QWEN3_30B),
    "S000-266": lambda: per_layer(M, "attention"),
    "S000-267": lambda: per_layer(M, "attention_bias"),
    "S000-268": lambda: per_layer(M, "mlp"),
    "S000-269": lambda: f.layer_norm_params(M.hidden_size),
    "S000-270": lambda: f.num_params(M),
    "S000-271": lambda: params(TIED_7B).num_params,
    "S000-272": lambda: ModelConfig.from_hf("Qwen3-32B").head_dim,
    "S000-273": lambda: [dtype_bits(dtype) / 8 for dtype in ("float16", "float8_e4m3fn", "int4")],
    "S000-274": lambda: params(M).kv_bytes_per_token,
    "S000-275": lambda: f.kv_tokens(MEASURED_POOL_BYTES, params(M).kv_bytes_per_token),
    "S000-276": lambda: -100 * f.shortfall_fraction(129_000, 86_896),
    "S000-277": lambda: BANDWIDTH / GB,
    "S000-278": lambda: f.decode_ceiling_tokens_per_s(BANDWIDTH, f.step_weight_bytes(M)),
    "S000-279": lambda: f.decode_ceiling_tokens_per_s(BANDWIDTH, params(M).weight_bytes),
    "S000-280": lambda: params(M).weight_bytes / GB,
    "S000-282": lambda: implied(params(M).weight_bytes),
    "S000-283": lambda: implied(f.step_weight_bytes(M)),
    "S000-285": lambda: implied(params(M).weight_bytes) > 887 >= implied(f.step_weight_bytes(M)),
    "S000-286": lambda: 100 * f.shortfall_fraction(implied(f.step_weight_bytes(M)), 887),
    "S000-287": implied_with_kv,
    "S000-288": lambda: [
        f.decode_ceiling_tokens_per_s(BANDWIDTH, f.step_weight_bytes(M), 1152 * KV, batch) for batch in (1, 8, 32, 67)
    ],
    "S000-289": lambda: implied(f.step_weight_bytes(M)) * GB / BANDWIDTH <= 1,
    "S000-290": pool_is_full_at_its_concurrency,
    "S000-291": lambda: per_layer(MOE, "router", "experts", "shared_expert", "shared_expert_gate"),
    "S000-292": lambda: f.moe_active_params(3584, 64, 8, 2560, 20480),
    "S000-293": lambda: [per_layer(QWEN3_30B, "router", "experts"), f.moe_active_params(2048, 128, 8, 768)],
    "S000-294": lambda: f.linear_flops(params(MOE).num_active_params) / GB,
    "S000-295": lambda: params(MOE).flops_per_token["total"],
    "S000-296": lambda: params(QWEN3_30B).flops_per_token["total"],
    "S000-297": lambda: f.step_weight_bytes(MOE) / GB,
    "S000-298": lambda: params(MOE).kv_bytes_per_token,
    "S000-299": lambda: f.linear_flops(group(MOE, "shared_expert")),
    "S000-301": lambda: [f.matmul_intensity(rows, 3584, 18944) for rows in (1, 1024)],
}
