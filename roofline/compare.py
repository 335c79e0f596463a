"""Measured steps of a real architecture here, set against what the calibration predicts and the roof allows.

For one prefill and one decode the gap is parted: by group of ops (the profiler), and by cause (the waterfall).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step, check_step
from qwenjax.errors import InputError
from qwenjax.progress import Progress, silent
from roofline.calibrated import predict_calibrated
from roofline.count import count_kv_bytes_per_token, count_weight_bytes
from roofline.gpu_compile import CompileJob
from roofline.hardware import Hardware
from roofline.hlo import Module, parse_hlo
from roofline.kernel_rows import OTHER, Kernel, read_kernels
from roofline.measure import available_memory_bytes, environment, fill_params, measure_call, step_call
from roofline.predict import predict_step
from roofline.trace import instruction_ops, measure_time_by_op
from roofline.waterfall import Waterfall, measured_terms, program_terms, step_waterfall

if TYPE_CHECKING:
    from qwenjax.model import Phase
    from qwenjax.weights import Params

GROUPS = {
    "qkv_proj": "attention projections",
    "o_proj": "attention projections",
    "scores": "attention",
    "softmax": "attention",
    "values": "attention",
    "gate_up_proj": "MLP",
    "down_proj": "MLP",
    "router": "experts",
    "top_k": "experts",
    "experts_gate_up_proj": "experts",
    "experts_swiglu": "experts",
    "experts_down_proj": "experts",
    "combine": "experts",
    "shared_gate_up_proj": "shared expert",
    "shared_swiglu": "shared expert",
    "shared_down_proj": "shared expert",
    "shared_expert_gate": "shared expert",
    "unembed": "output head",
}
OTHER_GROUP = "norms, RoPE, residuals"


@dataclass(frozen=True)
class CompareRow:
    """One step: measured (median), predicted from the calibration, and the roof; error is predicted / measured - 1."""

    phase: str
    batch: int
    query_len: int
    context: int
    measured_s: float
    best_s: float
    predicted_s: float
    bound_s: float
    error: float
    mfu: float
    mbu: float
    flops: int
    bytes: int
    samples: tuple[float, ...]


@dataclass(frozen=True)
class GroupTime:
    """Part of one step's time by group of ops: the profiler's share of the measured time, and the prediction's."""

    phase: str
    batch: int
    query_len: int
    context: int
    op: str
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Comparison:
    model: str
    dtype: str
    layers: int
    rows: tuple[CompareRow, ...]
    ops: tuple[GroupTime, ...]
    waterfalls: tuple[Waterfall, ...]
    environment: dict[str, Any]
    notes: tuple[str, ...]
    median_abs_error: float
    max_abs_error: float


def default_steps(config: ModelConfig, batches: Sequence[int], prompts: Sequence[int]) -> list[Step]:
    """Prefill of each prompt at batch 1, and of the shortest at every batch; decode of every batch at each context."""
    shortest = min(prompts)
    prefills = [Step.prefill(1, prompt) for prompt in prompts] + [
        Step.prefill(batch, shortest) for batch in batches if batch > 1
    ]
    decodes = [Step.decode(batch, prompt) for prompt in prompts for batch in batches]
    return [check_step(config, step) for step in (*prefills, *decodes)]


def compare(
    config: ModelConfig, hardware: Hardware, *, batches: Sequence[int] = (1, 4, 8), prompts: Sequence[int] = (128, 512),
    layers: int | None = None, dtype: str | None = None, progress: Progress = silent,
    budget_s: float = 2.0,
) -> Comparison:  # fmt: skip
    """Runs jitted prefill and decode steps here with made-up weights and sets them against `hardware` (a calibration).

    Cuts the depth to `layers`, or to what the memory holds, and says so in `notes`. dtype: by default what the
    calibration measured first, float32 on a CPU and bfloat16 elsewhere. budget_s: seconds of repeats for each step.
    """
    from qwenjax.model import check_runnable

    check_runnable(config)
    dtype = str(hardware.measured.get("dtype", "float32")) if dtype is None else dtype
    steps = default_steps(config, batches, prompts)
    predict_calibrated(config, steps[0], hardware, dtype)  # refuses what wasn't measured before memory is spent
    config, notes = cut_to_memory(config, steps, layers, dtype)
    progress("weights", 0.0)
    params = fill_params(config, dtype)
    rows: list[CompareRow] = []
    ops: list[GroupTime] = []
    waterfalls: list[Waterfall] = []
    for i, step in enumerate(steps):
        progress(
            f"{step.phase}, batch {step.batch}, {step.query_len} new of {step.kv_len} tokens", (i + 0.1) / len(steps)
        )
        row = _measure(config, params, step, hardware, dtype, budget_s)
        rows.append(row)
        if step.batch == 1 and step.kv_len == max(prompts):
            program = _program(config, step, dtype)
            ops += _split(config, params, step, hardware, dtype, row.measured_s, program)
            waterfalls.append(_waterfall(config, step, hardware, dtype, row, program))
    progress("done", 1.0)
    errors = [abs(row.error) for row in rows]
    return Comparison(
        config.name, dtype, config.num_hidden_layers, tuple(rows), tuple(ops), tuple(waterfalls), environment(),
        tuple(notes), statistics.median(errors), max(errors),
    )  # fmt: skip


def cut_to_memory(
    config: ModelConfig, steps: Iterable[Step], layers: int | None, dtype: str
) -> tuple[ModelConfig, list[str]]:
    """The model at `layers`, or at the most layers that free memory holds with the cache of every step; and a note."""
    full = config.num_hidden_layers
    if layers is not None:
        cut = config.with_layers(layers)
        return cut, [f"depth cut to {layers} of {full} layers, as asked"] if layers < full else []
    free = available_memory_bytes()
    if free is None:
        return config, []
    largest: int = max(step.batch * step.kv_len for step in steps)

    def need(model: ModelConfig) -> float:
        return count_weight_bytes(model, dtype) + 2 * largest * count_kv_bytes_per_token(model, dtype)

    fitting = next((n for n in range(full, 0, -1) if need(config.with_layers(n)) <= 0.8 * free), None)
    if fitting is None:
        raise InputError(
            "model",
            config.name,
            f"one layer doesn't fit in the {free / 1e9:.1f} GB that are free here",
            "Use a smaller model.",
        )
    if fitting == full:
        return config, []
    return config.with_layers(fitting), [
        f"depth cut to {fitting} of {full} layers: {free / 1e9:.1f} GB of memory are free"
    ]


def _measure(
    config: ModelConfig, params: Params, step: Step, hardware: Hardware, dtype: str, budget_s: float
) -> CompareRow:
    samples = measure_call(step_call(config, params, step, dtype), budget_s=budget_s)
    roof = predict_step(config, step, hardware, dtype=dtype, kv_dtype=dtype)
    predicted = sum(op.time_s for op in predict_calibrated(config, step, hardware, dtype))
    measured = samples.median_s
    return CompareRow(
        step.phase, step.batch, step.query_len, step.kv_len, measured, samples.best_s, predicted, roof.time_s,
        predicted / measured - 1, roof.flops / (measured * roof.device.flops_per_s),
        roof.bytes / (measured * roof.device.bandwidth_bytes_per_s), roof.flops, roof.bytes, samples.seconds,
    )  # fmt: skip


def _program(config: ModelConfig, step: Step, dtype: str) -> Module:
    """The compiled program of a step."""
    from qwenjax.model import decode_step, prefill, step_shapes

    function = prefill if step.phase == "prefill" else decode_step
    phase: Phase = "prefill" if step.phase == "prefill" else "decode"
    tree, arguments, cache = step_shapes(config, phase, step.batch, step.query_len, step.kv_len, dtype)
    return parse_hlo(function.lower(config, tree, *arguments, cache).compile().as_text() or "")


def _split(
    config: ModelConfig,
    params: Params,
    step: Step,
    hardware: Hardware,
    dtype: str,
    measured_s: float,
    program: Module,
) -> list[GroupTime]:
    """Parts the measured time by the profiler's shares; the prediction's parts beside them."""
    call = step_call(config, params, step, dtype)
    call()
    shares = _grouped(measure_time_by_op(call, program).items())
    predicted = _grouped((op.op, op.time_s) for op in predict_calibrated(config, step, hardware, dtype))
    return [
        GroupTime(
            step.phase,
            step.batch,
            step.query_len,
            step.kv_len,
            group,
            shares.get(group, 0.0) * measured_s,
            predicted.get(group, 0.0),
        )
        for group in dict.fromkeys((*GROUPS.values(), OTHER_GROUP))
        if group in shares or group in predicted
    ]


def _waterfall(
    config: ModelConfig, step: Step, hardware: Hardware, dtype: str, row: CompareRow, program: Module
) -> Waterfall:
    """The measured time by cause, from the roof that calibrate saw to the residual."""
    ideal = predict_step(config, step, hardware, dtype=dtype, kv_dtype=dtype)
    kernels = _kernels(program, CompileJob(config, step, hardware, dtype=dtype))
    terms = program_terms(ideal, kernels, float(hardware.measured["launch_s"]), "the peaks that calibrate saw")
    dispatch_s = float(hardware.measured["dispatch_s"])
    terms = measured_terms(terms, row.predicted_s, dispatch_s, row.measured_s)
    return step_waterfall((row.phase, row.batch, row.query_len, row.context), terms, row.measured_s)


def _kernels(program: Module, job: CompileJob) -> list[Kernel]:
    """The program's kernels; where the compiler dropped a product's name, the weight that it reads tells its op."""
    names = instruction_ops(program)
    found = read_kernels(program, job)
    return [replace(kernel, op=names.get(kernel.name, OTHER)) if kernel.op == OTHER else kernel for kernel in found]


def _grouped(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for op, value in parts:
        group = GROUPS.get(op, OTHER_GROUP)
        totals[group] = totals.get(group, 0.0) + value
    return totals
