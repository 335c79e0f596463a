"""What a chip's kernels reach of its peaks: few constants, each with unit, meaning and bounds, read from TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from qwenjax.errors import InputError
from roofline.hardware import Hardware

# What is fitted on one chip serves its relatives. First by chip id, then by architecture.
_FITTED = {"a100-80gb-sxm": "a100-80gb-sxm", "h100-sxm": "h100-sxm", "rtx-4090": "rtx-4090"}
_NEAREST = {
    "Ampere": "a100-80gb-sxm",
    "Ada Lovelace": "rtx-4090",
    "Hopper": "h100-sxm",
    "Blackwell": "h100-sxm",
}


@dataclass(frozen=True)
class Efficiency:
    """Constants of one chip's kernels; fractions are of datasheet peaks, never above 1."""

    chip: str
    launch_s: float
    gemm_compute_fraction: float
    gemm_memory_fraction: float
    gemm_softness: float
    prefill_compute_fraction: float
    decode_memory_fraction: float
    moe_memory_fraction: float
    moe_compute_fraction: float
    elementwise_memory_fraction: float
    allreduce_latency_s: float
    allreduce_link_fraction: float


@cache
def _load(chip: str) -> Efficiency:
    text = (resources.files("roofline") / "data" / "efficiency" / f"{chip}.toml").read_text()
    data: dict[str, Any] = tomllib.loads(text)
    return Efficiency(chip=chip, **{name: float(entry["value"]) for name, entry in data["constants"].items()})


def load_efficiency(chip: Hardware) -> tuple[Efficiency, str]:
    """The constants that serve this chip and a sentence on where they come from, the nearest chip's if it has none."""
    if chip.id in _FITTED:
        return _load(_FITTED[chip.id]), f"kernel constants fitted on {chip.id}"
    near = _NEAREST.get(chip.architecture)
    if near is None:
        known = ", ".join(sorted(_NEAREST))
        raise InputError(
            "hardware", chip.id, f"no kernel constants for the architecture {chip.architecture}", f"Known: {known}"
        )
    return _load(near), f"kernel constants of {near}, the nearest architecture to {chip.id} with kernel measurements"
