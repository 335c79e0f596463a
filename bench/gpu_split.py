"""Where a measured step's time went: by cause, from the roof to the residual, and by op, by the profiler."""

from __future__ import annotations

import dataclasses

from gpu_record import DTYPE, Bench, measured_hardware
from gpu_steps import compiled_step, loaded, row_of, step_record

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline.calibrated import predict_calibrated
from roofline.gpu_compile import CompileJob
from roofline.hlo import parse_hlo
from roofline.kernel_rows import read_kernels
from roofline.measure import step_call
from roofline.predict import predict_step
from roofline.trace import measure_time_by_op
from roofline.waterfall import measured_terms, program_terms, step_waterfall


def measure_split(bench: Bench, config: ModelConfig, step: Step) -> None:
    """The waterfall of `roofline compare` for this step; then the profiler's share of each op and the prediction's."""
    cut, params = loaded(bench, config)
    hardware, row = measured_hardware(bench.record), row_of(bench, cut, step)
    if hardware is None or not hardware.measured or row is None:
        raise RuntimeError("the step or the calibration is missing, so there is nothing to split")
    program = parse_hlo(compiled_step(cut, step).as_text() or "")
    kernels = read_kernels(program, CompileJob(cut, step, hardware, dtype=DTYPE))
    roof = predict_step(cut, step, hardware, dtype=DTYPE)
    terms = program_terms(roof, kernels, hardware.measured["launch_s"], "the best rates that were measured")
    terms = measured_terms(terms, row["predicted_s"], hardware.measured["dispatch_s"], row["measured_s"])
    waterfall = step_waterfall((step.phase, step.batch, step.query_len, step.kv_len), terms, row["measured_s"])
    bench.record["waterfalls"].append(step_record(cut, step) | dataclasses.asdict(waterfall))

    call = step_call(cut, params, step, DTYPE)
    call()
    shares = measure_time_by_op(call, program)
    predicted = {op.op: op.time_s for op in predict_calibrated(cut, step, hardware, DTYPE)}
    bench.record["ops"] += [
        step_record(cut, step)
        | {"op": op, "measured_s": shares.get(op, 0.0) * row["measured_s"], "predicted_s": predicted.get(op, 0.0)}
        for op in dict.fromkeys((*predicted, *shares))
    ]
