"""A derivation can be computed again: every formula from its inputs, every leaf with a source, the end as printed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from cli_run import as_json, figures, run, text_of
from config_base import QWEN3_MOE, changed
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.sharding import Mesh
from roofline.count import DtypePolicy, count_step, sum_rows
from roofline.explain import (
    LEAF_KINDS,
    Node,
    evaluate,
    explain_request,
    explain_step,
    kernel_functions,
)
from roofline.explain.derivation import names_of
from roofline.hardware import load_hardware
from roofline.predict import predict_step
from roofline.profile import load_profile
from roofline.request import RequestRow, predict
from roofline.timing.efficiency import load_efficiency

SAME = 1e-9
# model, hardware, batch, prompt, output, profile, tp, weights, experts
CASES: tuple[tuple[Any, ...], ...] = (
    ("Qwen2.5-7B", "rtx-4090", 1, 1024, 256, "bound", 1, None, "expected"),
    ("Qwen2.5-7B", "rtx-4090", 1, 1024, 256, "vllm", 1, None, "expected"),
    ("Qwen2.5-7B", "rtx-4090", 8, 700, 1, "vllm", 1, None, "expected"),  # no decode step
    ("Qwen2.5-7B", "a100-80gb-sxm", 5, 30000, 2, "vllm", 1, None, "expected"),  # prompts in chunks
    ("Qwen2.5-7B", "a100-80gb-sxm", 16, 300, 90, "transformers", 1, None, "expected"),  # the host launches each layer
    ("Qwen2.5-7B", "a100-80gb-sxm", 16, 300, 90, "llama.cpp", 1, "q4_k_m", "expected"),  # tensors of several widths
    ("Mistral-7B-v0.1", "rtx-4090", 3, 4000, 500, "bound", 1, None, "expected"),  # a window cuts the context off
    ("Mistral-7B-v0.1", "rtx-4090", 3, 4000, 500, "vllm", 1, None, "expected"),
    ("Qwen3-32B", "h100-sxm", 3, 700, 50, "bound", 8, "gptq-int4", "expected"),
    ("Qwen3-32B", "h100-sxm", 3, 700, 50, "vllm", 2, "awq", "expected"),
    ("Qwen3-32B", "h100-sxm", 3, 700, 50, "vllm", 4, "fp8-block", "expected"),  # float8 products
    ("Qwen2.5-0.5B", "l4", 2, 100, 20, "sglang", 2, "int8-wo", "expected"),  # tied, the nearest profile
    ("Qwen3-30B-A3B", "h100-sxm", 8, 1024, 100, "bound", 8, None, "expected"),  # more devices than KV heads
    ("Qwen3-30B-A3B", "h100-sxm", 8, 1024, 100, "vllm", 2, "fp8", "expected"),
    ("Qwen3-30B-A3B", "h100-sxm", 8, 1024, 100, "vllm", 1, None, 40),  # counted experts
    ("Qwen3-30B-A3B", "a100-80gb-sxm", 2, 50, 9, "transformers", 1, None, "expected"),  # many launches of the host
    ("Qwen2-57B-A14B", "h100-sxm", 8, 1024, 100, "vllm", 4, None, "all"),  # a shared expert
    ("Mixtral-8x7B-v0.1", "a100-80gb-sxm", 1, 5, 20, "gpt-fast", 2, None, "expected"),  # experts compiled together
    ("Mixtral-8x7B-v0.1", "a100-80gb-sxm", 2, 5, 20, "gpt-fast", 2, "int8-wo", "expected"),
    ("Qwen2.5-7B", "a100-80gb-sxm", 3, 2, 9, "llama.cpp", 1, "q4_k_m", "expected"),  # a few rows
    ("Qwen2.5-7B", "rtx-4090", 8, 700, 9, "vllm", 4, None, "expected"),  # prompts' sums go through the host's memory
)


def config_of(name: str) -> ModelConfig:
    return ModelConfig.from_hf(name)


def explained(case: Sequence[Any]) -> tuple[Node, ...]:
    model, hardware, batch, prompt, output, profile, tp, weights, experts = case
    config = config_of(model)
    policy = DtypePolicy.for_model(config, None, None, weights)
    return explain_request(
        config, load_hardware(hardware), policy, prompt=prompt, output=output, batch=batch, profile=profile,
        experts=experts, mesh=Mesh(tp), origin="config.json",
    )  # fmt: skip


def predicted(case: Sequence[Any]) -> RequestRow:
    model, hardware, batch, prompt, output, profile, tp, weights, experts = case
    made = predict(
        config_of(model), hardware, prompt=prompt, output=output, batch=batch, profile=profile, tp=tp,
        weights=weights, experts=experts,
    )  # fmt: skip
    return made.rows[0]


def check_derivation(nodes: Sequence[Node], functions: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Every number again, from leaves alone; kernels' functions are called again where they are given."""
    assert len({node.name for node in nodes}) == len(nodes)
    values: dict[str, float] = {}
    for node in nodes:
        assert node.unit, node.name
        assert node.source, node.name
        assert isinstance(node.value, int | float), node
        assert math.isfinite(node.value), node
        assert set(node.inputs) <= set(values), (node.name, "stands before an input of it")
        if node.kind in LEAF_KINDS:
            assert (node.formula, node.inputs) == ("", ()), node.name
            values[node.name] = node.value
            continue
        inputs = {name: values[name] for name in node.inputs}
        assert node.kind in ("derived", "computed"), node.name
        if node.kind == "computed" and not functions:
            assert set(names_of(node.formula)) <= set(inputs), node.name
            values[node.name] = node.value
            continue
        values[node.name] = evaluate(node.formula, inputs, functions)
        assert values[node.name] == pytest.approx(node.value, rel=SAME), node
    return values


# Whole requests


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_request_can_be_computed_again_from_its_leaves(case: tuple[Any, ...]) -> None:
    chip = load_hardware(case[1])
    values = check_derivation(explained(case), kernel_functions(chip, load_efficiency(chip)[0]))
    row = predicted(case)
    for name in ("ttft_s", "e2e_s", "tpot_s", "tokens_per_s_per_sequence", "throughput_tokens_per_s"):
        if getattr(row, name) is not None:
            assert values[name] == pytest.approx(getattr(row, name), rel=SAME), name
    if row.high is not None:
        assert values["low_s"] == pytest.approx(row.low, rel=SAME)
        assert values["high_s"] == pytest.approx(row.high, rel=SAME)
    assert ("tpot_s" in values) == (case[4] > 1)


@pytest.mark.parametrize("case", CASES[:3], ids=str)
def test_the_last_node_is_the_throughput_that_is_printed(case: tuple[Any, ...]) -> None:
    model, hardware, batch, prompt, output, profile = case[:6]
    lengths = f"--prompt {prompt} --output {output} --batch {batch} --profile {profile}"
    record = figures(f"roofline predict {model} --hardware {hardware} {lengths} --explain")
    last = record["explanation"][-1]
    assert last["name"] == "throughput_tokens_per_s"
    assert last["value"] == pytest.approx(record["rows"][0]["throughput_tokens_per_s"], rel=SAME)
    assert set(last) == {"name", "value", "unit", "kind", "source", "formula", "inputs"}


def test_python_and_the_command_explain_alike() -> None:
    lengths = "--prompt 1024 --output 256 --profile vllm"
    record = figures(f"roofline predict Qwen2.5-7B --hardware rtx-4090 {lengths} --explain")
    ours = [node for node in as_json(explained(CASES[1])) if node["kind"] != "exact"]
    assert [node for node in record["explanation"] if node["kind"] != "exact"] == ours


def test_without_the_option_nothing_is_explained() -> None:
    assert "explanation" not in figures("roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 9 --output 9")


def test_where_each_kind_of_number_comes_from() -> None:
    nodes = {node.name: node for node in explained(CASES[1])}
    assert (nodes["F"].value, nodes["F"].kind) == (18944, "exact")
    assert "intermediate_size" in nodes["F"].source
    assert nodes["chip.peak_bandwidth_bytes_per_s"].kind == "datasheet"
    assert "whitepaper" in nodes["chip.peak_bandwidth_bytes_per_s"].source
    assert nodes["B"].kind == "given"
    assert nodes["kernel.gemm.memory_fraction"].kind == "fitted"
    assert nodes["interval.low"].kind == "fitted"
    assert nodes["weights.gate_up_proj.elements"].formula == "C * F * D * L"
    assert nodes["weights.gate_up_proj.elements"].value == 28 * 2 * 18944 * 3584
    assert nodes["decode.gate_up_proj.flops"].value == 2 * 28 * 2 * 18944 * 3584
    computed = [node for node in nodes.values() if node.kind == "computed"]
    assert computed
    assert all("roofline.timing" in node.source or "all layers" in node.source for node in computed)


def test_a_measured_bandwidth_says_so() -> None:
    command = "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 9 --output 9 --bandwidth measured --explain"
    nodes = {node["name"]: node for node in figures(command)["explanation"]}
    assert nodes["chip.measured_bandwidth_bytes_per_s"]["kind"] == "measured elsewhere"
    given_one = {node["name"]: node for node in figures(command.replace("measured --", "8e11 --"))["explanation"]}
    assert (given_one["bandwidth"]["value"], given_one["bandwidth"]["kind"]) == (8e11, "given")


def test_expected_experts_have_their_formula() -> None:
    nodes = {node.name: node for node in explained(CASES[12])}
    assert nodes["decode.distinct"].formula == "max(A, E * (1 - (1 - A / E) ** (B * decode.T)))"
    assert nodes["decode.distinct"].value == pytest.approx(128 * (1 - (1 - 8 / 128) ** 8))
    assert "decode.distinct" in nodes["decode.experts_down_proj.bytes"].inputs


def test_collectives_and_shares_of_devices_are_told() -> None:
    nodes = {node.name: node for node in explained(CASES[12])}
    assert nodes["share.tp"].formula == "1 / tp"
    assert nodes["prefill.mlp_residual.payload_bytes"].value == 8 * 1024 * 2048 * 2
    link = load_hardware("h100-sxm").peer_link
    assert link is not None
    assert nodes["chip.links.nvlink.one_way_bytes_per_s"].value == link.one_way_bytes_per_s


def test_stored_bits_of_a_quantised_weight_have_their_formula() -> None:
    nodes = {node.name: node for node in explained(CASES[9])}
    bits = nodes["bits.gate_proj"]
    assert bits.formula == "scheme.linear.bits + scheme.linear.tile_bits / scheme.linear.tile_1x128"
    assert bits.value == 4 + 20 / 128


@settings(max_examples=15, deadline=None)
@given(
    batch=st.integers(1, 64),
    prompt=st.integers(1, 300),
    output=st.integers(1, 200),
    tp=st.sampled_from((1, 2, 4)),
    ep=st.sampled_from((1, 2)),
    kv_dtype=st.sampled_from((None, "float8_e4m3fn")),
    weights=st.sampled_from((None, "fp8", "awq")),
    window=st.sampled_from((None, 64)),
)
def test_any_request_s_bound_can_be_computed_again(
    batch: int,
    prompt: int,
    output: int,
    tp: int,
    ep: int,
    kv_dtype: str | None,
    weights: str | None,
    window: int | None,
) -> None:
    config = ModelConfig.from_hf(changed(QWEN3_MOE, use_sliding_window=window is not None, sliding_window=window or 64))
    policy = DtypePolicy.for_model(config, None, kv_dtype, weights)
    chip = load_hardware("h100-sxm")
    nodes = explain_request(config, chip, policy, prompt=prompt, output=output, batch=batch, mesh=Mesh(tp, ep))
    row = predict(
        config, chip, prompt=prompt, output=output, batch=batch, tp=tp, ep=ep, kv_dtype=kv_dtype, weights=weights
    ).rows[0]
    assert check_derivation(nodes)["throughput_tokens_per_s"] == pytest.approx(row.throughput_tokens_per_s, rel=SAME)


def test_an_engines_derivation_says_what_its_scheduler_is_known_from() -> None:
    chip, policy = load_hardware("a100-80gb-sxm"), DtypePolicy.for_model(config_of("Qwen2.5-7B"))
    nodes = explain_request(config_of("Qwen2.5-7B"), chip, policy, prompt=64, output=8, batch=2, profile="vllm==0.6.3")
    known = load_profile("vllm-0.6-a100").scheduler_source
    assert known.startswith("vLLM before 0.8: prompts run before decodes")
    assert any(known in node.source for node in nodes)


# Single steps


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("attention", ["causal", "dense"])
@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Mistral-7B-v0.1", "Qwen3-30B-A3B"])
def test_a_step_can_be_computed_again(model: str, attention: Any, phase: str) -> None:
    config, chip = config_of(model), load_hardware("h100-sxm")
    step = Step.decode(4, 5000) if phase == "decode" else Step.prefill(2, 300, 5000)
    policy = DtypePolicy.for_model(config)
    nodes = explain_step(config, step, chip, policy, attention=attention, logits="all", mesh=Mesh(2))
    values = check_derivation(nodes)
    times = predict_step(config, step, chip, attention=attention, logits="all", tp=2)
    assert values["step.s"] == pytest.approx(times.time_s, rel=SAME)
    counted = check_derivation(explain_step(config, step, None, policy, attention=attention, logits="all"))
    totals = sum_rows(count_step(config, step, attention=attention, logits="all"))
    assert counted["step.flops"] == pytest.approx(totals["flops"], rel=SAME)
    assert counted["step.bytes"] == pytest.approx(totals["bytes"], rel=SAME)


def test_step_explains_on_the_command_line() -> None:
    command = "roofline step Qwen2.5-7B --phase decode --context 1000 --explain"
    record = figures(f"{command} --hardware rtx-4090")
    assert record["explanation"][-1]["name"] == "step.s"
    assert record["explanation"][-1]["value"] == pytest.approx(record["totals"]["time_s"], rel=SAME)
    record = figures(command)
    assert record["explanation"][-1]["value"] == record["totals"]["bytes"]


# Text


def test_the_text_answers_first_and_derives_after_that() -> None:
    plain = "roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 1024 --output 256 --profile vllm"
    lines, short = text_of(f"{plain} --explain").splitlines(), text_of(plain).splitlines()
    assert lines[: len(short)] == short
    derivation = lines[len(short) :]
    titles = [line for line in derivation if line and not line.startswith((" ", "How", "Decode steps are"))]
    assert titles == [
        "What is asked", "The model, in letters", "The chip", "Weights read by each op, on one device",
        "The prefill, at least", "A decode step, at least", "The request, at least", "Constants of the chip's kernels",
        "Constants of the engine", "The prefill as the engine runs it", "Decode steps as the engine runs them",
        "The answer", "Sources",
    ]  # fmt: skip
    elements = next(line for line in derivation if "3,802,136,576  " in line)
    assert " ".join(elements.split()) == "elements 3,802,136,576 = C x F x D x L = 2 x 18,944 x 3,584 x 28"
    assert max(map(len, lines[len(short) :])) < 200


def test_every_number_s_source_is_told_once() -> None:
    text = text_of("roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 9 --output 9 --profile vllm --explain")
    body, _, sources = text.partition("\nSources\n")
    told = [line.split()[0] for line in sources.splitlines()]
    assert told == [str(number + 1) for number in range(len(told))]
    assert all(f"source {number}" in body for number in told)


def test_several_batches_can_t_be_explained_at_once() -> None:
    result = run("roofline predict Qwen2.5-7B --hardware rtx-4090 --prompt 9 --output 9 --batch 1..4 --explain")
    assert result.status == 2
    assert result.stdout == ""
    assert result.stderr == "--batch = '1..4': names several sizes, and --explain derives one. Give one size.\n"


def test_a_chip_without_the_dtype_is_refused_as_by_the_prediction() -> None:
    config, chip = config_of("Qwen2.5-0.5B"), load_hardware("t4")
    with pytest.raises(InputError) as refused:
        explain_step(config, Step.decode(1, 9), chip, DtypePolicy.for_model(config))
    with pytest.raises(InputError) as expected:
        predict_step(config, Step.decode(1, 9), chip)
    assert str(refused.value) == str(expected.value)


# The language of formulas


def test_formulas_know_arithmetic_names_and_a_few_functions() -> None:
    values = {"a": 3, "b.c": 5, "first": 1}
    assert evaluate("2 * a ** 2 - -b.c / 2 + 1e1", values) == 30.5
    assert evaluate("max(a, b.c, 1) + min(a, b.c) + ceil(b.c / a)", values) == 10
    assert evaluate("total(x, first, 4, max(x, a) * b.c)", values) == 5 * (3 + 3 + 3 + 4)
    assert evaluate("twice(a) + twice(n=a)", values, {"twice": lambda n: 2 * n}) == 12
    assert names_of("total(x, first, 4, max(x, a) * b.c) + twice(n=a) * first") == ("first", "a", "b.c")


@pytest.mark.parametrize("formula", ["'a'", "[1][0]", "a if a else 1", "(lambda: 1)()", "a < 1", "not a", "True and a"])
def test_formulas_know_nothing_else(formula: str) -> None:
    with pytest.raises(ValueError, match="not a"):
        evaluate(formula, {"a": 1})


def test_a_formula_calls_only_what_it_is_given() -> None:
    with pytest.raises(KeyError, match="open"):
        evaluate("open(a)", {"a": 1})
