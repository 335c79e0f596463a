"""Engine steps, schedules and the plans of published figures: nothing above the roof, and every token counted once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax import ModelConfig
from roofline import InputError, Step, load_hardware, predict, predict_step
from roofline.count import count_kv_bytes_per_token
from roofline.profile import Profile, choose_profile, known_profiles
from roofline.timing.case import UNBOUNDED, Case
from roofline.timing.efficiency import load_efficiency
from roofline.timing.engine import CONSTANTS, Engine, step_seconds
from roofline.timing.kernels import gemm_s
from roofline.timing.pools import pool_tokens
from roofline.timing.queueing import queue_groups, spread_lengths
from roofline.timing.scheduling import (
    Group,
    Scheduler,
    as_steps,
    decode_groups,
    mean_wait_groups,
    prefill_groups,
    steady_groups,
)
from roofline.timing.serving import case_terms, layout_of, plan_case, predict_case, scheduler_for, scheme_key
from roofline.timing.step import Terms, step_terms
from roofline.timing.ways import Ways
from roofline.weight_schemes import scheme_of, stored_weight_bytes

CONFIGS = [ModelConfig.from_hf(name) for name in ("Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen2.5-0.5B", "Llama-3.1-8B")]
CHIPS = ("rtx-4090", "a100-80gb-sxm", "h100-sxm", "rtx-3090", "l4", "rtx-5090")
SCHEMES = ("bf16", "awq", "gptq-int8", "fp8")
FASTEST = Engine(
    {name: facts.low for name, facts in CONSTANTS.items()},
    {scheme: dict.fromkeys(("memory", "compute", "experts"), 0.5) for scheme in SCHEMES},
)
CASE = Case(
    id="made-up", grade="A", model="Qwen2.5-7B", config=CONFIGS[0], hardware="a100-80gb-sxm", engine="vllm",
    engine_version="0.6.3", weights="BF16", metric="e2e_tok_s", measured=84.0, input_len=1024, output_len=256,
)  # fmt: skip


def least_seconds(config: ModelConfig, groups: list[Group], chip_id: str, scheme: str, engine: Engine, tp: int) -> Any:
    chip = load_hardware(chip_id)
    layout = layout_of(config, chip, scheme_of(scheme), tp=tp)
    terms = step_terms(config, as_steps(groups), layout, chip, load_efficiency(chip)[0])
    return step_seconds(terms, engine, *engine.scheme(scheme_key(scheme, chip)))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(CONFIGS),
    st.sampled_from(CHIPS),
    st.sampled_from(SCHEMES),
    st.sampled_from([1, 2]),
    st.integers(1, 512),
    st.integers(1, 4096),
    st.integers(1, 4096),
    st.sampled_from([FASTEST, *(profile.engine_constants for profile in known_profiles())]),
)
def test_no_step_is_faster_than_the_roof(
    config: ModelConfig, chip: str, scheme: str, tp: int, batch: int, new: int, past: int, engine: Engine
) -> None:
    decode = Step.decode(batch, past)
    [seconds] = least_seconds(config, [Group(1, batch, past)], chip, scheme, engine, tp)
    assert seconds >= predict_step(config, decode, chip, weights=scheme, tp=tp).time_s * (1 - 1e-6)
    prompts = min(batch, 8)
    prefill = Step.prefill(prompts, new, new + past)
    group = Group(1, prompts=prompts, chunk=new, reached=new + past)
    [seconds] = least_seconds(config, [group], chip, scheme, engine, tp)
    assert seconds >= predict_step(config, prefill, chip, weights=scheme, tp=tp).time_s * (1 - 1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CONFIGS),
    st.sampled_from(CHIPS),
    st.sampled_from(["vllm", "sglang", "tensorrt-llm", "lmdeploy", "llama.cpp", "transformers", "gpt-fast", "any"]),
    st.integers(1, 3000),
    st.integers(1, 300),
    st.integers(1, 256),
)
def test_expected_times_and_their_interval_stay_above_the_bound(
    config: ModelConfig, chip: str, engine: str, prompt: int, output: int, batch: int
) -> None:
    lengths: dict[str, Any] = {"prompt": prompt, "output": output, "batch": batch}
    [bound] = predict(config, chip, **lengths).rows
    [row] = predict(config, chip, profile=engine, **lengths).rows
    assert bound.e2e_s <= row.low <= row.expected <= (row.high or 0)
    assert row.expected == row.e2e_s
    assert row.ttft_s >= bound.ttft_s
    assert row.mfu <= bound.mfu
    assert row.mbu <= bound.mbu
    if output > 1:
        assert (row.tpot_s or 0) >= (bound.tpot_s or 0)


@given(st.integers(1, 64), st.integers(1, 10_000), st.integers(1, 9000))
def test_prompts_are_taken_whole_or_in_chunks_and_no_token_is_lost(batch: int, prompt: int, limit: int) -> None:
    steps = as_steps(prefill_groups(batch, prompt, Scheduler(max_num_batched_tokens=limit)))
    assert float(steps.times @ (steps.prompts * steps.chunk)) == pytest.approx(batch * prompt)
    assert (steps.prompts * steps.chunk <= limit).all()
    assert (steps.reached <= prompt).all()


@given(st.integers(1, 64), st.integers(1, 5000), st.integers(0, 5000))
def test_groups_of_decode_steps_attend_as_many_tokens_as_single_steps(batch: int, first: int, count: int) -> None:
    groups = decode_groups(batch, first, count)
    assert sum(group.times for group in groups) == pytest.approx(count)
    attended = sum(group.times * group.context for group in groups)
    assert attended == pytest.approx(sum(range(first, first + count)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 400), st.integers(1, 60), st.integers(1, 20), st.booleans())
def test_a_queue_makes_every_token_once(count: int, prompt: int, output: int, places: int, mixes: bool) -> None:
    for pool, charged in ((1e9, 0.5), (2.0 * (prompt + output), 0.0), (2.0 * (prompt + output), 1.0)):
        _check_queue(count, prompt, output, places, pool, Scheduler(512, mixes=mixes, charged_output=charged))


def _check_queue(count: int, prompt: int, output: int, places: int, pool: float, scheduler: Scheduler) -> None:
    requests = spread_lengths(prompt, output, count, 1.5)
    groups = queue_groups(requests, places, pool, scheduler)
    decoded = sum(group.times * group.decodes for group in groups)
    assert decoded == pytest.approx(sum(made - 1 for _, made in requests))
    taken = sum(group.times * group.prompts * group.chunk for group in groups)
    assert taken == pytest.approx(sum(length for length, _ in requests))
    assert max(group.decodes for group in groups) <= places


@given(st.integers(2, 500), st.integers(20, 4000), st.integers(20, 4000))
def test_spread_lengths_keep_their_means(count: int, prompt: int, output: int) -> None:
    for widest in (1.0, 1.5, 4.0):
        requests = spread_lengths(prompt, output, count, widest)
        assert np.mean([length for length, _ in requests]) == pytest.approx(prompt, abs=0.6)
        assert np.mean([made for _, made in requests]) == pytest.approx(output, abs=0.6)
        assert max(made for _, made in requests) <= 1.1 * widest * output + 1


def test_recorded_lengths_have_a_long_tail() -> None:
    """Of exponential lengths with mean 200 cut at 4 times that, 1 in 10 is over 2.2 times the mean, the median 0.72."""
    made = sorted(output for _, output in spread_lengths(200, 200, 1000, 4.0))
    assert made[-1] / 200 == pytest.approx(4 / (1 - 4 / (np.exp(4) - 1)), rel=0.05)
    assert made[500] / 200 == pytest.approx(0.73, abs=0.02)
    assert {output for _, output in spread_lengths(200, 200, 50, 1.0)} == {200}


def test_the_last_request_pauses_while_the_pool_is_full() -> None:
    """Two prompts of 50 tokens fit 110 together, their answers don't: the second waits from the 5th step to the end."""
    scheduler = Scheduler(100, 8, mixes=True, charged_output=0.0)
    groups = queue_groups([(50, 21)] * 2, 8, 110.0, scheduler)
    by_size = {decodes: sum(g.times for g in groups if round(g.decodes) == decodes) for decodes in (0, 1, 2)}
    assert by_size == {0: 1, 2: 5, 1: 30}
    reserved = queue_groups([(50, 21)] * 2, 8, 110.0, Scheduler(100, 8, mixes=True, charged_output=1.0))
    assert max(round(group.decodes) for group in reserved) == 1


def test_prompts_that_join_decodes_are_staggered() -> None:
    """Chunks of 100 tokens: each later prompt runs in a step that decodes those before it."""
    groups = queue_groups([(100, 50)] * 3, 8, 1e9, Scheduler(102, 8, mixes=True, charged_output=0.0))
    mixed = [group for group in groups if group.prompts]
    assert sum(group.times for group in mixed) == 3
    assert sum(group.times * group.decodes for group in mixed) == 0 + 1 + 2


def test_the_mean_wait_of_prompts_that_are_taken_one_after_the_other() -> None:
    """Four prompts, one a step: done after 1, 2, 3 and 4 steps."""
    [group] = mean_wait_groups([Group(4, prompts=1, chunk=100, reached=100)])
    assert group.times == 2.5
    together = Group(1, prompts=4, chunk=100, reached=100)
    assert mean_wait_groups([together]) == [together]


def test_a_full_house_makes_its_tokens_in_a_turn() -> None:
    for scheduler in (Scheduler(), Scheduler(mixes=False), Scheduler(max_num_batched_tokens=300)):
        groups = steady_groups(16, 200, 100, scheduler)
        assert sum(group.times * group.decodes for group in groups) == pytest.approx(16 * 99, rel=0.05)
        assert sum(group.times * group.prompts * group.chunk for group in groups) == pytest.approx(16 * 200, rel=0.05)


def test_what_a_figure_counts() -> None:
    scheduler = Scheduler()
    assert plan_case(CASE, scheduler).tokens == 256
    assert plan_case(replace(CASE, counts_prompt=True), scheduler).tokens == 1280
    assert plan_case(replace(CASE, metric="ttft_ms"), scheduler).tokens is None
    prefill = plan_case(replace(CASE, metric="prefill_tok_s"), scheduler)
    assert (prefill.tokens, prefill.kind) == (1024, "prefill")
    decode = plan_case(replace(CASE, metric="decode_tok_s"), scheduler)
    assert decode.tokens == 255
    assert not decode.steps.prompts.any()
    tpot = plan_case(replace(CASE, metric="tpot_ms"), scheduler)
    assert float(tpot.steps.times.sum()) == pytest.approx(1)
    batch = replace(CASE, metric="throughput_total_tok_s", concurrency=8, static_batch=True)
    assert plan_case(batch, scheduler).tokens == 8 * 1280
    queued = replace(CASE, metric="throughput_out_tok_s", concurrency=100, saturated=True)
    assert plan_case(queued, scheduler).tokens == pytest.approx(100 * 256)
    assert plan_case(replace(queued, concurrency=UNBOUNDED), scheduler).kind == "batched"


@pytest.mark.parametrize(
    ("model", "engine", "period"),
    [
        ("Qwen2.5-7B", "llama.cpp", 15 / 28),  # 770 launches fit the queue: the stage with most layers sets the pace
        (
            "Qwen2.5-72B",
            "llama.cpp",
            (1 + (2200 - 1024) / 2200) / 2,
        ),  # the host waits for the second stage's first launches
        ("Qwen2.5-72B", "vllm", 41 / 80),  # a process for each stage
    ],
)
def test_chunks_follow_each_other_through_a_pipeline(model: str, engine: str, period: float) -> None:
    config = ModelConfig.from_hf(model)
    case = replace(CASE, config=config, engine=engine, metric="prefill_tok_s", input_len=4096, output_len=0, pp=2)
    assert plan_case(case, Scheduler(512)).steps.times.sum() == pytest.approx(1 + 7 * period)
    assert plan_case(replace(case, pp=1), Scheduler(512)).steps.times.sum() == pytest.approx(8)


def test_the_last_token_of_a_prompt_can_be_the_first_that_is_decoded() -> None:
    """Of a prompt of one token nothing is left for a prompt's step, and as many decode steps run as tokens are made."""
    apart = Scheduler(mixes=False, last_token_decoded=True)
    first = replace(CASE, metric="ttft_ms", input_len=1, output_len=1)
    steps = plan_case(first, apart).steps
    assert (steps.prompts.sum(), steps.times.sum(), steps.context[0]) == (0.0, 1.0, 1.0)
    steps = plan_case(replace(first, input_len=512), apart).steps
    assert (steps.prompts * steps.chunk).sum() == 511
    whole = plan_case(replace(CASE, input_len=512, output_len=64), apart).steps
    usual = plan_case(replace(CASE, input_len=512, output_len=64), Scheduler(mixes=False)).steps
    assert (whole.times * whole.decodes).sum() == (usual.times * usual.decodes).sum() + 1 == 64


def test_who_queues_also_waits_for_the_step_that_runs() -> None:
    prompt = replace(CASE, metric="ttft_ms", concurrency=4, input_len=512, output_len=64)
    alone = plan_case(prompt, Scheduler(mixes=False)).steps
    queued = plan_case(replace(prompt, ttft_has_queueing=True), Scheduler(mixes=False)).steps
    assert (queued.times * (queued.decodes > 0)).sum() == (alone.times * (alone.decodes > 0)).sum() + 0.5


@pytest.mark.parametrize(("static", "requests"), [(True, 0.0), (False, 1.0)])
def test_no_request_is_taken_in_while_a_static_batch_runs(static: bool, requests: float) -> None:
    case = replace(CASE, metric="ttft_ms", output_len=1, static_batch=static)
    assert plan_case(case, Scheduler(mixes=False)).requests == requests


def test_few_chunks_are_under_way_in_a_long_pipeline() -> None:
    case = replace(CASE, engine="llama.cpp", metric="prefill_tok_s", input_len=4096, output_len=0, pp=7)
    assert plan_case(case, Scheduler(512)).steps.times.sum() == pytest.approx(1 + 7 / 4)


def test_remote_workers_cost_once_a_step_and_only_where_there_are_some() -> None:
    chip = load_hardware("a100-80gb-sxm")
    steps, slow = as_steps([Group(1, 4, 500), Group(1, prompts=2, chunk=300, reached=300)]), {"remote_step_s": 0.004}
    for tp, remote, expected in ((1, True, 0.0), (2, True, 0.004), (2, False, 0.0)):
        layout = layout_of(CONFIGS[0], chip, scheme_of("bf16"), tp=tp, ways=Ways(remote_workers=remote))
        terms = step_terms(CONFIGS[0], steps, layout, chip, load_efficiency(chip)[0])
        added = step_seconds(terms, Engine(slow)) - step_seconds(terms, Engine({"remote_step_s": 0.0}))
        assert added == pytest.approx([expected, expected], abs=1e-12)


def test_each_change_of_the_card_costs_once_a_decode_step() -> None:
    scheduler = Scheduler(512)
    for metric, prompt, output, hops in (("decode_tok_s", 0, 1, 3), ("prefill_tok_s", 512, 0, 0)):
        case = replace(CASE, engine="llama.cpp", metric=metric, input_len=prompt, output_len=output, pp=4)
        terms = case_terms(case, plan_case(case, scheduler), scheduler)
        assert terms.values["hops"].tolist() == [hops]
        once, free = (step_seconds(terms, Engine({"hop_s": seconds})) for seconds in (1.0, 0.0))
        assert (once - free).tolist() == pytest.approx([hops])


def test_each_product_with_quantised_weights_costs_a_call() -> None:
    chip, steps = load_hardware("a100-80gb-sxm"), as_steps([Group(1, 1, 500)])
    for config in CONFIGS[:2]:
        packed, plain = (
            step_terms(config, steps, layout_of(config, chip, scheme_of(name)), chip, load_efficiency(chip)[0])
            for name in ("awq", "bf16")
        )
        products = 2 if config.is_moe else 4  # of attention, and of a dense layer's gate with up, and down
        assert packed.values["packed_calls"] == pytest.approx([products * config.num_hidden_layers])
        assert plain.values["packed_calls"] == pytest.approx([0.0])
        added = step_seconds(packed, Engine({"packed_call_s": 1e-5})) - step_seconds(
            packed, Engine({"packed_call_s": 0})
        )
        assert added == pytest.approx(packed.values["packed_calls"] * 1e-5)


def test_a_few_rows_of_packed_weights_are_multiplied_one_by_one() -> None:
    """A prompt of up to 8 tokens is then no other step than decodes of as many sequences."""
    chip, eff = load_hardware("rtx-3090"), load_efficiency(load_hardware("rtx-3090"))[0]
    four, eight, nine = (
        [gemm_s(rows, 4096, 4096, chip=chip, eff=eff, weight_bits=4.5, rows_apart=apart) for apart in (False, True)]
        for rows in (4, 8, 9)
    )
    assert eight[1] - four[1] == pytest.approx(4 * 4096 * 4096 / (50 * 82 * 1.695e9), rel=1e-3)
    assert eight[1] > eight[0]
    assert nine[1] == nine[0]
    assert gemm_s(8, 4096, 4096, chip=chip, eff=eff, rows_apart=True) == gemm_s(8, 4096, 4096, chip=chip, eff=eff)
    chunks = [Group(1, prompts=1, chunk=tokens, reached=tokens) for tokens in (8, 9)]
    terms = terms_of(CONFIGS[0], chunks, Ways(rows_apart=True))
    assert terms.values["prefill_layers"].tolist() == [0, 28]
    assert terms.values["layers"].tolist() == [28, 0]


def test_models_with_tiles_for_their_experts_have_a_constant_of_their_own() -> None:
    chip, steps = load_hardware("a100-80gb-sxm"), as_steps([Group(1, 1, 500)])
    for name, kind, other in (
        ("Mixtral-8x7B-v0.1", "experts_tuned", "experts"),
        ("Qwen3-30B-A3B", "experts", "experts_tuned"),
    ):
        config = ModelConfig.from_hf(name)
        terms = step_terms(config, steps, layout_of(config, chip, scheme_of("bf16")), chip, load_efficiency(chip)[0])
        assert terms.values[kind] >= terms.least[kind] > 0
        assert terms.values[other] == terms.least[other] == 0


def test_without_flash_decoding_each_query_head_reads_the_cache() -> None:
    chip, config, steps = load_hardware("a100-80gb-sxm"), CONFIGS[0], as_steps([Group(1, 64, 2000)])
    shared, apart = (
        step_terms(
            config,
            steps,
            layout_of(config, chip, scheme_of("bf16"), ways=Ways(flash_decode=flash)),
            chip,
            load_efficiency(chip)[0],
        )
        for flash in (True, False)
    )
    group = config.num_attention_heads / config.num_key_value_heads
    assert group / 2 < apart.values["attention_plain_decode"][0] / shared.values["attention_decode"][0] < 2 * group
    assert apart.least["attention_plain_decode"] == shared.least["attention_decode"]  # the roof is the same
    assert apart.values["attention_decode"] == 0


def test_a_longer_prompt_a_larger_batch_or_wider_weights_take_longer() -> None:
    def seconds(**changes: Any) -> float:
        case = replace(CASE, metric="ttft_ms", **changes)
        return predict_case(case).expected or 0

    assert seconds() < seconds(input_len=2048) < seconds(input_len=4096)
    rate = replace(CASE, metric="decode_tok_s")
    fast, slow = (predict_case(replace(rate, weights=scheme)).expected or 0 for scheme in ("GPTQ-Int4", "BF16"))
    assert fast > slow
    two = predict_case(replace(rate, tp=2)).expected or 0
    assert slow < two < 2 * slow


def terms_of(config: ModelConfig, groups: list[Group], ways: Ways) -> Terms:
    chip = load_hardware("a100-80gb-sxm")
    layout = layout_of(config, chip, scheme_of("bf16"), ways=ways)
    return step_terms(config, as_steps(groups), layout, chip, load_efficiency(chip)[0])


def test_fused_experts_of_one_token_are_two_products_and_of_more_tokens_grouped_ones() -> None:
    config, groups = ModelConfig.from_hf("Mixtral-8x7B-v0.1"), [Group(1, 1, 100), Group(1, 2, 100)]
    grouped, fused = (terms_of(config, groups, Ways(fused_experts=on)).values["experts_tuned"] for on in (False, True))
    chip = load_hardware("a100-80gb-sxm")
    eff = load_efficiency(chip)[0]
    products = gemm_s(1, 4 * 14336, 4096, chip=chip, eff=eff) + gemm_s(1, 2 * 4096, 14336, chip=chip, eff=eff)
    assert fused[0] == pytest.approx(32 * products)
    assert fused[0] < grouped[0]
    assert fused[1] == grouped[1]


def test_a_cache_that_is_copied_to_grow_is_read_and_written_once_more() -> None:
    config = ModelConfig.from_hf("Llama-2-7b-hf")  # a KV head for each query head: nothing is repeated
    kept, copied = (
        terms_of(config, [Group(1, 1, 8192)], Ways(repeats_kv=on)).values["attention_decode"][0] for on in (False, True)
    )
    cache = 8192 * count_kv_bytes_per_token(config)
    chip = load_hardware("a100-80gb-sxm")
    assert copied - kept == pytest.approx(2 * cache / (0.4 * chip.peak_bandwidth_bytes_per_s))


def test_a_case_without_a_length_is_skipped_with_the_reason() -> None:
    made = predict_case(replace(CASE, input_len=0, output_len=0))
    assert made.expected is None
    assert made.reason_skipped == "input_len = 0: with no output length says that nothing was timed. State a length."


def test_a_case_that_no_mesh_can_run_is_skipped_with_the_reason() -> None:
    made = predict_case(replace(CASE, tp=3))
    assert made.expected is None
    assert made.reason_skipped.startswith("tp = 3: doesn't split 28 attention heads and 4 KV heads evenly.")


def test_predictions_need_profiles() -> None:
    with pytest.raises(InputError) as caught:
        choose_profile((), "vllm", "rtx-4090")
    assert str(caught.value) == "profile = 'vllm': can't be chosen, no profiles are there. Fit them with bench/fit.py."


def test_an_engine_without_a_profile_takes_the_constants_of_all_of_them() -> None:
    made = predict_case(replace(CASE, engine="some-engine"))
    assert made.expected is not None
    assert made.provenance == "profile any, the nearest: no profile of some-engine is known"


def test_a_profile_from_elsewhere_has_the_wider_interval() -> None:
    def width(**changes: Any) -> float:
        made = predict_case(replace(CASE, **changes))
        return (made.high or 0) / (made.low or 1)

    assert width() < width(hardware="l40s")


def test_profiles_can_be_given() -> None:
    slow = Profile("slow", "", "", "vllm", ("0.6.3",), ("a100-80gb-sxm",), {"step_s": 0.05})
    made = predict_case(CASE, [slow])
    assert made.provenance == "profile slow"
    assert (made.expected or 0) < 20


def test_a_scheduler_follows_the_engines_version_and_card() -> None:
    """vLLM 0.11 on an H100 finds a profile of 0.7 nearest, but its own scheduler mixes, with larger limits."""
    old = Profile(
        "vllm-0.7-h100", "", "", "vllm", ("0.7",), ("h100-sxm",), {}, {}, scheduler=Scheduler(32768, 256, False)
    )
    case = replace(CASE, engine_version="0.11.0", hardware="h100-sxm")
    assert scheduler_for(case, old) == Scheduler(8192, 1024, True, charged_output=0.0, one_attention=True)
    assert scheduler_for(replace(case, hardware="rtx-4090"), old).max_num_batched_tokens == 2048
    assert scheduler_for(replace(case, engine_version="0.7.3"), old) == old.scheduler
    assert scheduler_for(replace(case, engine="sglang"), old) == old.scheduler


def test_pools_follow_each_engines_rule() -> None:
    """Qwen3-32B leaves 19 GB of an A100: TensorRT-LLM takes 0.9 of what a step leaves, SGLang holds back 14 GB."""
    config = ModelConfig.from_hf("Qwen3-32B")
    case = replace(CASE, config=config, model="Qwen3-32B", input_len=200, output_len=200, engine_version="")
    scheduler = Scheduler(8192, 1024, charged_output=1.0)
    by_engine = {
        engine: pool_tokens(replace(case, engine=engine, concurrency=1000), scheduler)
        for engine in ("vllm", "tensorrt-llm", "sglang")
    }
    each = 2 * config.num_key_value_heads * config.head_dim * 2 * config.num_hidden_layers
    free = load_hardware("a100-80gb-sxm").usable_memory_bytes - stored_weight_bytes(config, "BF16")
    assert by_engine["sglang"] * each == pytest.approx(free - (512 + 12288 + 512 + 128) * 2**20, rel=0.01)
    assert 0.75 * free < by_engine["tensorrt-llm"] * each < 0.9 * free
    assert by_engine["vllm"] < by_engine["tensorrt-llm"]
    few = replace(case, engine="tensorrt-llm", concurrency=1000, gpu_memory_utilization=0.45)
    assert pool_tokens(few, scheduler) == pytest.approx(by_engine["tensorrt-llm"] / 2)


def test_spread_attention_keeps_its_weights_on_each_device() -> None:
    config = ModelConfig.from_hf("Qwen3-235B-A22B")
    case = replace(CASE, config=config, engine="tensorrt-llm", hardware="h200", tp=8, concurrency=1000)
    scheduler = Scheduler(8192, 1024, charged_output=1.0)
    spread = pool_tokens(replace(case, attention_dp=True), scheduler)
    # Each device holds 4 KV heads instead of one, for an eighth of the sequences, and less of them for its weights.
    assert spread < 2 * pool_tokens(case, scheduler)


def test_prompts_cost_decodes_that_share_their_kernel() -> None:
    chip, config = load_hardware("a100-80gb-sxm"), ModelConfig.from_hf("Llama-3.1-8B")
    steps = as_steps([Group(1, 64, 4096.0, 1, 1900, 2000.0), Group(1, 64, 4096.0)])
    seconds = {
        one: step_terms(
            config,
            steps,
            layout_of(config, chip, scheme_of("bf16"), ways=Ways(one_attention=one)),
            chip,
            load_efficiency(chip)[0],
        ).values["attention_decode"]
        for one in (False, True)
    }
    assert seconds[True][0] > 1.5 * seconds[False][0]  # each query head reads the keys for itself
    assert seconds[True][1] == seconds[False][1]


def test_weights_that_a_chip_unpacks_have_a_key_of_their_own() -> None:
    keys = {chip: scheme_key("FP8", load_hardware(chip)) for chip in ("a100-80gb-sxm", "h100-sxm")}
    assert keys == {"a100-80gb-sxm": "fp8-unpacked", "h100-sxm": "fp8"}
    assert scheme_key("AWQ", load_hardware("a100-80gb-sxm")) == "awq"
    assert scheme_key("W8A8", load_hardware("a100-80gb-sxm")) == "w8a8"
    assert scheme_key("FP16", load_hardware("rtx-4090")) == ""
    assert scheme_key("F16", load_hardware("rtx-4090")) == "gguf-f16"  # as GGUF spells it
    only_plain = Engine({}, {"gguf-f16": {"memory": 1.4}})
    assert only_plain.scheme("q8_0")[0] == CONSTANTS["scheme_memory"].start
    engine = Engine({}, {"fp8-unpacked": {"memory": 2.0}, "fp8-block": {"memory": 3.0}})
    assert engine.scheme("fp8")[0] == 3.0
    assert engine.scheme("fp8-block-unpacked")[0] == 2.0


def test_narrow_products_start_where_the_engines_slowdown_is_in_them_once() -> None:
    """Float8 kernels were measured with their quantising; weights that are unpacked start slower than 16 bits."""
    starts = {key: Engine({}, {}).scheme(key)[1] for key in ("fp8", "nvfp4", "fp8-unpacked", "awq", "w8a8")}
    native, unpacked = CONSTANTS["scheme_native"].start, CONSTANTS["scheme_compute"].start
    assert starts == {"fp8": native, "nvfp4": native, "fp8-unpacked": unpacked, "awq": unpacked, "w8a8": unpacked}
    assert native < 1 < unpacked


@pytest.mark.parametrize(("chip_id", "is_large"), [("rtx-4090", True), ("a100-80gb-sxm", False)])
def test_messages_over_pcie_are_large_earlier(chip_id: str, is_large: bool) -> None:
    """512 tokens of 4096 in bfloat16 are 4 MiB: through the host's memory that is a large message, over NVLink not."""
    chip, config = load_hardware(chip_id), ModelConfig.from_hf("Llama-3.1-8B")
    steps = as_steps([Group(1, prompts=1, chunk=512, reached=512.0)])
    terms = step_terms(config, steps, layout_of(config, chip, scheme_of("bf16"), tp=2), chip, load_efficiency(chip)[0])
    assert (terms.values["collectives_staged"][0] > 0) == is_large


@pytest.mark.parametrize(("chip_id", "kind"), [("rtx-4090", "collectives_pcie"), ("a100-80gb-sxm", "collectives")])
def test_links_of_another_kind_have_constants_of_their_own(chip_id: str, kind: str) -> None:
    """What an engine's small all-reduces take over PCIe says nothing of NVLink, and the other way round."""
    chip, config = load_hardware(chip_id), ModelConfig.from_hf("Llama-3.1-8B")
    layout = layout_of(config, chip, scheme_of("bf16"), tp=2)
    terms = step_terms(config, as_steps([Group(1, 1, 512)]), layout, chip, load_efficiency(chip)[0])
    taken = {name for name, values in terms.values.items() if name.startswith("collectives") and values[0] > 0}
    assert taken == {kind}


@pytest.mark.parametrize(("chip_id", "name", "growth"), [
    ("rtx-4090", "collectives_staged", 4.0), ("a100-80gb-sxm", "collectives_large", 1.75),
])  # fmt: skip
def test_cards_share_the_hosts_memory_but_not_their_links(chip_id: str, name: str, growth: float) -> None:
    """64 MiB on 8 cards against 2: through the host 8 payloads against 2; a ring's links carry 7/4 against 1."""
    chip, config = load_hardware(chip_id), ModelConfig.from_hf("Llama-3.1-8B")
    steps = as_steps([Group(1, prompts=1, chunk=8192, reached=8192.0)])
    seconds = {}
    for tp in (2, 8):
        layout = layout_of(config, chip, scheme_of("bf16"), tp=tp)
        seconds[tp] = step_terms(config, steps, layout, chip, load_efficiency(chip)[0]).values[name][0]
    assert seconds[8] / seconds[2] == pytest.approx(growth, rel=0.05)


@pytest.mark.parametrize(("output", "is_alike"), [(200, False), (600, True), (1200, True)])
def test_long_recorded_answers_spread_less(output: int, is_alike: bool) -> None:
    """Answers of 600 tokens on average, whose longest has about 900, spread as those that a limit cuts (1.5)."""
    case = replace(CASE, concurrency=64, saturated=True, requests=64, input_len=200, output_len=output)
    recorded, limited = (predict_case(replace(case, lengths=lengths)).expected for lengths in ("recorded", "limited"))
    assert (recorded == limited) == is_alike


def test_no_note_is_read_for_a_prediction() -> None:
    """What a note says is read by the bench alone, which sets a field for it."""
    case = replace(CASE, concurrency=8, saturated=True, requests=64, input_len=200, output_len=200)
    for lengths in ("equal", "recorded", "limited"):
        told = replace(case, lengths=lengths)
        assert predict_case(told) == predict_case(replace(told, note="ShareGPT, suite A; LLM.generate, eager, batch 1"))
    assert predict_case(case) != predict_case(replace(case, lengths="recorded"))


def test_the_host_launches_a_shared_expert_too() -> None:
    """28 layers op by op: of three dense layers each with routed experts, of a half more with a shared one."""
    config, groups = ModelConfig.from_hf("Qwen2-57B-A14B"), [Group(1, 1, 100)]
    eager = Ways(captured_context=0.0)
    alone = replace(config, model_type="qwen3_moe", shared_expert_intermediate_size=0)
    counts = [terms_of(one, groups, eager).values["eager_layers"][0] for one in (alone, config)]
    assert counts == [28 * 3, 28 * 3.5]


@pytest.mark.parametrize(("chip_id", "scheme", "share"), [
    ("h100-sxm", "bf16", 1.0), ("h100-sxm", "fp8", 0.75), ("a100-80gb-sxm", "fp8", 1.0),
])  # fmt: skip
def test_attention_apart_gathers_quantised_activations(chip_id: str, scheme: str, share: float) -> None:
    """Float8 operands are gathered in one byte and summed in two, 3/4 of an all-reduce; logits stay where they are."""
    chip, config = load_hardware(chip_id), ModelConfig.from_hf("Qwen3-30B-A3B")
    steps = as_steps([Group(1, 2048, 100)])
    layout = layout_of(config, chip, scheme_of(scheme), tp=8, dp=True, ep=True)
    plain = replace(layout, weight_bits={})
    terms = [step_terms(config, steps, one, chip, load_efficiency(chip)[0]).values for one in (layout, plain)]
    assert terms[0]["collectives"] / terms[1]["collectives"] == pytest.approx(share)
    assert [values["collective_calls"][0] for values in terms] == [48, 48]  # one for each layer
