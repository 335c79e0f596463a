"""Roofline bounds: intensity, lower bounds in time, decode ceilings, implied bandwidth.

A bound is the least time or the greatest rate that the datasheet allows; it is not a prediction of latency (S002-087).
"""

from __future__ import annotations


def arithmetic_intensity(flops: float, moved_bytes: float) -> float:
    """FLOPs for each byte moved (Williams et al. 2009)."""
    return flops / moved_bytes


def matmul_intensity(m: int, k: int, n: int, *, weight_bytes: float = 2, activation_bytes: float = 0) -> float:
    """FLOPs per byte of [m, k] @ [k, n]; by default only the weights count, which gives 2*m/b, m in bfloat16
    (S000-301).

    `activation_bytes` is the size of one element of the input and of the output, which are then read and written once.
    """
    moved = weight_bytes * k * n + activation_bytes * m * (k + n)
    return arithmetic_intensity(2 * m * k * n, moved)


def ridge_intensity(peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """Intensity at which compute and memory take the same time (Williams et al. 2009)."""
    return peak_flops_per_s / bandwidth_bytes_per_s


def bound_time_s(flops: float, moved_bytes: float, peak_flops_per_s: float, bandwidth_bytes_per_s: float) -> float:
    """Least time of a piece of work, max(flops / peak, bytes / bandwidth), seconds (Williams et al. 2009; S002-087)."""
    return max(flops / peak_flops_per_s, moved_bytes / bandwidth_bytes_per_s)


def memory_bandwidth_bytes_per_s(bus_width_bits: int, data_rate_bits_per_s: float) -> float:
    """Peak memory bandwidth of a card, bus width / 8 * data rate of a pin (S000-277)."""
    return bus_width_bits / 8 * data_rate_bits_per_s


def decode_ceiling_tokens_per_s(
    bandwidth_bytes_per_s: float, weight_bytes: float, kv_bytes_per_sequence: float = 0, batch: int = 1
) -> float:
    """Most tokens a second that memory allows in decode, B * BW / (weights + B * KV) (Pope et al. 2022; S000-278,
    S000-288).

    `weight_bytes` is what one step reads (`step_weight_bytes`, no input embedding), `kv_bytes_per_sequence` the cache
    that one sequence reads. Compute, activations and launch overheads are left out.
    """
    return batch * bandwidth_bytes_per_s / (weight_bytes + batch * kv_bytes_per_sequence)


def implied_bandwidth_bytes_per_s(tokens_per_s: float, bytes_per_step: float, batch: int = 1) -> float:
    """Bandwidth that a measured decode rate implies, steps a second * bytes a step (S000-283).

    Above what the card was measured to reach, something was counted that is not read (S000-285).
    """
    return tokens_per_s / batch * bytes_per_step


def shortfall_fraction(value: float, reference: float) -> float:
    """By how much `value` falls short of `reference`, as a share of it (S000-286)."""
    return (reference - value) / reference
