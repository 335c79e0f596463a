"""Times from measured rates by shape: interpolation, and the step as a sum over the inventory."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_box import box

from qwenjax import ModelConfig
from qwenjax.moe_blocks import block_rows
from roofline import Hardware, InputError, Step, count_step
from roofline.calibrated import _attention_rate, _interpolate, _product_rate, expected_blocks, predict_calibrated

CONFIG = ModelConfig.from_hf("Qwen3-0.6B")


@given(st.floats(1, 1e4), st.floats(1, 1e4))
def test_interpolation_stays_between_the_measured_points(x: float, y: float) -> None:
    assert min(y, 50.0) * 0.999 <= _interpolate([(8, y), (512, 50.0)], x) <= max(y, 50.0) * 1.001


def test_interpolation_is_straight_in_log_log_and_level_beyond() -> None:
    curve = [(64.0, 800.0), (1.0, 100.0)]
    assert _interpolate(curve, 8) == pytest.approx((100 * 800) ** 0.5)
    assert _interpolate(curve, 0.5) == 100
    assert _interpolate(curve, 1000) == 800


def test_a_measured_shape_gives_its_own_rate_and_another_the_nearer_ones() -> None:
    entries = [
        {"rows": 1, "columns": 1024, "summands": 1024, "flops_per_s": 1e9},
        {"rows": 1, "columns": 65536, "summands": 1024, "flops_per_s": 4e9},
    ]
    assert _product_rate(entries, 1, 1024, 1024) == pytest.approx(1e9, rel=0.01)
    near_small, near_large = _product_rate(entries, 1, 2048, 1024), _product_rate(entries, 1, 32768, 1024)
    assert 1e9 < near_small < 2e9 < near_large < 4e9


def test_attention_of_a_decode_step_interpolates_heads_contexts_and_groups() -> None:
    entries = [
        {"heads": h, "context": s, "group": g, "tokens": 1, "flops_per_s": h * s * g * 1e6}
        for h in (8, 64)
        for s in (128, 512)
        for g in (1, 8)
    ] + [{"heads": 8, "context": t, "group": 2, "tokens": t, "flops_per_s": t * 1e9} for t in (128, 512)]
    assert _attention_rate(entries, {"B": 4, "K": 8, "G": 2, "S": 256, "T": 1}) == pytest.approx(32 * 256 * 2 * 1e6)
    assert _attention_rate(entries, {"B": 4, "K": 8, "G": 2, "S": 256, "T": 256}) == pytest.approx(256e9)


@pytest.mark.parametrize("step", [Step.decode(1, 128), Step.decode(8, 1024), Step.prefill(2, 256)])
def test_a_step_is_its_ops_at_constant_rates(step: Step) -> None:
    chip = box(flops_per_s=1e11, bytes_per_s=1e10, launch_s=1e-6, dispatch_s=1e-4)
    parts = {op.op: op.time_s for op in predict_calibrated(CONFIG, step, chip, "float32")}
    rows = {row.op: row for row in count_step(CONFIG, step, dtype="float32", attention="dense")}
    assert parts.pop("dispatch") == 1e-4
    assert parts.keys() == rows.keys()
    for name, row in rows.items():
        if row.flops:
            assert parts[name] == pytest.approx(row.flops / 1e11)
        elif name == "softmax":
            assert parts[name] == 0  # in the measured rate of attention
        elif name == "embed":
            assert parts[name] == pytest.approx(1e-6)
        else:
            assert parts[name] == pytest.approx(row.layers * 1e-6 + row.activation_bytes / 1e10)


def test_a_datasheet_chip_has_no_rates() -> None:
    from roofline import load_hardware

    with pytest.raises(InputError) as raised:
        predict_calibrated(CONFIG, Step.decode(1, 128), load_hardware("rtx-4090"), "float32")
    assert str(raised.value) == (
        "hardware = 'rtx-4090': has no measured rates. Run `roofline calibrate` and use `here`."
    )


def test_a_dtype_that_was_not_measured() -> None:
    chip: Hardware = box()
    with pytest.raises(InputError) as raised:
        predict_calibrated(CONFIG, Step.decode(1, 128), chip, "float16")
    assert str(raised.value) == "dtype = 'float16': was not measured on here. Measured: float32."


@pytest.mark.parametrize(("tokens", "block"), [(1, 5), (40, 3), (1000, 64), (7, 1)])
def test_expected_blocks_is_the_mean_over_routings(tokens: int, block: int) -> None:
    chance = 0.125
    ways = [math.comb(tokens, n) * chance**n * (1 - chance) ** (tokens - n) for n in range(tokens + 1)]
    mean = math.fsum(p * -(-n // block) for n, p in enumerate(ways))
    assert expected_blocks(tokens, chance, block) == pytest.approx(mean)
    assert expected_blocks(tokens, 1.0, block) == -(-tokens // block)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Qwen2-57B-A14B"])
@pytest.mark.parametrize("step", [Step.decode(1, 128), Step.prefill(2, 256)])
def test_experts_run_their_rows_in_whole_blocks(name: str, step: Step) -> None:
    config, chip = ModelConfig.from_hf(name), box(flops_per_s=1e11)
    parts = {op.op: op.time_s for op in predict_calibrated(config, step, chip, "float32")}
    rows = {row.op: row for row in count_step(config, step, dtype="float32", attention="dense")}
    routed = rows["experts_gate_up_proj"].flops + rows["experts_down_proj"].flops
    time = parts["experts_gate_up_proj"] + parts["experts_down_proj"]
    assert parts["experts_gate_up_proj"] == pytest.approx(2 * parts["experts_down_proj"])
    assert parts["top_k"] == parts["experts_swiglu"] == parts["combine"] == 0
    if step.phase == "decode":  # gathered: the routed rows alone
        assert time == pytest.approx(routed / 1e11)
    else:
        tokens, per_token, experts = 512, config.num_experts_per_tok, config.num_experts
        block = block_rows(tokens * per_token, experts)
        filled = block * experts * expected_blocks(tokens, per_token / experts, block) / (tokens * per_token)
        assert 1 < filled < 2
        assert time == pytest.approx(routed * filled / 1e11)
