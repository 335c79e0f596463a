"""Expected seconds of one kernel: compute with tiles and waves, memory with L2, launch, and a smooth maximum of them.

Sizes may be numpy arrays. No time is below the roofline's: FLOPs at peak rate, bytes at peak bandwidth.
"""

from __future__ import annotations

from typing import Any

from roofline.hardware import Hardware
from roofline.timing.efficiency import Efficiency

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64), (32, 64), (16, 64))


def _ceil(a: Any, b: Any) -> Any:
    return -(-a // b)


def _pick(name: str, a: Any, b: Any) -> Any:
    if hasattr(a, "shape") or hasattr(b, "shape"):
        import numpy as np

        return getattr(np, name)(a, b)
    return max(a, b) if name == "maximum" else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return _pick("maximum", a, b)


def _least(a: Any, b: Any) -> Any:
    return _pick("minimum", a, b)


def _soft_max(a: Any, b: Any, power: float) -> Any:
    top = _most(a, b)
    return top * (1 + (_least(a, b) / top) ** power) ** (1 / power)


def gemm_s(
    m: Any,
    n: Any,
    k: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    weight_bits: float = 16.0,
    dtype: str = "bfloat16",
    resident: bool = False,
) -> Any:
    """Seconds of [m, k] x [k, n]; weight_bits as stored, dtype of the product.

    resident: the weights are already in L2, as in a benchmark that repeats one call.
    """
    peak = chip.flops_per_s(dtype)
    sms = chip.sm_count or 100
    act_bytes = 1.0 if "8" in dtype and "16" not in dtype else 2.0
    num_bytes = n * k * weight_bits / 8 + (m * k) * act_bytes + m * n * 2
    compute: Any = None
    for tile_m, tile_n in _TILES:
        waves = _ceil(_ceil(m, tile_m) * _ceil(n, tile_n), sms)
        share = min(1.0, (tile_m * tile_n / (128 * 128)) ** 0.5)
        this = waves * (2.0 * tile_m * tile_n * k) * sms / (peak * eff.gemm_compute_fraction * share)
        compute = this if compute is None else _least(compute, this)
    compute = _most(_least(compute, 2.0 * m * n * k / (peak * 0.3)), 2.0 * m * n * k / (peak * eff.gemm_compute_fraction))
    memory = num_bytes / (chip.peak_bandwidth_bytes_per_s * eff.gemm_memory_fraction)
    return eff.launch_s + _soft_max(compute, memory, eff.gemm_softness)


def attention_prefill_s(
    batch: Any,
    query_len: Any,
    kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kv_bytes: float = 2.0,
) -> Any:
    """Seconds of causal attention of query_len new tokens that end a context of kv_len, for each of batch sequences."""
    pairs = query_len * kv_len - query_len * (query_len - 1) / 2
    flops = 4.0 * batch * heads * head_dim * pairs
    num_bytes = batch * head_dim * (2 * kv_heads * kv_len * kv_bytes + 2 * heads * query_len * 2)
    compute = flops / (chip.flops_per_s("bfloat16") * eff.prefill_compute_fraction)
    memory = num_bytes / (chip.peak_bandwidth_bytes_per_s * eff.decode_memory_fraction)
    return 2 * eff.launch_s + _soft_max(compute, memory, eff.gemm_softness)


def attention_decode_s(
    batch: Any,
    kv_len: Any,
    heads: Any,
    kv_heads: Any,
    head_dim: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    kv_bytes: float = 2.0,
) -> Any:
    """Seconds of attention of one new token of each of batch sequences over kv_len positions."""
    num_bytes = batch * head_dim * (2 * kv_heads * kv_len * kv_bytes + 2 * heads * 2)
    memory = num_bytes / (chip.peak_bandwidth_bytes_per_s * eff.decode_memory_fraction)
    compute = 4.0 * batch * heads * head_dim * kv_len / (chip.flops_per_s("bfloat16") * 0.3)
    return 2 * eff.launch_s + _soft_max(compute, memory, eff.gemm_softness)


def moe_s(
    tokens: Any,
    hidden: Any,
    width: Any,
    per_token: Any,
    experts: Any,
    distinct: Any,
    *,
    chip: Hardware,
    eff: Efficiency,
    weight_bits: float = 16.0,
) -> Any:
    """Seconds of the routed experts of one layer (gate and up, then down): distinct experts' weights are read once."""
    rows = tokens * per_token
    flops = 6.0 * rows * hidden * width
    num_bytes = 3.0 * distinct * hidden * width * weight_bits / 8 + rows * (2 * hidden + 3 * width) * 2
    compute = flops / (chip.flops_per_s("bfloat16") * eff.moe_compute_fraction)
    memory = num_bytes / (chip.peak_bandwidth_bytes_per_s * eff.moe_memory_fraction)
    return 6 * eff.launch_s + _soft_max(compute, memory, eff.gemm_softness)


def allreduce_s(num_bytes: Any, devices: int, *, chip: Hardware, eff: Efficiency) -> Any:
    """Seconds of an all-reduce of num_bytes on each of the devices over the chip's peer link."""
    link = chip.peer_link
    if devices == 1 or link is None:
        return 0.0 * num_bytes
    sent = 2 * (devices - 1) / devices * num_bytes
    return eff.allreduce_latency_s + sent / (link.one_way_bytes_per_s * eff.allreduce_link_fraction)


def elementwise_s(num_bytes: Any, *, chip: Hardware, eff: Efficiency) -> Any:
    """Seconds of a kernel that reads and writes num_bytes in all and computes little."""
    return eff.launch_s + num_bytes / (chip.peak_bandwidth_bytes_per_s * eff.elementwise_memory_fraction)
