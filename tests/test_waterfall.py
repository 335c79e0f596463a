"""The waterfall's terms: they sum to the total, and each grows by what its cause costs and by nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwenjax import ModelConfig
from roofline import Step, predict_step
from roofline.kernel_rows import Collective, Kernel
from roofline.predict import StepTime
from roofline.report.waterfall import waterfall_table
from roofline.waterfall import Term, measured_terms, program_terms, step_waterfall

CONFIG = ModelConfig.from_hf("Qwen2.5-7B")
DECODE, PREFILL = Step.decode(1, 2048), Step.prefill(1, 1024)


def kernel(ideal: StepTime, op: str, flops: int, num_bytes: int, kind: str = "triton gemm", count: int = 1) -> Kernel:
    time_s = max(flops / ideal.device.flops_per_s, num_bytes / ideal.device.bandwidth_bytes_per_s)
    return Kernel(op, op, (op,), kind, count, False, True, False, flops, num_bytes, 0, time_s, "memory", "compiler")


def perfect(ideal: StepTime) -> list[Kernel]:
    """A program that does each op in one kernel of its least work."""
    return [kernel(ideal, op.row.op, op.row.flops, op.row.bytes) for op in ideal.ops]


def times(terms: Sequence[Term]) -> dict[str, float]:
    return {term.name: term.time_s for term in terms}


@pytest.mark.parametrize("step", [DECODE, PREFILL])
def test_a_perfect_program_costs_its_ops_and_nothing_more(step: Step) -> None:
    ideal = predict_step(CONFIG, step, "rtx-4090")
    found = times(program_terms(ideal, perfect(ideal), 0.0))
    assert found.pop("roof") == max(ideal.compute_s, ideal.memory_s)
    assert found.pop("ops in turn") == pytest.approx(ideal.time_s - max(ideal.compute_s, ideal.memory_s), abs=1e-12)
    assert set(found) == {"extra FLOPs", "extra bytes", "unfused work", "copies", "launches"}
    assert list(found.values()) == pytest.approx([0.0] * 5, abs=1e-12)


def test_each_cause_moves_its_own_term() -> None:
    ideal = predict_step(CONFIG, PREFILL, "rtx-4090")
    base = perfect(ideal)
    rate, bandwidth = ideal.device.flops_per_s, ideal.device.bandwidth_bytes_per_s
    megabytes = 10**8

    def change(*more: Kernel, **edits: Kernel) -> dict[str, float]:
        kernels = [edits.get(k.op, k) for k in base] + list(more)
        before, after = times(program_terms(ideal, base, 2e-6)), times(program_terms(ideal, kernels, 2e-6))
        return {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}

    gate_up = next(k for k in base if k.op == "gate_up_proj")
    doubled = kernel(ideal, "gate_up_proj", 2 * gate_up.flops, gate_up.read_bytes)
    assert change(gate_up_proj=doubled) == pytest.approx({"extra FLOPs": gate_up.flops / rate})
    spilling = replace(gate_up, read_bytes=gate_up.read_bytes + megabytes, time_s=(gate_up.time_s or 0) + 1e-4)
    assert change(gate_up_proj=spilling) == pytest.approx({"extra bytes": 1e-4})
    launch = {"launches": 2e-6}
    norm = kernel(ideal, "post_norm", 0, megabytes, "loop fusion")
    assert change(norm) == pytest.approx({"unfused work": megabytes / bandwidth} | launch)
    moved = kernel(ideal, "cache", 0, megabytes, "copy", count=3)
    assert change(moved) == pytest.approx({"copies": 3 * megabytes / bandwidth, "launches": 6e-6})
    link = replace(norm, kind="all-reduce", time_s=5e-6, collective=Collective("all-reduce", 8, 8, 14.0, 8, "{}"))
    assert change(link) == pytest.approx({"communication": 5e-6} | launch)


def test_an_unknown_launch_cost_is_said_and_counts_nothing() -> None:
    ideal = predict_step(CONFIG, DECODE, "rtx-4090")
    (launches,) = (term for term in program_terms(ideal, perfect(ideal), None) if term.name == "launches")
    assert launches == Term("launches", 0.0, "not priced: no launch cost is known", "16 kernels, one after another")


@given(st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), st.floats(0, 1e-3))
def test_the_terms_sum_to_what_was_measured(calibrated_s: float, measured_s: float, dispatch_s: float) -> None:
    ideal = predict_step(CONFIG, DECODE, "rtx-4090")
    terms = measured_terms(program_terms(ideal, perfect(ideal), 1e-6), calibrated_s, dispatch_s, measured_s)
    waterfall = step_waterfall(("decode", 1, 1, 2048), terms, measured_s)
    assert waterfall.total_s == pytest.approx(measured_s)
    assert times(terms)["residual"] == measured_s - calibrated_s


def test_the_table_ends_with_the_sum() -> None:
    terms = (Term("roof", 0.002, "exact", "a"), Term("launches", 0.001, "2 us each", "b"))
    table = waterfall_table(step_waterfall(("decode", 1, 1, 64), terms, None))
    assert table.title == "Waterfall of a decode (batch 1, 1 new of 64 tokens)"
    assert [row[:4] for row in table.rows] == [
        ["roof", "2.000", "2.000", "66.7 %"],
        ["launches", "1.000", "3.000", "33.3 %"],
        ["total", "3.000", "", "100.0 %"],
    ]
    assert table.rows[-1][4] == "what this program must take"
