"""The hand formulas against brute force: enumerated tensors, enumerated pairs, enumerated routings, published
totals.
"""

from __future__ import annotations

import csv
from fractions import Fraction
from itertools import combinations, product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline import formulas as f

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

QWEN25_7B = ModelConfig(
    model_type="qwen2", vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, head_dim=128, qkv_bias=True,
)  # fmt: skip
QWEN2_57B = ModelConfig(
    model_type="qwen2_moe", vocab_size=151936, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
    num_attention_heads=28, num_key_value_heads=4, head_dim=128, qkv_bias=True, num_experts=64, num_experts_per_tok=8,
    moe_intermediate_size=2560, shared_expert_intermediate_size=20480,
)  # fmt: skip
QWEN3_8B = ModelConfig(
    model_type="qwen3", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
    num_attention_heads=32, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
QWEN3_32B = ModelConfig(
    model_type="qwen3", vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64,
    num_attention_heads=64, num_key_value_heads=8, head_dim=128,
)  # fmt: skip
QWEN3_30B = ModelConfig(
    model_type="qwen3_moe", vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, norm_topk_prob=True,
)  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any of the four architectures with small sizes, windows, biases, tying and every mixture of dense and sparse
    layers.
    """
    model_type = draw(st.sampled_from(["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"]))
    layers, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    size = st.integers(1, 40)
    sparse: dict[str, object] = {}
    if model_type.endswith("_moe"):
        step = draw(st.integers(1, layers))
        can_be_sparse = [i for i in range(layers) if (i + 1) % step == 0]
        dense_only = draw(st.sets(st.integers(0, layers - 1))) - {draw(st.sampled_from(can_be_sparse))}
        experts = draw(st.integers(1, 9))
        sparse = {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(size),
            "shared_expert_intermediate_size": draw(st.integers(0, 20)) if model_type == "qwen2_moe" else 0,
            "norm_topk_prob": draw(st.booleans()),
            "decoder_sparse_step": step,
            "mlp_only_layers": tuple(sorted(dense_only)),
        }
    return ModelConfig(
        model_type=model_type,
        vocab_size=draw(size),
        hidden_size=draw(size),
        intermediate_size=draw(size),
        num_hidden_layers=layers,
        num_attention_heads=kv_heads * draw(st.integers(1, 4)),
        num_key_value_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 8)),
        tie_word_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        attention_o_bias=draw(st.booleans()),
        sliding_windows=tuple(draw(st.none() | st.integers(1, 30)) for _ in range(layers)),
        **sparse,  # type: ignore[arg-type]
    )


def checkpoint_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint by its key, [out, in], written out from the published layout."""
    d, hd = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, d), "norm": (d,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, d)
    for i in range(config.num_hidden_layers):
        at, mlp = f"layers.{i}.self_attn.", f"layers.{i}.mlp."
        shapes |= {f"layers.{i}.input_layernorm": (d,), f"layers.{i}.post_attention_layernorm": (d,)}
        shapes |= {at + "q_proj": (q, d), at + "k_proj": (kv, d), at + "v_proj": (kv, d), at + "o_proj": (d, q)}
        if config.qkv_bias:
            shapes |= {at + "q_proj.bias": (q,), at + "k_proj.bias": (kv,), at + "v_proj.bias": (kv,)}
        if config.attention_o_bias:
            shapes[at + "o_proj.bias"] = (d,)
        if config.qk_norm:
            shapes |= {at + "q_norm": (hd,), at + "k_norm": (hd,)}
        if i in config.sparse_layers:
            shapes[mlp + "gate"] = (config.num_experts, d)
            for j in range(config.num_experts):
                shapes |= _swiglu(f"{mlp}experts.{j}.", d, config.moe_intermediate_size)
            if config.shared_expert_intermediate_size:
                shapes |= _swiglu(mlp + "shared_expert.", d, config.shared_expert_intermediate_size)
                shapes[mlp + "shared_expert_gate"] = (1, d)
        else:
            shapes |= _swiglu(mlp, d, config.intermediate_size)
    return shapes


def _swiglu(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    wide = (width, hidden)
    return {prefix + "gate_proj": wide, prefix + "up_proj": wide, prefix + "down_proj": (hidden, width)}


def group_of(key: str) -> str:
    for part, group in (
        ("bias", "attention_bias"), ("q_norm", "qk_norm"), ("k_norm", "qk_norm"), ("norm", "norm"),
        ("self_attn", "attention"), ("shared_expert_gate", "shared_expert_gate"), ("shared_expert", "shared_expert"),
        (".experts.", "experts"), ("mlp.gate_proj", "mlp"), ("mlp.gate", "router"), ("mlp", "mlp"),
        ("embed_tokens", "embedding"), ("lm_head", "lm_head"),
    ):  # fmt: skip
        if part in key:
            return group
    raise AssertionError(key)


@given(configs())
def test_groups_equal_the_sizes_of_every_checkpoint_tensor(config: ModelConfig) -> None:
    groups = dict.fromkeys(f.param_groups(config), 0)
    for key, shape in checkpoint_shapes(config).items():
        groups[group_of(key)] += prod(shape)
    assert f.param_groups(config) == groups
    assert f.num_params(config) == sum(groups.values())


@given(configs())
def test_active_and_matmul_params_by_what_multiplies_a_token(config: ModelConfig) -> None:
    used = {k: s for k, s in checkpoint_shapes(config).items() if _expert_index(k) < config.num_experts_per_tok}
    assert f.num_active_params(config) == sum(map(prod, used.values()))
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert f.num_active_params(config, embedding=False) == f.num_active_params(config) - looked_up
    matrices = sum(prod(s) for k, s in used.items() if len(s) == 2 and k not in ("embed_tokens", "lm_head"))
    head = config.vocab_size * config.hidden_size
    assert f.flops_per_token(config) == (2 * matrices, 2 * head)
    assert f.num_matmul_params(config, experts="active") == matrices + head
    stored = sum(prod(s) for k, s in checkpoint_shapes(config).items() if len(s) == 2 and k != "embed_tokens")
    assert f.num_matmul_params(config) == stored + head * config.tie_word_embeddings


def _expert_index(key: str) -> int:
    return int(key.split(".experts.")[1].split(".")[0]) if ".experts." in key else -1


@given(configs(), st.integers(1, 9))
def test_block_scales_by_enumerated_tiles(config: ModelConfig, block: int) -> None:
    tiles = 0
    for key, shape in checkpoint_shapes(config).items():
        if key.endswith("_proj"):
            tiles += len(range(0, shape[0], block)) * len(range(0, shape[1], block))
    assert f.fp8_block_scale_params(config, block) == tiles


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (QWEN25_7B, 7_615_616_512, 7_615_616_512),
        (QWEN2_57B, 57_408_658_944, 14_249_270_784),
        (QWEN3_8B, 8_190_735_360, 8_190_735_360),
        (QWEN3_32B, 32_762_123_264, 32_762_123_264),
        (QWEN3_30B, 30_532_122_624, 3_353_032_704),
    ],
    ids=["Qwen2.5-7B", "Qwen2-57B-A14B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B"],
)
def test_official_totals(config: ModelConfig, total: int, active: int) -> None:
    assert (f.num_params(config), f.num_active_params(config)) == (total, active)


def test_published_totals_of_every_dense_checkpoint(shared: Path) -> None:
    checked = 0
    table = (shared / "configs" / "PARAM_COUNTS.csv").read_text(encoding="utf-8")
    for row in csv.DictReader(table.splitlines()):
        remark = row["remark"]
        if row["model_type"] not in ("qwen2", "qwen3") or not remark.startswith("= "):
            continue
        config = ModelConfig(
            model_type=row["model_type"], vocab_size=int(row["vocab"]), hidden_size=int(row["hidden"]),
            intermediate_size=int(row["intermediate_or_moe_intermediate"]), num_hidden_layers=int(row["layers"]),
            num_attention_heads=int(row["heads"]), num_key_value_heads=int(row["kv_heads"]),
            head_dim=int(row["head_dim"]), qkv_bias=row["model_type"] == "qwen2",
            tie_word_embeddings="= tied" in remark,
        )  # fmt: skip
        scales = f.fp8_block_scale_params(config) if "FP8 128x128" in remark else 0
        assert f.num_params(config) + scales == int(row["stored_parameters"]), row["hf_id"]
        checked += 1
    assert checked >= 30


def test_block_scales_of_a_published_mixture() -> None:
    qwen3_235b = ModelConfig(
        model_type="qwen3_moe", vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=1536,
    )  # fmt: skip
    assert f.num_params(qwen3_235b) == 235_093_634_560
    assert f.num_params(qwen3_235b) + f.fp8_block_scale_params(qwen3_235b) == 235_107_904_512


lengths = st.integers(1, 60)
windows = st.none() | st.integers(1, 80)


@given(lengths, st.integers(0, 60), windows)
def test_pairs_equal_the_cells_of_the_mask(new: int, cached: int, window: int | None) -> None:
    total = new + cached
    cells = sum(
        1 for query in range(cached, total) for key in range(query + 1) if window is None or key > query - window
    )
    assert f.causal_pairs(new, total, window) == cells
    assert cells <= f.dense_pairs(new, total) == new * total
    assert cells == f.attention_pairs(new, total, window=window)


@given(lengths, lengths, windows)
def test_prefill_is_a_shorter_prefill_and_a_chunk(first: int, second: int, window: int | None) -> None:
    both = first + second
    assert f.causal_pairs(both, None, window) == f.causal_pairs(first, None, window) + f.causal_pairs(
        second, both, window
    )


@given(lengths, st.integers(0, 60), st.integers(1, 80))
def test_windows_only_take_away_and_wide_ones_nothing(new: int, cached: int, window: int) -> None:
    total = new + cached
    narrow, wider = f.causal_pairs(new, total, window), f.causal_pairs(new, total, window + 1)
    assert new <= narrow <= wider <= f.causal_pairs(new, total) == f.causal_pairs(new, total, total)
    assert narrow <= new * window


def test_a_step_that_attends_less_than_it_adds_is_refused() -> None:
    with pytest.raises(InputError) as error:
        f.causal_pairs(5, 4)
    assert str(error.value) == "kv_len = 4: is less than query_len = 5. Count the new tokens in it."


@given(configs(), st.integers(1, 20), st.integers(0, 20), st.integers(1, 5))
def test_step_flops_are_linear_in_the_batch_and_additive_in_chunks(
    config: ModelConfig, new: int, cached: int, batch: int
) -> None:
    one, many = f.step_flops(config, new, new + cached), f.step_flops(config, new, new + cached, batch=batch)
    assert many == tuple(batch * term for term in one)
    assert many.total == batch * one.total
    dense = f.step_flops(config, new, new + cached, attention="dense")
    assert one.attention <= dense.attention
    if cached:
        whole, first = f.step_flops(config, new + cached), f.step_flops(config, cached)
        assert whole.attention == first.attention + one.attention
        assert whole.backbone == first.backbone + one.backbone
        assert whole.lm_head == first.lm_head == one.lm_head
    every = f.step_flops(config, new, new + cached, logits="all")
    assert every == (one.backbone, new * one.lm_head, one.attention)


@given(configs(), st.integers(1, 12), st.integers(1, 12))
def test_exact_request_is_its_prefill_and_decode_steps(config: ModelConfig, prompt: int, output: int) -> None:
    steps = [f.step_flops(config, prompt)] + [f.step_flops(config, 1, s) for s in range(prompt + 1, prompt + output)]
    request = f.request_flops(config, prompt, output)
    assert request.total == sum(step.total for step in steps)
    assert request.decode_attention == sum(step.attention for step in steps[1:])
    assert request.lm_head_runs == len(steps)
    assert request.backbone_tokens == f.written_kv_rows(prompt, output)


@pytest.mark.parametrize(
    ("convention", "chunk", "gflop"),
    [("seed", None, 17_314.503), ("exact", None, 17_299.303), ("exact", 512, 17_299.303),
     ("vllm-0.26", None, 17_509.551), ("vllm-0.26", 1024, 17_509.551), ("vllm-0.26", 512, 17_405.414)],
)  # fmt: skip
def test_request_accounts_of_qwen25_7b(convention: f.Convention, chunk: int | None, gflop: float) -> None:
    flops = f.request_flops(QWEN25_7B, 1024, 256, convention=convention, chunk=chunk).total
    assert isinstance(flops, int)
    assert flops / 1e9 == pytest.approx(gflop, abs=6e-4)


@given(configs(), st.integers(1, 20), st.integers(1, 8), st.integers(1, 25))
def test_vllm_account_by_its_own_steps(config: ModelConfig, prompt: int, output: int, chunk: int) -> None:
    steps = [(min(chunk, prompt - start), min(start + chunk, prompt)) for start in range(0, prompt, chunk)]
    steps += [(1, prompt + i) for i in range(1, output)]
    pairs = sum(new * min(context, w or context) for new, context in steps for w in config.sliding_windows)
    request = f.request_flops(config, prompt, output, convention="vllm-0.26", chunk=chunk)
    assert (
        request.prefill_attention + request.decode_attention == 4 * config.num_attention_heads * config.head_dim * pairs
    )
    assert request.lm_head_runs == len(steps)
    assert request.backbone_tokens == sum(new for new, _ in steps)
    if config.num_experts == 0:
        assert request.backbone == f.request_flops(config, prompt, output).backbone


def test_a_request_without_tokens_is_refused() -> None:
    with pytest.raises(InputError) as error:
        f.request_flops(QWEN25_7B, 1024, 0)
    assert str(error.value) == "output = 0: a request has at least one token in and one out. Give a positive number."


@given(st.integers(1, 6).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))), st.integers(0, 3))
def test_distinct_experts_are_the_mean_over_all_routings(sizes: tuple[int, int], tokens: int) -> None:
    experts, chosen = sizes
    routings = list(product(combinations(range(experts), chosen), repeat=tokens))
    mean = Fraction(sum(len(set().union(*routing)) for routing in routings), len(routings))
    assert f.distinct_experts(experts, chosen, tokens) == pytest.approx(float(mean), rel=1e-12)


@given(st.integers(1, 200).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))), st.integers(1, 5000))
def test_distinct_experts_stay_within_what_routing_can_do(sizes: tuple[int, int], tokens: int) -> None:
    experts, chosen = sizes
    touched = f.distinct_experts(experts, chosen, tokens)
    assert chosen <= touched <= f.most_distinct_experts(experts, chosen, tokens) == min(experts, chosen * tokens)
    assert touched <= f.distinct_experts(experts, chosen, tokens + 1)


@given(st.integers(2, 60).flatmap(lambda e: st.tuples(st.just(e), st.integers(1, e))), st.integers(1, 99))
def test_the_batch_that_touches_a_fraction_is_the_first(sizes: tuple[int, int], percent: int) -> None:
    experts, chosen = sizes
    tokens = f.tokens_to_touch(experts, chosen, percent / 100)
    miss = 1 - Fraction(chosen, experts)
    assert 1 - miss**tokens >= Fraction(percent, 100)
    assert tokens == 1 or 1 - miss ** (tokens - 1) < Fraction(percent, 100)


@given(configs().filter(lambda config: config.is_moe), st.integers(1, 50))
def test_a_line_of_the_expert_table(config: ModelConfig, batch: int) -> None:
    line = f.expert_row(config, batch, weight_bytes=1)
    assert line.weight_bytes == f.step_weight_bytes(config, batch, weight_bytes=1)
    assert line.weight_bytes_per_token * batch == pytest.approx(line.weight_bytes)
    assert 0 < line.fraction_of_all <= 1 + 1e-12
    assert line.distinct_experts == f.distinct_experts(config.num_experts, config.num_experts_per_tok, batch)


def test_touching_every_expert_in_expectation_is_refused() -> None:
    with pytest.raises(InputError) as error:
        f.tokens_to_touch(64, 8, 1.0)
    assert str(error.value) == "fraction = 1.0: is not between 0 and 1. Give the share of the experts, such as 0.99."


@given(configs(), st.integers(1, 50))
def test_step_weight_bytes_lie_between_one_token_and_everything(config: ModelConfig, batch: int) -> None:
    table = config.vocab_size * config.hidden_size
    expected = f.step_weight_bytes(config, batch, weight_bytes=1)
    most = f.step_weight_bytes(config, batch, weight_bytes=1, experts="all")
    assert most == f.num_params(config) - (0 if config.tie_word_embeddings else table)
    assert expected <= most * (1 + 1e-12)
    assert expected <= f.step_weight_bytes(config, batch + 1, weight_bytes=1) * (1 + 1e-12)
    assert f.step_weight_bytes(config, 1, weight_bytes=1) == pytest.approx(f.num_active_params(config, embedding=False))
    assert f.step_weight_bytes(config, weight_bytes=2, experts="all", embedding="table") == 2 * f.num_params(config)
    looked_up = f.step_weight_bytes(config, batch, weight_bytes=1, embedding="rows")
    assert looked_up == pytest.approx(expected + batch * config.hidden_size)
    if config.num_experts:
        measured = f.step_weight_bytes(config, batch, weight_bytes=1, experts=config.num_experts_per_tok)
        assert measured == f.num_active_params(config, embedding=False)


@given(configs(), st.integers(1, 20), st.integers(0, 20), st.integers(1, 4))
def test_kv_reads_cover_the_rows_that_any_query_sees(config: ModelConfig, new: int, cached: int, batch: int) -> None:
    total = new + cached
    rows = 0
    for window in config.sliding_windows:
        seen = {k for q in range(cached, total) for k in range(q + 1) if window is None or k > q - window}
        rows += len(seen)
    row_bytes = 2 * config.num_key_value_heads * config.head_dim
    assert f.kv_read_bytes(config, new, total, 1, batch=batch) == batch * rows * row_bytes
    per_token = f.kv_bytes_per_token(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, 1)
    assert f.kv_write_bytes(config, new, 1, batch=batch) == batch * new * per_token
    assert f.kv_read_bytes(config, new, total, 1) <= f.kv_bytes_per_request(per_token, total)


def test_kv_bytes_keep_the_kind_of_number_they_are_given() -> None:
    assert f.kv_bytes_per_token(28, 4, 128, 2) == 57_344
    half_byte = f.kv_bytes_per_token(28, 4, 128, Fraction(1, 2))
    assert half_byte == 14_336
    assert isinstance(half_byte, Fraction)
    assert f.decode_read_rows(1024, 256) == sum(range(1025, 1280))


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(1, 64))
def test_a_pool_holds_whole_blocks_and_no_more(pool: int, per_token: int, block: int) -> None:
    tokens = f.kv_tokens(pool, per_token, block_size=block)
    assert tokens % block == 0
    assert tokens * per_token <= pool < (tokens + block) * per_token


def test_requests_take_whole_blocks() -> None:
    assert f.requests_that_fit(160, 17) == 9
    assert f.requests_that_fit(160, 17, block_size=16) == 5
    assert f.concurrency(86_896, 8192) == 10.607421875


@given(configs())
def test_elementwise_operations_of_a_token(config: ModelConfig) -> None:
    ones = f.OperationCounts(rms_norm=1, rope=1, bias=1, silu=0, product=1, residual=1, softmax=1)
    counts = f.elementwise_flops_per_token(config, ones)
    shapes = checkpoint_shapes(config)
    norms = {k: s[0] for k, s in shapes.items() if "norm" in k and "self_attn" not in k}
    assert counts["rms_norm"] == sum(norms.values())
    assert counts["bias"] == sum(prod(s) for k, s in shapes.items() if "bias" in k)
    assert counts["residual"] == 2 * config.num_hidden_layers * config.hidden_size
    gates = sum(
        s[0] for k, s in shapes.items() if k.endswith("gate_proj") and _expert_index(k) < config.num_experts_per_tok
    )
    assert counts["silu_product"] == f.active_ffn_elements(config) == gates
    rotated = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim * config.num_hidden_layers
    assert counts["rope"] == rotated
    assert counts["qk_norm"] == rotated * config.qk_norm
    assert counts["router_softmax"] == len(config.sparse_layers) * config.num_experts
    assert (counts["expert_sum"] > 0) == config.is_moe


def test_elementwise_operations_of_the_known_models() -> None:
    assert sum(f.elementwise_flops_per_token(QWEN25_7B).values()) == 4_143_104
    per_layer = 8 * 2048 + 7 * 2048 + 15
    assert f.elementwise_flops_per_token(QWEN3_30B)["expert_sum"] == 48 * per_layer
    assert f.elementwise_flops_per_token(QWEN2_57B)["expert_sum"] == 28 * (15 * 3584 + 4 + 2 * 3584)


@given(st.floats(1e3, 1e12), st.floats(1, 1e6), st.floats(0, 1e12))
def test_the_crossover_is_where_the_terms_are_equal(weights: float, square: float, head: float) -> None:
    length = f.crossover_length(weights, square, head)
    assert square * length**2 == pytest.approx(weights * length + head, rel=1e-9)
    attention = square * length**2
    assert f.attention_flops_fraction(attention, weights * length + head) == pytest.approx(0.5)


def test_cached_and_uncached_tokens() -> None:
    cached = f.cached_token_flops(13_050_000_000, 401_408, 1152)
    assert cached == 13_512_422_016
    assert f.uncached_token_flops(13_050_000_000, 200_704, 1152) / cached == pytest.approx(1132.288, abs=1e-3)


def test_matmul_conventions() -> None:
    assert (f.matmul_flops(2, 3, 2), f.matmul_operations(2, 3, 2)) == (24, 20)
    assert f.matmul_overcount_fraction(3) == pytest.approx((24 - 20) / 24)


def test_bounds() -> None:
    assert f.bound_time_s(200.0, 30.0, peak_flops_per_s=100.0, bandwidth_bytes_per_s=10.0) == 3.0
    assert f.bound_time_s(400.0, 30.0, peak_flops_per_s=100.0, bandwidth_bytes_per_s=10.0) == 4.0
    assert f.ridge_intensity(100.0, 10.0) == f.arithmetic_intensity(100.0, 10.0) == 10.0
    assert f.decode_ceiling_tokens_per_s(100.0, 20.0, 5.0, batch=4) == 10.0
    assert f.implied_bandwidth_bytes_per_s(10.0, 40.0, batch=4) == 100.0
    assert f.matmul_intensity(8, 16, 32, activation_bytes=2) == 2 * 8 * 16 * 32 / (2 * 16 * 32 + 2 * 8 * 48)
    assert f.memory_bandwidth_bytes_per_s(384, 21e9) == 1008e9
    assert f.load_imbalance([6, 0, 0]) == 3.0


@given(st.integers(1, 32), st.floats(1.0, 1e7))
def test_rope_frequencies_fall_from_one(pairs: int, theta: float) -> None:
    frequencies = f.rope_frequencies(2 * pairs, theta)
    assert len(frequencies) == pairs
    assert frequencies[0] == 1
    for i in range(1, pairs):
        assert frequencies[i] == pytest.approx(frequencies[i - 1] * theta ** (-1 / pairs))
    assert sorted(c for i in range(pairs) for c in f.rope_pair(i, 2 * pairs)) == list(range(2 * pairs))


def test_query_heads_share_kv_heads_in_runs() -> None:
    assert [f.kv_head_of(head, 6, 2) for head in range(6)] == [0, 0, 0, 1, 1, 1]
    assert f.attention_scale(64) == 1 / 8
