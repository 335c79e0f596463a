"""Whole steps of a model, summed from its kernel tables: measured kernels against predicted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from kernel_csv import Table

from roofline.hardware import Hardware
from roofline.timing.efficiency import Efficiency

# Times that a layer runs each kernel, and those of the whole step.
_LAYER: Final = {
    "qkv_proj": 1, "o_proj": 1, "gate_up_proj": 1, "down_proj": 1, "act_fn": 1, "layernorm": 2, "rotary_emb": 1,
}  # fmt: skip
_STEP: Final = ("embedding", "final_layernorm")
_HEAD: Final = ("lm_head", "sampler")
_KINDS: Final = ("attention decode", "attention prefill", "attention mixed")
_LAYERS: Final = 32  # of the models that are in such tables; only the weight of the head against a layer depends on it


def step_sums(tables: Sequence[Table], chip: Hardware, efficiency: Efficiency) -> dict[str, list[tuple[float, float]]]:
    """Predicted and measured seconds of every step whose kernels are all in the tables, by kind of step."""
    by_kernel = {table.kernel: table for table in tables}
    if any(name not in by_kernel for name in (*_LAYER, *_STEP, *_HEAD)):
        return {}
    seconds = {name: _by_size(by_kernel[name], chip, efficiency) for name in (*_LAYER, *_STEP, *_HEAD)}
    found = {}
    for kind in _KINDS:
        if kind in by_kernel:
            found[kind.replace("attention", "step,")] = _steps(by_kernel[kind], seconds, chip, efficiency)
    return {kind: pairs for kind, pairs in found.items() if pairs}


def _by_size(table: Table, chip: Hardware, efficiency: Efficiency) -> dict[int, Any]:
    """Predicted and measured seconds by the number of tokens or sequences."""
    predicted = table.predict_s(chip, efficiency)
    sizes = table.columns[table.size]
    return {int(n): np.array([p, m]) for n, p, m in zip(sizes, predicted, table.measured_s, strict=True)}


def _steps(
    table: Table, seconds: Mapping[str, Mapping[int, Any]], chip: Hardware, efficiency: Efficiency
) -> list[tuple[float, float]]:
    predicted, pairs = table.predict_s(chip, efficiency), []
    for index, measured in enumerate(table.measured_s):
        sequences = int(table.columns["prefills"][index] + table.columns["decodes"][index])
        tokens = int(table.columns["query_len"][index] * table.columns["prefills"][index])
        tokens += int(table.columns["decodes"][index])
        if any(tokens not in seconds[name] for name in (*_LAYER, *_STEP)):
            continue
        if any(sequences not in seconds[name] for name in _HEAD):
            continue
        layer = sum(count * seconds[name][tokens] for name, count in _LAYER.items())
        layer = layer + np.array([predicted[index], measured])
        step = layer * _LAYERS + sum(seconds[name][tokens] for name in _STEP)
        step = step + sum(seconds[name][sequences] for name in _HEAD)
        pairs.append((float(step[0]), float(step[1])))
    return pairs
