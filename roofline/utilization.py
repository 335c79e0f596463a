"""Fractions of a peak: model FLOPs utilisation and memory bandwidth utilisation, never above 1."""

from __future__ import annotations

from qwenjax.errors import InputError

_CAUSES = {
    "mfu": "the time is too short, work is counted that wasn't done (dense attention, all logits), "
    "or the peak is too low (a base clock, another dtype)",
    "mbu": "the time is too short, bytes are counted that the step doesn't read (the embedding table, experts nobody "
    "chose, a dtype wider than the run's), or the bandwidth is too low (a slower card)",
}


def compute_mfu(flops: float, time_s: float, peak_flops_per_s: float) -> float:
    """Model FLOPs utilisation: matrix-product FLOPs over what the peak could do in that time. Above 1 is refused."""
    return _fraction("mfu", flops / (time_s * peak_flops_per_s))


def compute_mbu(num_bytes: float, time_s: float, bandwidth_bytes_per_s: float) -> float:
    """Memory bandwidth utilisation: bytes that must cross over what could cross in that time. Above 1 is refused."""
    return _fraction("mbu", num_bytes / (time_s * bandwidth_bytes_per_s))


def _fraction(name: str, value: float) -> float:
    if value > 1 + 1e-9:
        raise InputError(name, round(value, 4), "is above 1, which no hardware does", f"Likely cause: {_CAUSES[name]}.")
    return min(value, 1.0)
