"""A chip as the compiler is told of it: the figures of its file, and which chips it can be told of."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from qwenjax.errors import InputError
from roofline.gpu_target import check_target, target_config, target_ids
from roofline.hardware import list_hardware, load_hardware

NAMED = ("rtx-4090", "rtx-3090", "l4", "l40s", "a100-40gb-sxm", "a100-80gb-sxm", "h100-sxm", "h200", "b200")


def fields(chip: str, **changes: int) -> dict[str, str]:
    text = target_config(load_hardware(chip), **changes)
    return dict(re.findall(r'(\w+): ("[^"]*"|[\w.]+)', text))


def test_an_rtx_4090_is_told_with_the_values_that_were_seen_working() -> None:
    found = fields("rtx-4090")
    assert {name: float(found[name]) for name in ("core_count", "fpus_per_core", "threads_per_core_limit")} == {
        "core_count": 128,
        "fpus_per_core": 128,
        "threads_per_core_limit": 1536,
    }
    assert (found["memory_bandwidth"], found["l2_cache_size"]) == ("1008000000000", "75497472")
    assert (found["shared_memory_per_core"], found["shared_memory_per_block_optin"]) == ("102400", "101376")
    assert (found["clock_rate_ghz"], found["device_memory_size"]) == ("2.52", "25254407700")
    assert "cuda_compute_capability { major: 8 minor: 9 }" in target_config(load_hardware("rtx-4090"))


@pytest.mark.parametrize("chip", target_ids())
def test_every_known_chip_gives_a_whole_text(chip: str) -> None:
    hardware = load_hardware(chip)
    found = fields(chip)
    assert int(found["device_memory_size"]) == hardware.usable_memory_bytes
    assert int(found["core_count"]) == hardware.sm_count
    assert int(found["shared_memory_per_block_optin"]) <= int(found["shared_memory_per_core"])
    assert float(found["clock_rate_ghz"]) == pytest.approx((hardware.boost_clock_hz or 0) / 1e9)
    assert found["platform_name"] == '"CUDA"'
    assert target_config(hardware).count("{") == target_config(hardware).count("}")
    assert ("ACCELERATED_FEATURES" in target_config(hardware)) == (int(hardware.compute_capability.split(".")[0]) >= 9)


def test_memory_and_cudnn_can_be_told_apart_from_the_card() -> None:
    assert fields("l4", memory_bytes=10**12)["device_memory_size"] == str(10**12)
    assert "dnn_version_info { major: 9 minor: 28 }" in target_config(load_hardware("l4"), dnn_version="9.28")


def test_the_named_gpus_are_known_and_no_other_vendors() -> None:
    assert set(NAMED) <= set(target_ids())
    vendors = {chip.vendor for chip in list_hardware() if chip.id in target_ids()}
    assert vendors == {"NVIDIA"}


@pytest.mark.parametrize(
    ("chip", "problem"),
    [
        ("mi300x", "is a chip of AMD, and the compiler here is XLA's for CUDA"),
        ("v100-16gb-sxm", "has compute capability 7.0, older than CUDA 13 compiles for"),
        ("h100-nvl", "lacks l2_bytes, boost_clock_hz, which the compiler asks for"),
    ],
)
def test_a_chip_that_cannot_be_compiled_for_is_refused_with_the_known(chip: str, problem: str) -> None:
    with pytest.raises(InputError) as refused:
        target_config(load_hardware(chip))
    known = ", ".join(target_ids())
    assert (
        str(refused.value) == f"--hardware = '{chip}': {problem}. Known: {known}; or give a TOML file with its figures."
    )


def test_a_capability_that_is_none_is_told() -> None:
    with pytest.raises(InputError, match=r"has the compute capability '', not one such as 8\.9"):
        check_target(replace(load_hardware("l4"), compute_capability=""))
