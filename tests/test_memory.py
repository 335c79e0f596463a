"""Memory plans: the published log of one card, closed forms, monotony, and values out of range."""

from __future__ import annotations

from typing import Any

import pytest
from cli_run import figures, run, text_of
from config_base import QWEN2_MOE, QWEN3, read
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline import formulas as f
from roofline.count import count_kv_bytes_per_token, count_weight_bytes
from roofline.hardware import load_hardware
from roofline.memory import MemoryPlan, peak_activation_bytes, plan_memory

CARD = load_hardware("rtx-4090")
QWEN25_7B = ModelConfig.from_hf("Qwen2.5-7B")
QWEN3_32B = ModelConfig.from_hf("Qwen3-32B")
GIB = 2**30


def plan(**options: Any) -> MemoryPlan:
    return plan_memory(QWEN25_7B, CARD, **options)


def test_the_bill_adds_up() -> None:
    bill = plan(max_model_len=8192)
    assert bill.capacity_bytes == CARD.usable_memory_bytes
    assert bill.budget_bytes == int(bill.capacity_bytes * 0.9)
    assert bill.weight_bytes == 2 * f.num_params(QWEN25_7B) == 15231233024
    assert bill.kv_bytes_per_token == 57344
    parts = bill.weight_bytes + bill.activation_bytes + bill.overhead_bytes + bill.kv_pool_bytes
    assert parts == bill.budget_bytes
    assert bill.kv_tokens == f.kv_tokens(bill.kv_pool_bytes, bill.kv_bytes_per_token)
    assert bill.concurrency_at_max_len == f.concurrency(bill.kv_tokens, 8192)
    assert bill.fits
    figures = {name for name in MemoryPlan.__dataclass_fields__ if name.endswith(("_bytes", "_tokens", "_max_len"))}
    assert set(bill.sources) == figures | {"kv_bytes_per_token"}
    assert all(bill.sources.values())


def test_the_published_log_of_that_card() -> None:
    """Qwen2.5-7B on an RTX 4090 under vLLM: 4.64 GiB of cache are 86,896 tokens, 10.61 requests of 8192."""
    bill = plan(kv_pool_bytes=86_896 * 57_344, max_model_len=8192)
    assert round(bill.kv_pool_bytes / GIB, 2) == 4.64
    assert bill.kv_tokens == 86_896
    assert round(bill.concurrency_at_max_len, 2) == 10.61
    assert [bill.kv_tokens // length for length in (1280, 2048, 4096)] == [67, 42, 21]
    assert bill.sources["kv_pool_bytes"] == "given (measured)"
    # Its activations were logged as 1.04 GiB at 8192 tokens a step; the estimate is within 2%.
    assert bill.activation_bytes / GIB == pytest.approx(1.04, rel=0.02)


def test_a_model_too_large_for_the_card_does_not_fit() -> None:
    bill = plan_memory(QWEN3_32B, CARD)
    assert (bill.kv_pool_bytes, bill.kv_tokens, bill.concurrency_at_max_len, bill.fits) == (0, 0, 0.0, False)
    # With a pool given, the weights alone still don't.
    assert not plan_memory(QWEN3_32B, CARD, kv_pool_bytes=2**40).fits


def test_fitting_takes_one_request_of_the_greatest_length() -> None:
    exactly = plan(kv_pool_bytes=1024 * 57_344, max_model_len=1024)
    assert (exactly.kv_tokens, exactly.fits) == (1024, True)
    short = plan(kv_pool_bytes=1024 * 57_344 - 1, max_model_len=1024)
    assert (short.kv_tokens, short.fits) == (1008, False)  # whole blocks of 16 tokens


def test_narrow_cache_and_weights() -> None:
    bill = plan(dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    assert bill.weight_bytes == f.num_params(QWEN25_7B)
    assert bill.kv_bytes_per_token == 57344 // 2
    assert bill.sources["weight_bytes"] == "exact: float8_e4m3fn weights of the architecture"
    assert bill.sources["kv_bytes_per_token"] == "exact: float8_e4m3fn keys and values of all layers"
    assert plan(dtype="float8_e4m3fn").kv_bytes_per_token == 57344  # the cache follows the activations
    assert plan(dtype="int4").weight_bytes == -(-f.num_params(QWEN25_7B) // 2)


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen2-57B-A14B"])
def test_closed_forms(name: str) -> None:
    config = ModelConfig.from_hf(name)
    per_token = f.kv_bytes_per_token(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, 2)
    assert count_kv_bytes_per_token(config) == per_token
    assert count_weight_bytes(config, "float32") == 4 * f.num_params(config)
    width = 3 * config.intermediate_size
    if config.is_moe:  # gate and up, or the outputs where they are wider, and the product, of each of a token's experts
        expert = config.moe_intermediate_size
        width = config.num_experts_per_tok * (max(2 * expert, config.hidden_size) + expert)
        width = max(width, 3 * f.shared_expert_width(config))
    assert peak_activation_bytes(config, 100) == 100 * (width + 3 * config.hidden_size) * 2


@pytest.mark.parametrize("name", ["Qwen3-32B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("tp", [2, 4])
def test_devices_hold_the_whole_and_what_is_repeated(name: str, tp: int) -> None:
    config = ModelConfig.from_hf(name)
    groups = f.param_groups(config)
    repeated = sum(groups[group] for group in ("norm", "qk_norm", "router"))
    assert tp * count_weight_bytes(config, mesh=Mesh(tp)) == 2 * (f.num_params(config) + (tp - 1) * repeated)
    assert tp * count_kv_bytes_per_token(config, mesh=Mesh(tp)) == count_kv_bytes_per_token(config)


def test_kv_heads_fewer_than_devices_are_repeated() -> None:
    config = ModelConfig.from_hf("Qwen3-30B-A3B")  # 4 KV heads
    assert 4 * count_kv_bytes_per_token(config, mesh=Mesh(8)) == count_kv_bytes_per_token(config)


@settings(deadline=None)
@given(
    st.floats(0.05, 0.95), st.integers(1, 20_000), st.integers(1, 32_768), st.integers(0, 2**33), st.floats(0.0, 0.05)
)  # fmt: skip
def test_monotone(utilization: float, batched: int, length: int, overhead: int, more: float) -> None:
    options: dict[str, Any] = {
        "gpu_memory_utilization": utilization,
        "max_num_batched_tokens": batched,
        "max_model_len": length,
        "overhead_bytes": overhead,
    }
    bill = plan(**options)
    assert bill.kv_tokens * bill.kv_bytes_per_token <= bill.kv_pool_bytes
    assert bill.kv_tokens % 16 == 0
    assert plan(**{**options, "gpu_memory_utilization": utilization + more}).kv_tokens >= bill.kv_tokens
    assert plan(**{**options, "max_num_batched_tokens": batched + 1}).kv_tokens <= bill.kv_tokens
    assert plan(**{**options, "overhead_bytes": overhead + 2**20}).kv_tokens <= bill.kv_tokens
    longer = plan(**{**options, "max_model_len": min(length + 1, 32_768)})
    assert longer.concurrency_at_max_len <= bill.concurrency_at_max_len
    assert bill.fits or not longer.fits


@pytest.mark.parametrize(
    ("options", "text"),
    [
        *(
            (
                {"gpu_memory_utilization": value},
                f"gpu_memory_utilization = {value}: must be above 0 and at most 1. vLLM's default is 0.9.",
            )
            for value in (0, -0.5, 1.01, 90, float("nan"))
        ),
        *(
            (
                {"max_model_len": value},
                f"max_model_len = {value}: must be from 1 to the model's 131072 positions. Choose a length within.",
            )
            for value in (0, -1, 131_073)
        ),
        (
            {"max_num_batched_tokens": 0},
            "max_num_batched_tokens = 0: must be at least 1. vLLM's server default is 8192.",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs = 0: must be at least 1. vLLM's default is 256."),
        ({"kv_pool_bytes": -1}, "kv_pool_bytes = -1: must not be negative. Give bytes."),
        ({"overhead_bytes": -1}, "overhead_bytes = -1: must not be negative. Give bytes."),
        (
            {"dtype": "fp8"},
            ("dtype = 'fp8': is not a dtype that is known here. Known: float64, float32, bfloat16, float16, "
            "float8_e4m3fn, float8_e5m2, int8, int4."),
        ),
        (
            {"kv_dtype": "fp8"},
            ("kv_dtype = 'fp8': is not a dtype that is known here. Known: float64, float32, bfloat16, float16, "
            "float8_e4m3fn, float8_e5m2, int8, int4."),
        ),
        (
            {"mesh": Mesh(3)},
            "tp = 3: doesn't split 28 attention heads and 4 KV heads evenly. Use one of 1, 2, 4, 28.",
        ),
    ],
)  # fmt: skip
def test_values_out_of_range(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(**options)
    assert str(caught.value) == text


def test_the_widest_block_sets_the_live_activations() -> None:
    """Experts and the shared one run one after the other; a dense layer of a mixture can be wider than both."""
    moe = read(QWEN2_MOE)  # two experts of 32 for each token, hidden 64: 2 (64 + 32) = 192 against 3 x 48 shared
    assert peak_activation_bytes(moe, 7) == 7 * (192 + 3 * 64) * 2
    wide = read(QWEN2_MOE, shared_expert_intermediate_size=80)
    assert peak_activation_bytes(wide, 7) == 7 * (3 * 80 + 3 * 64) * 2
    mixed = read(QWEN2_MOE, mlp_only_layers=[0])  # a dense layer of 128 is wider
    assert peak_activation_bytes(mixed, 7) == 7 * (3 * 128 + 3 * 64) * 2
    dense = read(QWEN3, intermediate_size=112)
    assert peak_activation_bytes(dense, 7, "float32", Mesh(2)) == 7 * (3 * 56 + 3 * 64) * 4


def test_the_default_plan_reaches_the_log_that_it_is_taken_from() -> None:
    """CUDA graphs lie outside that log's budget: 86,896 tokens within half a percent (ledger S000-166, S000-171)."""
    assert plan(max_model_len=8192).kv_tokens == pytest.approx(86_896, rel=0.005)


def test_an_engine_s_plan_lists_what_its_version_takes() -> None:
    bill = plan(engine="vllm==0.9.2", max_model_len=8192)
    assert bill.engine == "vllm==0.9.2"
    assert list(bill.terms) == ["weights", "activations", "non-torch", "CUDA graphs"]
    taken = sum(term.num_bytes for term in bill.terms.values() if term.in_budget)
    assert bill.sources["max_num_batched_tokens"] == "default of a server start"
    assert (bill.max_num_batched_tokens, bill.max_num_seqs) == (2048, 256)
    assert bill.budget_bytes - bill.kv_pool_bytes == taken
    assert bill.overhead_bytes == taken - bill.weight_bytes - bill.activation_bytes
    assert bill.sources["overhead_bytes"].startswith("non-torch: ")
    newest = plan(engine="vllm")
    assert newest.engine == "vllm"
    assert newest.budget_bytes == int(newest.capacity_bytes * 0.92)  # the default since 0.21
    assert plan(engine="vllm", gpu_memory_utilization=0.5).budget_bytes == int(newest.capacity_bytes * 0.5)


def test_an_engine_s_plan_takes_narrow_weights_and_schemes() -> None:
    narrow = plan(engine="vllm==0.9.2", dtype="int8")
    assert narrow.weight_bytes == f.num_params(QWEN25_7B)
    assert narrow.kv_bytes_per_token == 57344
    assert narrow.activation_bytes == plan(engine="vllm==0.9.2").activation_bytes
    packed = plan(engine="vllm==0.9.2", weights="awq")
    assert packed.weight_bytes == plan(weights="awq").weight_bytes < narrow.weight_bytes
    assert packed.sources["weight_bytes"] == "exact: weights stored as awq"
    assert packed.kv_tokens > narrow.kv_tokens


@pytest.mark.parametrize(
    ("engine", "text"),
    [
        ("sglang==0.4", "engine = 'sglang==0.4': has no memory rules here. Give vllm==VERSION, such as vllm==0.26.0."),
        (
            "vllm==new",
            "engine = 'vllm==new': is not a version whose memory rules are known. "
            "Give 0.4.0 or later, such as vllm==0.26.0.",
        ),
        (
            "vllm==0.3.3",
            "engine = 'vllm==0.3.3': is not a version whose memory rules are known. "
            "Give 0.4.0 or later, such as vllm==0.26.0.",
        ),
    ],
)
def test_engines_without_rules(engine: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(engine=engine)
    assert str(caught.value) == text


ENGINE = "roofline memory Qwen2.5-7B-Instruct --hardware rtx-4090 --engine vllm==0.26.0 --max-model-len 8192"


def test_the_command_takes_an_engine_and_prints_its_terms() -> None:
    line = f"{ENGINE} --gpu-memory-utilization 0.9 --max-num-batched-tokens 8192"
    record = figures(line)
    assert record["engine"] == "vllm==0.26.0"
    assert record["kv_tokens"] == 87_088  # the log that says 86,896 is of this version
    assert list(record["terms"]) == ["weights", "activations", "non-torch", "buffers", "CUDA graphs"]
    assert {"name", "num_bytes", "in_budget", "kind", "source"} == set(record["terms"]["weights"])
    text = text_of(line)
    assert text.splitlines()[0] == (
        "Qwen2.5-7B-Instruct on rtx-4090 fits: KV pool 4.65 GiB (4.995 GB), 87,088 tokens, "
        "10.63 sequences of 8,192 tokens"
    )
    assert "What vllm==0.26.0 takes" in text
    offline = figures(f"{ENGINE} --usage offline --enforce-eager --max-num-seqs 9")
    assert (offline["max_num_batched_tokens"], offline["max_num_seqs"]) == (8192, 9)
    assert "CUDA graphs" not in offline["terms"]


def test_the_command_refuses_engines_it_has_no_rules_for() -> None:
    told = run("roofline memory Qwen2.5-7B --hardware rtx-4090 --engine sglang")
    assert told == (2, "", "engine = 'sglang': has no memory rules here. Give vllm==VERSION, such as vllm==0.26.0.\n")
