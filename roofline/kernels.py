"""A step compiled for a chip that need not be there: its kernels, and what they add up to beside the inventory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.moe_blocks import choose_way, num_blocks
from roofline.count import dtype_bits, sum_rows
from roofline.gpu_compile import Compiled, CompileJob, check_job, compile_steps
from roofline.hardware import Hardware, load_hardware
from roofline.hlo import parse_hlo
from roofline.kernel_rows import Kernel, count_conditions, count_inventory, read_kernels
from roofline.predict import StepTime, predict_step
from roofline.waterfall import Waterfall, program_terms, step_waterfall


@dataclass(frozen=True)
class KernelTotals:
    """Sums over the kernels of one device, every run counted, beside what the inventory says that the step needs.

    kernels_per_layer counts kernels that run inside a layer's function, over the layers. ideal_bytes are weights and
    cache, a mixture of experts reading the expected number of distinct experts once; routed_ideal_bytes takes them as
    the model's way through the experts reads them: once by its own kernels, by the plain ways once for each token's
    choice, or for each block of rows. once_bytes adds to ideal_bytes what every op reads and writes of activations,
    attention taken as one op. masked_flops are those of dense_flops that the mask throws away.
    """

    num_kernels: int
    kernels_per_layer: float
    flops: int
    dense_flops: int  # the inventory's, attention over the whole square as plain products compute it
    masked_flops: int
    bytes: int
    ideal_bytes: float
    byte_ratio: float
    routed_ideal_bytes: float
    once_bytes: float
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    peak_bytes: int
    capacity_bytes: int
    fits: bool
    compile_s: float
    predicted_s: float
    bound_s: float
    conditional_runs: int
    rematerialised: int


@dataclass(frozen=True)
class KernelReport:
    """A compiled step: its kernels in the order in which they run, their totals, and the compiler's own text."""

    job: CompileJob
    compiled: Compiled
    kernels: tuple[Kernel, ...]
    totals: KernelTotals


def compile_kernels(
    config: ModelConfig, step: Step, hardware: Hardware | str, *, mesh: str = "1x1x1", dtype: str = "bfloat16"
) -> KernelReport:
    """Compiles one prefill or decode step for a chip, or for each of a mesh of them, and counts its kernels."""
    chip = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return compile_jobs([CompileJob(config, step, chip, mesh, dtype)])[0]


def compile_jobs(jobs: Sequence[CompileJob]) -> list[KernelReport]:
    """The same for several steps, compiled in one process, which starts once."""
    bounds = [float(_ideal(check_job(job)).time_s) for job in jobs]
    found = zip(jobs, compile_steps(jobs), bounds, strict=True)
    return [kernel_report(job, compiled, bound_s) for job, compiled, bound_s in found]


def kernel_report(job: CompileJob, compiled: Compiled, bound_s: float) -> KernelReport:
    """Counts the kernels of what the compiler made; bound_s is the step's least time by the inventory."""
    module = parse_hlo(compiled.hlo)
    kernels = read_kernels(module, job)
    return KernelReport(job, compiled, kernels, _totals(job, compiled, kernels, count_conditions(module), bound_s))


def kernels_waterfall(report: KernelReport, launch_s: float | None) -> Waterfall:
    """What the compiled step must take by cause, from the roof up; launch_s is one kernel's launch, if known."""
    step = report.job.step
    terms = program_terms(_ideal(report.job), report.kernels, launch_s)
    return step_waterfall((step.phase, step.batch, step.query_len, step.kv_len), terms, None)


def _ideal(job: CompileJob) -> StepTime:
    return predict_step(job.config, job.step, job.hardware, dtype=job.dtype, tp=job.num_devices)


def _totals(
    job: CompileJob, compiled: Compiled, kernels: tuple[Kernel, ...], conditions: int, bound_s: float
) -> KernelTotals:
    ideal = sum_rows(count_inventory(job))
    moved = sum(kernel.count * kernel.bytes for kernel in kernels)
    own_experts = any(kernel.is_own and kernel.op.startswith("experts_") for kernel in kernels)
    inside = sum(kernel.count for kernel in kernels if kernel.in_layer)
    capacity = job.hardware.usable_memory_bytes
    return KernelTotals(
        num_kernels=sum(kernel.count for kernel in kernels),
        kernels_per_layer=inside / job.config.num_hidden_layers,
        flops=sum(kernel.count * kernel.flops for kernel in kernels),
        dense_flops=ideal["flops"],
        masked_flops=ideal["flops"] - sum_rows(count_inventory(job, attention="causal"))["flops"],
        bytes=moved,
        ideal_bytes=ideal["bytes"],
        byte_ratio=moved / ideal["bytes"],
        routed_ideal_bytes=ideal["bytes"] if own_experts else _routed_bytes(job),
        once_bytes=float(ideal["bytes"] + ideal["activation_bytes"] - _inner_bytes(job)),
        temp_bytes=compiled.temp_bytes,
        argument_bytes=compiled.argument_bytes,
        output_bytes=compiled.output_bytes,
        alias_bytes=compiled.alias_bytes,
        peak_bytes=compiled.peak_bytes,
        capacity_bytes=capacity,
        fits=compiled.peak_bytes <= capacity,
        compile_s=compiled.compile_s,
        predicted_s=sum(kernel.count * (kernel.time_s or 0.0) for kernel in kernels),
        bound_s=bound_s,
        conditional_runs=conditions,
        rematerialised=sum(kernel.count for kernel in kernels if kernel.rematerialised),
    )


def _inner_bytes(job: CompileJob) -> float:
    """Of the inventory's activations what stays in attention as one op: scores and probabilities, written and read."""
    step, heads = job.step, job.config.num_attention_heads / job.num_devices
    squares = step.batch * heads * step.query_len * step.kv_len * job.config.num_hidden_layers
    return float(4 * squares * dtype_bits(job.dtype) / 8)


def _routed_bytes(job: CompileJob) -> float:
    """The inventory's bytes with expert weights read once for each choice (gathered) or block of rows (grouped)."""
    config, tokens = job.config, job.step.batch * job.step.query_len
    if not config.is_moe:
        return float(sum_rows(count_inventory(job))["bytes"])
    chosen, total = config.num_experts_per_tok, config.num_experts
    gathered = choose_way(tokens, chosen, total) == "gathered"
    reads = tokens * chosen if gathered else num_blocks(tokens * chosen, total)
    most, least = (sum_rows(count_inventory(job, experts))["bytes"] for experts in ("all", chosen))
    one = (most - least) / (total - chosen) if total > chosen else 0.0
    return float(least + one * (reads - chosen))
