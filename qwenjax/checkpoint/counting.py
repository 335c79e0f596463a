"""How many weights a checkpoint's files hold: packed ones by their bits, what only serves to unpack them apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from qwenjax.checkpoint.layout import HEAD_KEY
from qwenjax.checkpoint.shards import BITS, StoredTensor
from qwenjax.quantization import INTEGER_BITS

# How the keys of scales, zero points and group orders end, by the tools that write them.
_APART = (
    ".qzeros", ".scales", ".g_idx",  # GPTQ, AWQ
    "_scale_inv",  # FP8 in blocks
    ".weight_scale", ".weight_scale_2", ".input_scale", ".k_scale", ".v_scale",  # modelopt
    ".weight_global_scale", ".input_global_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape",
    ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".bitsandbytes__nf4", ".bitsandbytes__fp4", ".SCB",
)  # fmt: skip
_PACKED_INTEGERS = (".qweight", ".weight_packed")
# Signs beside a `weight` of bytes that each byte holds two 4-bit weights.
_PACKED_BYTES = (".weight_scale_2", ".weight.absmax")


@dataclass(frozen=True)
class StoredTotals:
    """What the files hold: weights are elements after unpacking; scales, zero points and group orders are apart."""

    num_tensors: int
    num_bytes: int
    num_weights: int
    num_quantization_values: int
    lm_head_stored: bool
    unknown_width: tuple[str, ...]  # packed tensors that nothing says the width of; their weights aren't counted


def count_tensors(stored: Mapping[str, StoredTensor], bits: int | None = None) -> StoredTotals:
    """Counts the weights of stored tensors from their headers, each by its own dtype and neighbours.

    bits: of one packed weight by the config's word, for tensors whose neighbours don't tell.
    """
    weights = apart = 0
    unknown = []
    for key, tensor in stored.items():
        if key.endswith(_APART):
            apart += prod(tensor.shape)
            continue
        per_element = _weights_per_element(key, stored, bits)
        if per_element is None:
            unknown.append(key)
            continue
        container, width = per_element
        weights += prod(tensor.shape) * container // width
    num_bytes = sum(prod(tensor.shape) * BITS.get(tensor.dtype, 0) // 8 for tensor in stored.values())
    head = any(key.removeprefix("model.") == HEAD_KEY for key in stored)
    return StoredTotals(len(stored), num_bytes, weights, apart, head, tuple(unknown))


def _weights_per_element(key: str, stored: Mapping[str, StoredTensor], bits: int | None) -> tuple[int, int] | None:
    """Bits of an element and of a weight in it, (1, 1) for plain tensors; None where the width isn't known."""
    tensor = stored[key]
    if key.endswith(_PACKED_INTEGERS):
        container = BITS.get(tensor.dtype, 0)
        name = key.rpartition(".")[0]
        width = 4 if key.endswith(".weight_packed") and tensor.dtype == "U8" else _width(name, stored, bits)
        return (container, width) if container and width else None
    packed_bytes = tensor.dtype == "U8" and any(key.removesuffix(".weight") + mark in stored for mark in _PACKED_BYTES)
    return (8, 4) if packed_bytes else (1, 1)


def _width(name: str, stored: Mapping[str, StoredTensor], bits: int | None) -> int | None:
    """Bits of a packed weight as its neighbours have it, or what the config states where they don't tell.

    GPTQ packs inputs, and its group order has an entry for each. Zero points are packed along the outputs, of which
    scales have one each; the last integer of a row may be filled in part.
    """
    packed, zeros, scales, order = (stored.get(f"{name}.{part}") for part in ("qweight", "qzeros", "scales", "g_idx"))
    if packed and order and packed.shape and prod(order.shape):
        width = packed.shape[0] * BITS.get(packed.dtype, 0) / prod(order.shape)
        if width in INTEGER_BITS:
            return int(width)
    if zeros and scales and len(zeros.shape) == len(scales.shape) == 2:
        container, (_, columns), (_, outputs) = BITS.get(zeros.dtype, 1), zeros.shape, scales.shape
        fitting = [width for width in INTEGER_BITS if -(-outputs * width // container) == columns]
        if fitting and bits not in fitting:
            return fitting[0] if len(fitting) == 1 else None
    return bits
