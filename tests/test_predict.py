"""Bounds of steps, requests and sweeps: sums over ops, nothing above the roof, and the figures the texts quote."""

from __future__ import annotations

import math
import re
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax import ModelConfig
from roofline import InputError, Step, load_hardware, predict, predict_step, sweep
from roofline.count import DtypePolicy
from roofline.hardware import known_ids
from roofline.predict import device_of
from roofline.profile import known_profiles
from roofline.report import predict_record, predict_text
from roofline.utilization import compute_mbu, compute_mfu

DENSE = ModelConfig.from_hf("Qwen2.5-7B")
MOE = ModelConfig.from_hf("Qwen3-30B-A3B")
CHIPS = [load_hardware(name) for name in known_ids()]
PROFILES = known_profiles()
KNOWN_PROFILES = ", ".join(
    ("bound", *dict.fromkeys(profile.engine for profile in PROFILES), *(profile.name for profile in PROFILES))
)
WITH_BFLOAT16 = [chip for chip in CHIPS if "bfloat16" in chip.peak_flops_per_s]

steps = st.one_of(
    st.builds(Step.decode, st.integers(1, 512), st.integers(1, 32768)),
    st.builds(
        lambda b, t, past: Step.prefill(b, t, t + past), st.integers(1, 8), st.integers(1, 4096), st.integers(0, 4096)
    ),
)


def test_the_figures_that_the_texts_quote() -> None:
    """1008 GB/s over 14.14 GB are 71.3 tokens/s; with the 887 GB/s measured on the card, 62.7."""
    peak = predict_step(DENSE, Step.decode(1, 1), "rtx-4090")
    assert round(1 / peak.time_s, 1) == 71.3
    assert round(peak.bytes / 1e9, 2) == 14.14
    measured = predict_step(DENSE, Step.decode(1, 1), "rtx-4090", bandwidth="measured")
    assert round(1 / measured.time_s, 1) == 62.7


@given(steps, st.sampled_from([DENSE, MOE]), st.sampled_from(WITH_BFLOAT16))
def test_a_step_is_the_sum_of_its_ops_and_below_the_roof(step: Step, config: ModelConfig, chip: object) -> None:
    time = predict_step(config, step, chip)  # type: ignore[arg-type]
    for op in time.ops:
        assert op.time_s == max(op.compute_s, op.memory_s)
        assert op.compute_s == op.row.flops / time.device.flops_per_s
        assert op.memory_s == op.row.bytes / time.device.bandwidth_bytes_per_s
    assert time.time_s == pytest.approx(sum(op.time_s for op in time.ops))
    assert time.time_s >= max(time.compute_s, time.memory_s) * (1 - 1e-12)
    assert 0 < time.mfu <= 1
    assert 0 < time.mbu <= 1
    assert time.communication_s == time.overhead_s == 0


@given(st.integers(1, 256), st.integers(1, 16384), st.integers(0, 64), st.integers(0, 4096))
def test_time_grows_with_batch_and_context(batch: int, context: int, more: int, longer: int) -> None:
    small = predict_step(MOE, Step.decode(batch, context), "h200").time_s
    assert predict_step(MOE, Step.decode(batch + more, context + longer), "h200").time_s >= small * (1 - 1e-12)


def test_devices_share_the_work_and_pay_for_the_link() -> None:
    one, four = (predict_step(DENSE, Step.decode(32, 2048), "h100-sxm", tp=tp) for tp in (1, 4))
    assert four.flops == pytest.approx(one.flops / 4)
    assert four.communication_s > 0
    assert one.time_s / 4 < four.time_s < one.time_s


def test_narrow_weights_are_read_faster() -> None:
    wide, narrow = (predict_step(DENSE, Step.decode(1, 128), "rtx-4090", dtype=dtype) for dtype in ("bfloat16", "int4"))
    assert wide.time_s / narrow.time_s == pytest.approx(4, rel=0.01)


@pytest.mark.parametrize(("prompt", "output"), [(1, 1), (100, 2), (1024, 256), (7, 500)])
@pytest.mark.parametrize("config", [DENSE, MOE])
def test_a_request_is_its_steps(config: ModelConfig, prompt: int, output: int) -> None:
    row = predict(config, "rtx-4090", prompt=prompt, output=output, batch=3).rows[0]
    prefill = predict_step(config, Step.prefill(3, prompt), "rtx-4090")
    decodes = [predict_step(config, Step.decode(3, prompt + n), "rtx-4090") for n in range(1, output)]
    total = prefill.time_s + math.fsum(step.time_s for step in decodes)
    assert row.ttft_s == prefill.time_s
    assert row.e2e_s == row.low == pytest.approx(total)
    assert row.high is None
    assert row.throughput_tokens_per_s == pytest.approx(3 * output / total)
    assert row.mfu == pytest.approx((prefill.flops + sum(s.flops for s in decodes)) / total / 165.2e12)
    assert row.mbu == pytest.approx((prefill.bytes + sum(s.bytes for s in decodes)) / total / 1008e9)
    if output == 1:
        assert row.tpot_s is None
        assert row.tokens_per_s_per_sequence is None
    else:
        assert row.tpot_s == pytest.approx((total - prefill.time_s) / (output - 1))


def test_what_limits_and_what_fits() -> None:
    rows = predict(DENSE, "rtx-4090", prompt=1024, output=256, batch=[1, 64, 160]).rows
    assert [row.limited_by for row in rows] == ["weights from memory", "compute", "compute"]
    assert [row.fits for row in rows] == [True, True, False]  # 174,803 tokens of cache beside the weights
    long = predict(ModelConfig.from_hf("Qwen1.5-7B-Chat"), "h200", prompt=1000, output=31000, batch=16).rows[0]
    assert long.limited_by == "KV cache from memory"
    assert predict(MOE, "rtx-4090", prompt=1, output=2).rows[0].fits is False


def test_a_sweep_equals_its_steps() -> None:
    batches, contexts, names = [1, 7, 64], [1, 333, 32768], ["rtx-4090", "h100-sxm"]
    for config in (DENSE, MOE):
        swept = sweep(config, names, batches, contexts)
        for (i, name), (j, batch), (k, context) in (
            (a, b, c) for a in enumerate(names) for b in enumerate(batches) for c in enumerate(contexts)
        ):
            step = predict_step(config, Step.decode(batch, context), name)
            assert swept["time_s"][i, j, k] == pytest.approx(step.time_s)
            assert swept["tokens_per_s"][i, j, k] == pytest.approx(batch / step.time_s)
            assert swept["flops"][i, j, k] == pytest.approx(step.flops)
            assert swept["bytes"][i, j, k] == pytest.approx(step.bytes)


def test_a_sweep_of_many_points_has_their_shape() -> None:
    swept = sweep(MOE, ["rtx-4090", "l4", "h100-sxm", "b200"], np.arange(1, 251), np.linspace(1, 32768, 100).round())
    assert swept["time_s"].shape == swept["fits"].shape == (4, 250, 100)
    assert bool((np.diff(swept["time_s"], axis=1) > 0).all())


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (
            lambda: compute_mfu(2e12, 1.0, 1e12),
            "mfu = 2.0: is above 1, which no hardware does. Likely cause: the time is too short, work is counted that "
            "wasn't done (dense attention, all logits), or the peak is too low (a base clock, another dtype).",
        ),
        (
            # 61.9 tokens/s with the embedding table counted as read: 943 GB/s on a card that measures 887.
            lambda: compute_mbu(61.9 * 15.231233024e9, 1.0, 887e9),
            "mbu = 1.0629: is above 1, which no hardware does. Likely cause: the time is too short, bytes are counted "
            "that the step doesn't read (the embedding table, experts nobody chose, a dtype wider than the run's), or "
            "the bandwidth is too low (a slower card).",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=0, output=1),
            "prompt = 0: must be a positive integer. Give a length in tokens.",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=1, output=1.5),  # type: ignore[arg-type]
            "output = 1.5: must be a positive integer. Give a length in tokens.",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=1, output=1, batch=[]),
            "batch = []: names no batch size. Give a number or a range such as 1..64.",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=1, output=1, batch=0),
            "batch = 0: must be at least 1. Give a count of sequences or tokens.",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=131072, output=2),
            "context = 131073: is beyond the model's 131072 positions. "
            "Choose a shorter context, or a config with a RoPE scaling.",
        ),
        (
            lambda: predict(DENSE, "rtx-4090", prompt=1, output=1, profile="vlm"),
            f"profile = 'vlm': is not a profile or engine that is known here. Known: {KNOWN_PROFILES}.",
        ),
        (
            lambda: predict_step(DENSE, Step.decode(1, 1), "rtx-4090", bandwidth=2e12),
            "bandwidth = 2000000000000.0: must be peak, measured, or bytes per second up to the peak 1.008e+12. "
            "Give for instance 887e9.",
        ),
        (
            lambda: predict_step(DENSE, Step.decode(1, 1), "h100-sxm", bandwidth="measured"),
            "bandwidth = 'measured': nobody's measurement is known for h100-sxm. Use peak, or give bytes per second.",
        ),
        (
            lambda: sweep(DENSE, ["rtx-4090"], [0], [1]),
            "context = [1.0, 1.0]: batches must be at least 1 and contexts from 1 to 131072. Choose values within.",
        ),
    ],
)
def test_whole_messages(compute: object, message: str) -> None:
    with pytest.raises(InputError) as raised:
        compute()  # type: ignore[operator]
    assert str(raised.value) == message


@pytest.mark.parametrize(("config", "output"), [(DENSE, 1), (DENSE, 40), (MOE, 40)])
def test_batches_are_expected_together_as_each_alone(config: ModelConfig, output: int) -> None:
    sizes = (1, 3, 64)
    asked = partial(predict, config, "a100-80gb-sxm", prompt=3000, output=output, profile="vllm")
    together = asked(batch=sizes).rows
    for size, row in zip(sizes, together, strict=True):
        alone = asked(batch=size).rows[0]
        assert row.limited_by == alone.limited_by
        assert [row.ttft_s, row.e2e_s, row.low, row.high] == pytest.approx(
            [alone.ttft_s, alone.e2e_s, alone.low, alone.high], rel=1e-12
        )


def test_the_text_names_the_largest_sources_of_a_profile_and_json_all() -> None:
    chip, policy = load_hardware("l40s"), DtypePolicy.for_model(DENSE)
    made = predict(DENSE, chip, prompt=100, output=10, profile="any")
    settings = {"prompt": 100, "output": 10, "dtype": "bfloat16", "kv_dtype": "bfloat16", "tp": 1, "ep": 1}
    record = predict_record(DENSE, chip, device_of(chip, policy, "peak"), settings, made)
    counts = sorted(made.profile.sources.values(), reverse=True)
    assert record["profile"]["sources"] == made.profile.sources
    assert sum(counts) == made.profile.num_rows
    line = next(str(block) for block in predict_text(record) if str(block).startswith("Profile any"))
    start = f"Profile any: {sum(counts)} published measurements from {len(counts)} sources: "
    assert line.startswith(start)
    listed = line.removeprefix(start).partition(" more. Validation: ")[0]
    assert re.findall(r"\((\d+)\)", listed) == [str(count) for count in counts[:3]]
    assert listed.endswith(f" and {len(counts) - 3}")
