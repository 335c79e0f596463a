"""Kernel times: never below the roof, alike for numbers and arrays; constants within bounds, their origin told."""

from __future__ import annotations

import copy
import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwenjax.errors import InputError
from roofline.hardware import Hardware, known_ids, list_hardware, load_hardware
from roofline.timing import attention, efficiency
from roofline.timing.arrays import ceil_div, choose, least, most, soft_most
from roofline.timing.efficiency import FITTED, GROUPS, load_efficiency, load_group, load_interval, load_table
from roofline.timing.kernels import (
    allreduce_s,
    attention_decode_s,
    attention_mixed_s,
    attention_prefill_s,
    elementwise_s,
    gemm_s,
    kv_write_s,
    moe_s,
    peak_flops_per_s,
    sampler_s,
)

CHIPS = st.sampled_from(known_ids())
SIZE = st.integers(1, 20_000)
HEADS = st.sampled_from([(1, 1), (8, 1), (28, 4), (32, 8), (64, 8), (40, 40)])


def parts(chip: str) -> dict[str, Any]:
    hardware = load_hardware(chip)
    return {"chip": hardware, "eff": load_efficiency(hardware)[0]}


def at_least(seconds: float, floor: float) -> bool:
    return math.isfinite(seconds) and seconds >= floor * (1 - 1e-12)


@settings(deadline=None, max_examples=60)
@given(CHIPS, SIZE, SIZE, SIZE, st.sampled_from([16.0, 8.0, 4.25]))
def test_a_product_takes_no_less_than_the_roof(chip: str, m: int, n: int, k: int, bits: float) -> None:
    on = parts(chip)
    hardware: Hardware = on["chip"]
    seconds = gemm_s(m, n, k, weight_bits=bits, **on)
    assert at_least(seconds, 2 * m * n * k / peak_flops_per_s(hardware))
    assert at_least(seconds, n * k * bits / 8 / hardware.peak_bandwidth_bytes_per_s)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from([h.id for h in list_hardware() if "float8_e4m3fn" in h.peak_flops_per_s]), SIZE, SIZE, SIZE)
def test_a_float8_product_takes_no_less_than_the_roof(chip: str, m: int, n: int, k: int) -> None:
    on = parts(chip)
    hardware: Hardware = on["chip"]
    seconds = gemm_s(m, n, k, weight_bits=8, dtype="float8_e4m3fn", **on)
    assert at_least(seconds, 2 * m * n * k / hardware.flops_per_s("float8_e4m3fn"))
    assert at_least(seconds, n * k / hardware.peak_bandwidth_bytes_per_s)


@settings(deadline=None, max_examples=60)
@given(CHIPS, st.integers(0, 8), st.integers(1, 9000), st.integers(0, 9000), st.integers(0, 300), SIZE, HEADS)
def test_attention_takes_no_less_than_the_roof(
    chip: str, prompts: int, new: int, prior: int, decodes: int, context: int, heads: tuple[int, int]
) -> None:
    on = parts(chip)
    hardware: Hardware = on["chip"]
    seconds = attention_mixed_s(prompts, new, prior + new, decodes, context, *heads, 128, **on)
    rows = prompts * (prior + new) + decodes * context
    pairs = prompts * (new * (prior + new) - new * (new - 1) / 2) + decodes * context
    assert at_least(seconds, 4 * heads[0] * 128 * pairs / peak_flops_per_s(hardware))
    assert at_least(seconds, rows * heads[1] * 128 * 4 / hardware.peak_bandwidth_bytes_per_s)


@settings(deadline=None, max_examples=40)
@given(CHIPS, SIZE, st.sampled_from([(2048, 768, 8, 128), (4096, 14336, 2, 8)]), st.floats(0.02, 1))
def test_experts_take_no_less_than_the_roof(
    chip: str, tokens: int, model: tuple[int, int, int, int], share: float
) -> None:
    on = parts(chip)
    hardware: Hardware = on["chip"]
    hidden, width, per_token, experts = model
    distinct = max(per_token, share * min(experts, tokens * per_token))
    seconds = moe_s(tokens, hidden, width, per_token, experts, distinct, **on)
    assert at_least(seconds, 6 * tokens * per_token * hidden * width / peak_flops_per_s(hardware))
    assert at_least(seconds, 3 * distinct * hidden * width * 2 / hardware.peak_bandwidth_bytes_per_s)


@settings(deadline=None, max_examples=40)
@given(CHIPS, st.floats(1, 1e10), st.sampled_from([2, 4, 8]))
def test_a_collective_takes_no_less_than_its_link(chip: str, num_bytes: float, devices: int) -> None:
    on = parts(chip)
    link = on["chip"].peer_link
    ring = 0.0 if link is None else 2 * (devices - 1) / devices * num_bytes / link.one_way_bytes_per_s
    assert at_least(allreduce_s(num_bytes, devices, **on), ring)
    assert allreduce_s(num_bytes, 1, **on) == 0


@pytest.mark.parametrize("chip", known_ids())
def test_arrays_give_what_numbers_give(chip: str) -> None:
    on = parts(chip)
    m = np.array([1.0, 5.0, 17.0, 300.0, 4096.0])
    calls: dict[str, Callable[[Any], Any]] = {
        "gemm": lambda x: gemm_s(x, 3584.0, 1000.0, **on),
        "prefill": lambda x: attention_prefill_s(2.0, x, x + 100, 28.0, 4.0, 128.0, **on),
        "decode": lambda x: attention_decode_s(x, x * 3, 28.0, 4.0, 128.0, **on),
        "mixed": lambda x: attention_mixed_s((x > 5) * 1.0, x, x * 2, x - 1, x + 9, 28.0, 4.0, 128.0, **on),
        "moe": lambda x: moe_s(x, 2048.0, 768.0, 8.0, 128.0, 100.0, **on),
        "allreduce": lambda x: allreduce_s(x * 1e4, 4, **on),
        "elementwise": lambda x: elementwise_s(x * 1e4, kind="act", **on),
        "rope": lambda x: elementwise_s(x * 2e4, kind="rope", blocks=x, **on),
        "sampler": lambda x: sampler_s(x, 151936.0, **on),
        "kv_write": lambda x: kv_write_s(x, 4.0, 128.0, **on),
    }
    for name, call in calls.items():
        assert call(m) == pytest.approx([call(float(x)) for x in m], rel=1e-12), name


def test_a_kernel_of_whole_blocks_takes_as_long_as_its_fullest_sm() -> None:
    on = parts("rtx-4090")
    sms = load_hardware("rtx-4090").sm_count
    assert sms is not None

    def rope(tokens: int) -> float:
        return float(elementwise_s(tokens * 2e4, kind="rope", blocks=tokens, **on))

    assert rope(1) == pytest.approx(rope(sms), rel=1e-12)
    assert rope(sms) < rope(sms + 1) == pytest.approx(rope(2 * sms), rel=1e-12)
    bytes_alone = elementwise_s(3 * sms * 2e4, kind="rope", **on)  # nothing is left over where blocks fill all SMs
    assert rope(3 * sms) == pytest.approx(float(bytes_alone), rel=1e-12)


def test_numbers_need_no_numpy() -> None:
    code = (
        "import sys; from roofline.hardware import load_hardware; from roofline.timing.kernels import *;"
        "from roofline.timing.efficiency import load_efficiency; chip = load_hardware('a100-80gb-sxm');"
        "eff = load_efficiency(chip)[0]; print(gemm_s(4, 4096, 4096, chip=chip, eff=eff) > 0,"
        "attention_decode_s(4, 900, 32, 8, 128, chip=chip, eff=eff) > 0, 'numpy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True", "False"]


@pytest.mark.parametrize("chip", FITTED)
def test_every_fitted_constant_is_within_its_bounds_and_says_what_it_is(chip: str) -> None:
    for group in GROUPS:
        table = load_table(chip).get(group)
        if table is None:
            continue
        assert dataclasses.is_dataclass(load_group(chip, group))
        assert table["source"]
        assert table["held_out_halves"]["rows"] == table["own_rows"]["rows"] > 0
        assert table["interval"]["low"] < 1 < table["interval"]["high"]
        for field in dataclasses.fields(GROUPS[group]):
            if "low" in field.metadata:
                entry = table["constants"][field.name]
                assert {"value", "unit", "low", "high", "meaning"} == set(entry)
                assert (entry["unit"], entry["meaning"]) == (field.metadata["unit"], field.metadata["meaning"])
                assert field.metadata["high"] <= 1 or not field.name.endswith("_fraction")


def test_a_chip_with_its_own_measurements_uses_them() -> None:
    sources = dict(load_efficiency(load_hardware("h100-sxm"))[0].sources)
    assert {group for group, chip in sources.items() if chip == "h100-sxm"} == set(GROUPS) - {"elementwise"}
    assert dict(load_efficiency(load_hardware("rtx-pro-6000"))[0].sources)["moe"] == "rtx-pro-6000"


def test_a_chip_without_measurements_says_whose_it_uses() -> None:
    told = load_efficiency(load_hardware("rtx-3090"))[1]
    assert told == (
        "kernel constants for rtx-3090: gemm, attention, elementwise from rtx-4090, the nearest with such "
        "measurements; float8_gemm from h100-sxm, the nearest with such measurements; moe from rtx-pro-6000, the "
        "nearest with such measurements; allreduce from a100-80gb-sxm, the nearest with such measurements"
    )


@pytest.mark.parametrize(
    ("chip", "nearest"),
    [
        ("a10", "a40"),
        ("rtx-3090", "rtx-4090"),
        ("a100-40gb-sxm", "a100-80gb-sxm"),
        ("l4", "rtx-4090"),
        ("l40s", "rtx-4090"),
        ("h200", "h100-sxm"),
        ("h20", "h100-sxm"),
        ("b200", "h100-sxm"),
        ("rtx-5090", "rtx-4090"),
        ("v100-32gb-sxm", "a100-80gb-sxm"),
        ("mi300x", "h100-sxm"),
    ],
)
def test_the_nearest_chip_is_of_the_same_kind(chip: str, nearest: str) -> None:
    assert dict(load_efficiency(load_hardware(chip))[0].sources)["gemm"] == nearest


def test_the_interval_is_wider_on_another_chip() -> None:
    low, high = load_interval("rtx-4090", "gemm", "rtx-4090")
    assert load_interval("rtx-4090", "gemm", "l40s") == pytest.approx((low * low, high * high))


def changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    table = copy.deepcopy(dict(load_table("rtx-4090")))
    change(table["gemm"]["constants"])
    monkeypatch.setattr(efficiency, "load_table", lambda chip: table)


def test_a_constant_out_of_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda constants: constants["memory_fraction"].update(value=1.2))
    with pytest.raises(InputError) as caught:
        load_group("rtx-4090", "gemm")
    assert str(caught.value) == "gemm.memory_fraction = 1.2: must be from 0.4 to 1. Run bench/fit_kernels.py again"


def test_a_missing_constant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, lambda constants: constants.pop("launch_s"))
    with pytest.raises(InputError) as caught:
        load_group("rtx-4090", "gemm")
    assert str(caught.value) == "gemm.launch_s: is missing. Run bench/fit_kernels.py again"


def test_a_workstation_card_is_not_taken_for_a_geforce_one() -> None:
    sources = {chip: dict(load_efficiency(load_hardware(chip))[0].sources) for chip in ("a6000", "rtx-3090-ti")}
    assert [sources[chip]["gemm"] for chip in sources] == ["a40", "rtx-4090"]
    assert [sources[chip]["attention"] for chip in sources] == ["rtx-4090", "rtx-4090"]


def test_experts_with_packed_weights_gain_less_than_their_bytes() -> None:
    on = parts("h100-sxm")
    shape = (512, 2048, 768, 8, 128, 128)
    assert moe_s(*shape, weight_bits=4.25, **on) > moe_s(*shape, weight_bits=8, **on)


def test_only_what_is_asked_to_be_resident_comes_from_l2() -> None:
    on = parts("h100-sxm")
    fits, outgrows = (16, 500, 32, 8, 128), (256, 4000, 32, 8, 128)
    assert attention_decode_s(*fits, resident=True, **on) < 0.9 * attention_decode_s(*fits, **on)
    assert attention_decode_s(*outgrows, resident=True, **on) == pytest.approx(
        attention_decode_s(*outgrows, **on), 0.01
    )


def test_narrow_weights_are_read_faster_and_large_products_are_not() -> None:
    on = parts("rtx-4090")
    wide, narrow = (gemm_s(1, 14336, 4096, weight_bits=bits, **on) for bits in (16.0, 4.25))
    assert 3 < wide / narrow < 16 / 4.25
    wide, narrow = (gemm_s(8192, 14336, 4096, weight_bits=bits, **on) for bits in (16.0, 4.25))
    assert narrow == pytest.approx(wide, rel=0.02)


def test_a_prompt_beside_decodes_costs_version_2_the_sharing_of_keys() -> None:
    on = parts("rtx-4090")
    alone = attention_decode_s(128, 8000, 32, 8, 128, **on)
    beside = attention_mixed_s(1, 16, 16, 128, 8000, 32, 8, 128, **on)
    assert 3 < beside / alone < 5  # each of the four query heads of a KV head reads the keys for itself


def test_long_contexts_of_few_sequences_are_split() -> None:
    on = parts("h100-sxm")
    one, sixteen = (attention_decode_s(batch, 131072, 8, 1, 128, **on) for batch in (1, 16))
    assert sixteen / one > 6  # nearly linear: one sequence has all SMs at work already


def splits_of_version_2(thread_blocks: int, key_blocks: int, slots: int) -> int:
    """The rule as the kernel's authors describe it: fewest parts that fill the slots to 85 % of the best fill."""
    if thread_blocks >= 0.8 * slots:
        return 1
    fills = {}
    for count in range(1, min(128, slots, key_blocks) + 1):
        if count == 1 or math.ceil(key_blocks / count) != math.ceil(key_blocks / (count - 1)):
            waves = thread_blocks * count / slots
            fills[count] = waves / math.ceil(waves)
    return min(count for count, fill in fills.items() if fill >= 0.85 * max(fills.values()))


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 400), st.integers(1, 1024), st.sampled_from([82, 108, 128]))
def test_keys_are_split_by_the_rule_of_version_2(thread_blocks: int, key_blocks: int, sms: int) -> None:
    expected = splits_of_version_2(thread_blocks, key_blocks, 2 * sms)
    assert attention._parts(float(thread_blocks), float(key_blocks), sms, by_load=False) == expected


def test_version_3_splits_by_the_load_of_an_sm() -> None:
    assert attention._parts(8.0, 1024.0, 132, by_load=True) == 15  # 69 key blocks each
    assert attention._parts(2000.0, 64.0, 132, by_load=True) == 1


def test_more_devices_take_longer_over_the_same_link() -> None:
    on = parts("a100-80gb-sxm")
    small = [allreduce_s(16384, devices, **on) for devices in (2, 4, 8)]
    assert small == sorted(small)
    assert allreduce_s(16384, 2, eager=True, **on) > 4 * small[0]
    l4 = parts("l4")
    assert allreduce_s(16384, 4, **l4) > 2 * allreduce_s(16384, 2, **l4)  # above two cards over PCIe only the library
    long, rate = allreduce_s(64 << 20, 2, **l4), l4["chip"].peer_link.one_way_bytes_per_s
    assert long > 2 * (64 << 20) / rate  # written to the host's memory, then read from there


def test_numbers_and_arrays_share_the_small_operations() -> None:
    a, b = np.array([1.0, 7.0]), np.array([2.0, 3.0])
    assert list(ceil_div(a, b)) == [1, 3]
    assert list(most(a, b)) == [2, 7]
    assert list(least(a, b)) == [1, 3]
    assert list(choose(a > b, a, b)) == [2, 7]
    assert soft_most(3.0, 4.0, 2.0) == pytest.approx(5)
    assert soft_most(0.0, 4.0, 2.0) == 4


@pytest.mark.parametrize("rows", [1.0, 64.0, 512.0, 4096.0])
def test_products_in_float4_beat_those_in_float8(rows: float) -> None:
    """Operands are half as wide, for the memory, the tiles' loads and the quantising kernel."""
    chip = load_hardware("rtx-5090")
    narrow, wide = (
        gemm_s(rows, 8192, 4096, chip=chip, eff=load_efficiency(chip)[0], weight_bits=bits, dtype=dtype)
        for bits, dtype in ((4.5, "float4_e2m1fn"), (8.0, "float8_e4m3fn"))
    )
    assert narrow < wide


def test_one_row_without_tensor_cores_waits_for_each_sms_loads() -> None:
    """108 SMs of 10 GB/s load half of what an A100's memory could give them; more rows of 16 bits take tensor cores."""
    chip = load_hardware("a100-80gb-sxm")
    eff = load_efficiency(chip)[0]

    def seconds(m: int, bits: float, apart: bool) -> float:
        return float(gemm_s(m, 4096, 4096, chip=chip, eff=eff, weight_bits=bits, rows_apart=apart))

    assert seconds(1, 16, True) == pytest.approx(4096 * 4096 * 2 / (108 * 1e10))
    assert seconds(1, 16, True) > 1.1 * seconds(1, 16, False)
    assert seconds(2, 16, True) == seconds(2, 16, False)
    assert seconds(1, 4.5, True) >= 4096 * 4096 * 4.5 / 8 / (108 * 1e10)
