"""vLLM's counters: its own file's figures for the four architectures, closed forms, and the corrected count."""

from __future__ import annotations

from typing import Any

import pytest
from config_base import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, read
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from roofline import formulas as f
from roofline.count import count_step
from roofline.vllm_counters import Account, corrected_terms, counter_terms, mean_work, request_work, total_of

QWEN25_7B = ModelConfig.from_hf("Qwen2.5-7B")
FP8_CACHE = {"tp": 2, "kv_dtype": "float8_e4m3fn"}
# (model, prompt, output, requests, chunk, options, FLOPs, bytes read, bytes written): what perf.py of the vLLM 0.26.0
# package gave, run step by step with prompts one after the other and decode steps of all requests.
GOLDEN: list[tuple[str, int, int, int, int | None, dict[str, Any], int, int, int]] = [
    ("Qwen2.5-7B", 1024, 256, 1, None, {}, 17509550915584, 3641989607424, 5065179136),
    ("Qwen2.5-7B", 1024, 256, 1, 512, {}, 17405414211584, 3656159546368, 5065483264),
    ("Qwen2.5-7B", 1025, 17, 4, 512, FP8_CACHE, 27858179342336, 208285077504, 8906127360),
    ("Qwen3-32B", 1024, 256, 1, None, {}, 83037354196992, 16469779677184, 16338976768),
    ("Qwen3-32B", 1024, 256, 1, 512, {}, 82489154207744, 16533880973312, 16339280640),
    ("Qwen3-32B", 1025, 17, 4, 512, FP8_CACHE, 133371521400832, 931239550976, 28938088960),
    ("Qwen2-57B-A14B", 1024, 256, 1, None, {}, 18692191551488, 3966960521216, 7192059904),
    ("Qwen2-57B-A14B", 1024, 256, 1, 512, {}, 18588053929984, 4068373163008, 7192363776),
    ("Qwen2-57B-A14B", 1025, 17, 4, 512, FP8_CACHE, 29783669751808, 868832620544, 15293493760),
    ("Qwen3-30B-A3B", 1024, 256, 1, None, {}, 8167383629824, 1639755677696, 5358485504),
    ("Qwen3-30B-A3B", 1024, 256, 1, 512, {}, 7961847529472, 1700222341120, 5358789376),
    ("Qwen3-30B-A3B", 1025, 17, 4, 512, FP8_CACHE, 12605593223168, 403937968128, 12189348352),
]


@pytest.mark.parametrize(
    ("name", "prompt", "output", "count", "chunk", "options", "flops", "read", "written"),
    GOLDEN,
    ids=[f"{case[0]}-{case[4] or 'whole'}-tp{case[5].get('tp', 1)}" for case in GOLDEN],
)
def test_the_counters_are_vllm_s_to_the_unit(
    name: str,
    prompt: int,
    output: int,
    count: int,
    chunk: int | None,
    options: dict[str, Any],
    flops: int,
    read: int,
    written: int,
) -> None:
    work = request_work(prompt, output, count=count, chunk=chunk, batch=count)
    assert total_of(counter_terms(ModelConfig.from_hf(name), work, **options)) == (flops, read, written)


def test_the_ledger_s_figures_an_output_token() -> None:
    """S000-062: one chunk and chunks of 512; S000-059 is the corrected count."""
    whole, chunked = request_work(1024, 256), request_work(1024, 256, chunk=512)
    per_token = [total_of(counter_terms(QWEN25_7B, work)).flops / 256e9 for work in (whole, chunked)]
    assert per_token == [68.396683264, 67.989899264]
    assert total_of(corrected_terms(QWEN25_7B, whole)).flops / 256e9 == 67.575402496
    assert total_of(corrected_terms(QWEN25_7B, chunked)).flops / 256e9 == 67.575402496  # chunks change nothing


def test_the_causal_mask_halves_a_prompt_s_attention() -> None:
    counted, right = (
        terms(QWEN25_7B, request_work(1024, 1))["attention"].flops for terms in (counter_terms, corrected_terms)
    )
    assert counted == 401_408 * 1024 * 1024
    assert right == 401_408 * 1024 * 1025 // 2


def test_the_shared_expert_is_missing_from_the_counter() -> None:
    """12.33 GFLOP a token of Qwen2-57B-A14B, and its gate and router beside it (seeds, section 3)."""
    config = ModelConfig.from_hf("Qwen2-57B-A14B")
    counted, right = (terms(config, request_work(1, 1)) for terms in (counter_terms, corrected_terms))
    assert right["shared_expert"].flops == 6 * 3584 * 20480 * 28 == 12_331_253_760
    assert set(right) - set(counted) == {"shared_expert", "shared_expert_gate", "router"}
    assert right["router"].flops == 2 * 3584 * 64 * 28


def test_distinct_experts_are_fewer_than_tokens_choose() -> None:
    config = ModelConfig.from_hf("Qwen3-30B-A3B")
    work = request_work(8, 5, count=4, batch=4)
    counted, right = (terms(config, work)["experts"] for terms in (counter_terms, corrected_terms))
    matrix = 3 * 2048 * 768 * 2 * 48
    fewer = 4 * (64 - f.distinct_experts(128, 8, 8)) + 4 * (32 - f.distinct_experts(128, 8, 4))
    assert counted.read_bytes - right.read_bytes == pytest.approx(matrix * fewer, rel=1e-9)
    assert counted.flops == right.flops


@pytest.mark.parametrize("source", [QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE])
@pytest.mark.parametrize("changes", [{}, {"mlp_only_layers": [0]}])
def test_corrected_flops_are_the_inventory_s(source: dict[str, Any], changes: dict[str, Any]) -> None:
    """Prompt and fed-back tokens together are one causal prefill; each output token needs one row of logits."""
    config = read(source, **(changes if "num_experts" in source else {}))
    prompt, output = 37, 9
    rows = count_step(config, Step.prefill(1, prompt + output - 1))
    head = next(row.flops for row in rows if row.op == "unembed")
    expected = sum(row.flops for row in rows) + (output - 1) * head
    assert total_of(corrected_terms(config, request_work(prompt, output, chunk=5))).flops == expected


def test_sliding_windows_are_corrected() -> None:
    config = read(QWEN2, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    assert set(config.sliding_windows) == {None, 16}
    work = request_work(40, 3)
    rows = count_step(config, Step.prefill(1, 42))
    expected = sum(row.flops for row in rows if row.op in ("scores", "values"))
    assert corrected_terms(config, work)["attention"].flops == expected
    assert counter_terms(config, work)["attention"].flops > expected


def test_weights_by_quantisation_as_vllm_takes_them() -> None:
    narrow = ModelConfig.from_hf("Qwen3-8B-FP8")
    work = request_work(64, 2)
    wide, fp8 = (counter_terms(config, work) for config in (ModelConfig.from_hf("Qwen3-8B"), narrow))
    weights = 3 * 4096 * 12288 * 36
    assert wide["mlp"].read_bytes - fp8["mlp"].read_bytes == 2 * weights  # two steps, one byte fewer each
    assert wide["unembed"] == fp8["unembed"]  # the output head isn't quantised


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 90), st.integers(1, 20), st.integers(1, 90), st.integers(1, 5), st.integers(0, 40))
def test_properties(prompt: int, output: int, chunk: int, count: int, cached: int) -> None:
    cached = min(cached, prompt - 1)
    one = request_work(prompt, output, chunk=chunk, cached=cached)
    many = request_work(prompt, output, chunk=chunk, cached=cached, count=count, batch=count)
    assert one.tokens == prompt - cached + output - 1
    assert many.tokens == count * one.tokens
    counted, right = (total_of(terms(QWEN25_7B, one)) for terms in (counter_terms, corrected_terms))
    assert total_of(counter_terms(QWEN25_7B, many)).flops == count * counted.flops
    assert right.flops <= counted.flops
    assert one.pairs() <= one.prefill_products + one.decode_context
    assert one.pairs(10**6) == one.pairs() >= one.pairs(7)
    assert total_of(counter_terms(QWEN25_7B, many)).read_bytes <= count * counted.read_bytes


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 200), st.integers(0, 60))
def test_requests_known_in_sum_are_as_equal_as_can_be(requests: int, more_prompt: int, more_output: int) -> None:
    prompts, outputs = requests + more_prompt, requests + more_output
    work = mean_work(requests, prompts, outputs)
    assert work.prefill_tokens == prompts
    assert work.decode_tokens == outputs - requests
    assert work.sampled == outputs
    assert sum(span.requests for span in work.spans) == requests
    stepped = mean_work(requests, prompts, outputs, steps=7)
    assert stepped.num_steps == 7
    assert total_of(counter_terms(QWEN25_7B, stepped)).flops == total_of(counter_terms(QWEN25_7B, work)).flops


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 1), "prompt = 0: must be at least 1. Give a count of tokens or requests."),
        ((1, 0), "output = 0: must be at least 1. Give a count of tokens or requests."),
        ((4, 1, {"chunk": 0}), "chunk = 0: must be at least 1. Give a count of tokens or requests."),
        ((4, 1, {"batch": 0}), "batch = 0: must be at least 1. Give a count of tokens or requests."),
        ((4, 1, {"cached": 4}), "cached = 4: must be from 0 to 3. The prompt's last token is computed."),
    ],
)
def test_work_that_can_not_be(arguments: tuple[Any, ...], text: str) -> None:
    *lengths, options = (*arguments, {}) if len(arguments) == 2 else arguments
    with pytest.raises(InputError) as caught:
        request_work(*lengths, **options)
    assert str(caught.value) == text


def test_an_empty_sum() -> None:
    assert total_of([]) == Account(0, 0, 0)
