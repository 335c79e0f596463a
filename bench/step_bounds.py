"""What the compiled steps of the issue's table may be at most, on every card that is named: tests hold them to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline.gpu_compile import CompileJob
from roofline.hardware import load_hardware
from roofline.kernel_rows import count_inventory
from roofline.kernels import KernelReport

CHIPS = ("rtx-4090", "h100-sxm")


@dataclass(frozen=True)
class StepBound:
    """Bounds of one step: kernels a layer, bytes over what must move, temporaries in bytes, FLOPs over the routed ones.

    A decode step's bytes are weights and cache, a mixture's those of the expected distinct experts; a prefill's have
    every activation once beside them. None where nothing is asked.
    """

    model: str
    step: Step
    kernels_per_layer: float | None
    bytes_ratio: float | None
    temp_bytes: int | None
    flops_ratio: float | None = None

    @property
    def name(self) -> str:
        step = self.step
        return f"{self.model} {step.phase} {step.batch}x{step.query_len} of {step.kv_len}"


def _prefill(model: str, tokens: int) -> StepBound:
    widest = 2 * ModelConfig.from_hf(model).intermediate_size  # gate and up side by side
    return StepBound(model, Step.prefill(1, tokens), 12, 1.3, 3 * 2 * tokens * widest)


def _mixture(model: str) -> tuple[StepBound, ...]:
    return (
        StepBound(model, Step.decode(1, 2048), 16, 1.05, 10**6),
        StepBound(model, Step.decode(32, 2048), 20, 1.15, 16 * 10**6),
        StepBound(model, Step.prefill(1, 1024), None, None, None, flops_ratio=1.15),
    )


BOUNDS = (
    StepBound("Qwen2.5-7B", Step.decode(1, 2048), 11, 1.02, 10**6),
    StepBound("Qwen3-8B", Step.decode(1, 2048), 12, 1.02, 10**6),
    StepBound("Qwen2.5-7B", Step.decode(32, 2048), 11, 1.03, 8 * 10**6),
    _prefill("Qwen2.5-7B", 1024),
    _prefill("Qwen2.5-7B", 8192),
    *_mixture("Qwen3-30B-A3B"),
    *_mixture("Qwen2-57B-A14B"),
)


def jobs() -> Iterator[tuple[StepBound, CompileJob]]:
    """Every step for every card."""
    for bound in BOUNDS:
        config = ModelConfig.from_hf(bound.model)
        for chip in CHIPS:
            yield bound, CompileJob(config, bound.step, load_hardware(chip))


def figures(report: KernelReport) -> dict[str, float]:
    """The figures that a bound limits, by its fields' names."""
    totals, decodes = report.totals, report.job.step.phase == "decode"
    return {
        "kernels_per_layer": totals.kernels_per_layer,
        "bytes_ratio": totals.byte_ratio if decodes else totals.bytes / totals.once_bytes,
        "temp_bytes": totals.temp_bytes,
        "flops_ratio": _routed_ratio(report) if report.job.config.is_moe else totals.flops / totals.dense_flops,
    }


def _routed_ratio(report: KernelReport) -> float:
    """FLOPs of the experts' kernels over those of the rows that were routed to them."""
    needed = {row.op: row.flops for row in count_inventory(report.job) if row.op.startswith("experts_")}
    computed = sum(kernel.count * kernel.flops for kernel in report.kernels if kernel.op in needed)
    return computed / sum(needed.values())


def excesses(bound: StepBound, report: KernelReport) -> list[str]:
    """What is above its bound."""
    found = figures(report)
    limits = {name: getattr(bound, name) for name in found}
    return [f"{name} {found[name]:,.4g} > {limit:,}" for name, limit in limits.items() if limit and found[name] > limit]
