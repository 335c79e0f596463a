"""Times of a step from a device's measured rates by shape, instead of its peaks. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, dims, size
from qwenjax.errors import InputError
from qwenjax.moe_blocks import block_rows, choose_way
from qwenjax.ops import Op, as_product, layers_of, ops_of
from roofline.count import CountRow, count_step
from roofline.hardware import Hardware

_ELEMENTWISE = {
    "input_norm": "norm",
    "post_norm": "norm",
    "final_norm": "norm",
    "qk_norm": "norm",
    "rope": "rope",
    "swiglu": "swiglu",
    "shared_swiglu": "swiglu",
    "attention_residual": "residual",
    "mlp_residual": "residual",
}
# Measured together with the products beside them.
_INCLUDED = ("softmax", "top_k", "experts_swiglu", "combine")
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class CalibratedOp:
    op: str
    time_s: float


def predict_calibrated(config: ModelConfig, step: Step, hardware: Hardware, dtype: str) -> tuple[CalibratedOp, ...]:
    """Expected time of each op of one step on a calibrated device, and of the host's dispatch, seconds.

    Matrix products take their FLOPs at the rate measured for their shape; elementwise ops their bytes at the rate of
    their kind; every op of every layer one launch. Attention counts all pairs, as the plain products run.
    """
    tables = hardware.measured
    if not tables:
        raise InputError("hardware", hardware.id, "has no measured rates", "Run `roofline calibrate` and use `here`.")
    if dtype != tables["dtype"]:  # attention and elementwise ops are measured in one dtype
        raise InputError("dtype", dtype, f"was not measured on {hardware.id}", f"Measured: {tables['dtype']}.")
    rows = {row.op: row for row in count_step(config, step, dtype=dtype, kv_dtype=dtype, attention="dense")}
    timed = [CalibratedOp(op.name, _op_time(op, rows[op.name], config, step, tables, dtype)) for op in ops_of(config)]
    return (*timed, CalibratedOp("dispatch", float(tables["dispatch_s"])))


def _op_time(op: Op, row: CountRow, config: ModelConfig, step: Step, tables: Mapping[str, Any], dtype: str) -> float:
    layers = layers_of(config, op.scope)
    if op.kind == "matmul":
        product = as_product(op.einsum)
        sizes = dims(config, step, op.block)
        rows, columns, summands = (
            float(size(letters, sizes)) for letters in (product.rows, product.columns, product.contracted)
        )
        return float(row.flops) / _product_rate(tables["products"][dtype], rows, columns, summands)
    if op.kind == "attention":
        return float(row.flops) / _attention_rate(tables["attention"], dims(config, step))
    if op.kind == "grouped":
        share = float(row.flops) / layers / _routed_flops(config, step)  # gate and up two thirds, down one
        return layers * share * _experts_s(tables["experts"], config, step)
    if op.name in _INCLUDED:
        return 0.0
    launches = layers * float(tables["launch_s"])
    rate = tables["elementwise"].get(_ELEMENTWISE.get(op.name, ""))
    return launches if rate is None else launches + float(row.activation_bytes) / rate


def _product_rate(entries: Sequence[Entry], rows: float, columns: float, summands: float) -> float:
    """FLOP/s for a product's shape: by rows within each measured matrix, the matrices weighted by nearness in shape."""
    shapes = sorted({(entry["columns"], entry["summands"]) for entry in entries})
    total = weight_sum = 0.0
    for shape in shapes:
        curve = [
            (entry["rows"], entry["flops_per_s"]) for entry in entries if (entry["columns"], entry["summands"]) == shape
        ]
        distance = math.hypot(math.log(columns / shape[0]), math.log(summands / shape[1]))
        weight = 1 / (distance + 0.05) ** 2
        total += weight * math.log(_interpolate(curve, rows))
        weight_sum += weight
    return math.exp(total / weight_sum)


def _routed_flops(config: ModelConfig, step: Step) -> float:
    """FLOPs of the routed rows of one layer."""
    return float(6 * size("BTADF", dims(config, step, "experts")))


def _experts_s(entries: Sequence[Entry], config: ModelConfig, step: Step) -> float:
    """Seconds of one layer's routed experts: the rows that run, in whole blocks, at the rate of their kind of block."""
    sizes = dims(config, step, "experts")
    tokens, per_token, experts = int(sizes["B"] * sizes["T"]), int(sizes["A"]), int(sizes["E"])
    rows, block = float(tokens * per_token), 1
    if choose_way(tokens, per_token, experts) == "grouped":
        block = block_rows(tokens * per_token, experts)
        rows = block * experts * expected_blocks(tokens, per_token / experts, block)
    curve = [(entry["rows"], entry["flops_per_s"]) for entry in entries if (entry["block"] == 1) == (block == 1)]
    blocks = [(entry["block"], entry["flops_per_s"]) for entry in entries if entry["block"] > 1]
    rate = _interpolate(curve, rows) if block == 1 else _interpolate(blocks, block)
    return 6 * rows * float(size("DF", sizes)) / rate


def expected_blocks(tokens: int, chance: float, block: int) -> float:
    """Mean of the blocks that one expert's rows start, when each token picks it with this chance (binomial)."""
    if chance >= 1:
        return float(-(-tokens // block))
    total = 0.0
    for count in range(1, tokens + 1):
        log_ways = math.lgamma(tokens + 1) - math.lgamma(count + 1) - math.lgamma(tokens - count + 1)
        log_chance = log_ways + count * math.log(chance) + (tokens - count) * math.log1p(-chance)
        total += math.exp(log_chance) * -(-count // block)
    return total


def _attention_rate(entries: Sequence[Entry], sizes: Mapping[str, Any]) -> float:
    """FLOP/s of attention: a prefill's by its tokens, a decode step's by KV heads of the batch, context and group."""
    if sizes["T"] > 1:
        return _interpolate([(e["tokens"], e["flops_per_s"]) for e in entries if e["tokens"] > 1], float(sizes["T"]))
    decodes = [entry for entry in entries if entry["tokens"] == 1]
    return _along(decodes, [("heads", sizes["B"] * sizes["K"]), ("context", sizes["S"]), ("group", sizes["G"])])


def _along(entries: Sequence[Entry], axes: Sequence[tuple[str, float]]) -> float:
    """Interpolates over a grid, one axis after another."""
    if not axes:
        return float(entries[0]["flops_per_s"])
    (name, x), *rest = axes
    levels = sorted({entry[name] for entry in entries})
    return _interpolate([(level, _along([e for e in entries if e[name] == level], rest)) for level in levels], float(x))


def _interpolate(curve: Sequence[tuple[float, float]], x: float) -> float:
    """Straight lines in log-log between measured points; level beyond the ends."""
    points = sorted(curve)
    if x <= points[0][0]:
        return points[0][1]
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            share = math.log(x / x0) / math.log(x1 / x0)
            return math.exp(math.log(y0) * (1 - share) + math.log(y1) * share)
    return points[-1][1]
