"""The kernels of a derivation: what each op of an engine's steps takes on the chip, before the engine's constants.

A kernel's time comes from its tiles, waves and blocks, too intricate for one formula: such a number is `computed`, and
its formula names the function of `roofline.timing` with its arguments. `kernel_functions` has them to call again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.ops import Op
from roofline.explain.bound import figure_leaf
from roofline.explain.derivation import Derivation
from roofline.hardware import Hardware
from roofline.timing import kernels
from roofline.timing.efficiency import Efficiency, load_table
from roofline.timing.step import Layout, StepFold, Steps

Arrays = dict[str, Any]


class Recorder(StepFold):
    """A step's fold that keeps each op's part of it apart."""

    def __init__(self, config: ModelConfig, steps: Steps, layout: Layout, chip: Hardware, eff: Efficiency) -> None:
        super().__init__(config, steps, layout, chip, eff)
        self.pieces: dict[str, tuple[Arrays, Arrays]] = {}

    def noted(self, name: str, fold: Callable[[], None]) -> None:
        before, floor = self.values, self.least
        self.values = {kind: self.zero.copy() for kind in before}
        self.least = {kind: self.zero.copy() for kind in floor}
        fold()
        self.pieces[name] = self.values, self.least
        self.values = {kind: before[kind] + self.values[kind] for kind in before}
        self.least = {kind: floor[kind] + self.least[kind] for kind in floor}

    def product(self, op: Op) -> None:
        self.noted(op.name, lambda: StepFold.product(self, op))

    def elementwise(self, op: Op) -> None:
        self.noted(op.name, lambda: StepFold.elementwise(self, op))

    def attention(self) -> None:
        self.noted("attention", lambda: StepFold.attention(self))

    def experts(self) -> None:
        self.noted("experts", lambda: StepFold.experts(self))

    def collectives(self) -> None:
        self.noted("collectives", lambda: StepFold.collectives(self))


def kernel_functions(chip: Hardware, eff: Efficiency) -> dict[str, Callable[..., Any]]:
    """The functions that computed nodes name, for this chip; sizes in, seconds of one call out."""
    own: dict[str, Any] = {"chip": chip, "eff": eff}
    functions: dict[str, Callable[..., Any]] = {
        f"gemm_{dtype}{suffix}_s": lambda m, n, k, bits, dtype=dtype, apart=bool(suffix): kernels.gemm_s(
            m, n, k, weight_bits=bits, dtype=dtype, rows_apart=apart, **own
        )
        for dtype in chip.peak_flops_per_s
        for suffix in ("", "_rows_apart")
    }

    def attention_decode_s(batch: Any, context: Any, heads: Any, kv_heads: Any, width: Any, kv_bytes: Any) -> Any:
        return kernels.attention_decode_s(batch, context, heads, kv_heads, width, kv_bytes=kv_bytes, **own)

    def attention_prefill_s(
        prompts: Any, chunk: Any, reached: Any, heads: Any, kv_heads: Any, width: Any, kv_bytes: Any
    ) -> Any:
        sizes = (prompts, chunk, reached, heads, kv_heads, width)
        return kernels.attention_prefill_s(*sizes, kv_bytes=kv_bytes, **own)

    def moe_s(
        tokens: Any, hidden: Any, width: Any, per_token: Any, experts: Any, distinct: Any, bits: Any, rows: Any
    ) -> Any:
        return kernels.moe_s(tokens, hidden, width, per_token, experts, distinct, weight_bits=bits, rows=rows, **own)

    return functions | {
        "attention_decode_s": attention_decode_s,
        "attention_prefill_s": attention_prefill_s,
        "moe_s": moe_s,
        "elementwise_s": lambda num_bytes: kernels.elementwise_s(num_bytes, **own),
        "allreduce_s": lambda num_bytes, devices: kernels.allreduce_s(num_bytes, int(devices), **own),
    }


class Constants:
    """The chip's figures and kernel constants as leaves, added where a kernel reads them."""

    def __init__(self, nodes: Derivation, chip: Hardware, eff: Efficiency) -> None:
        self.nodes, self.chip, self.eff = nodes, chip, eff

    def of(self, group: str, only: str = "") -> list[str]:
        """Names of what a group of kernels reads; `only` keeps the constants that start so."""
        owner = dict(self.eff.sources).get(group, "")
        nearest = "" if owner == self.chip.id else f", {owner}: the nearest chip that has some"
        where = _fitted_on(owner, group) + nearest
        names = [
            figure_leaf(self.nodes, self.chip, name) for name in ("sm_count", "l2_bytes") if self.chip.number(name)
        ]
        values = getattr(self.eff, group)
        for field in dataclasses.fields(values):
            value, name = getattr(values, field.name), f"kernel.{group}.{field.name}"
            if isinstance(value, bool) or not field.name.startswith(only):
                continue
            if "meaning" in field.metadata:
                source = f"{field.metadata['meaning']}; {where}"
                names.append(self.nodes.leaf(name, value, field.metadata["unit"], "fitted", source))
            else:
                names.append(self.nodes.leaf(name, value, "count", "exact", f"how the kernel is built; {where}"))
        return names


def _fitted_on(owner: str, group: str) -> str:
    """Where a group's measurements come from, and how many they are."""
    table = load_table(owner).get(group, {})
    rows = table.get("own_rows", {}).get("rows")
    source = str(table.get("source", f"kernels measured on {owner}"))
    return source + (f", {rows:,} rows" if rows else "")
