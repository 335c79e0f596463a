"""The steps that matter, compiled for the cards that matter: kernels, bytes, temporaries and FLOPs within bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roofline.kernels import KernelReport, compile_jobs

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from step_bounds import StepBound, excesses, jobs

JOBS = [pytest.param(bound, job, id=f"{bound.name} on {job.hardware.id}") for bound, job in jobs()]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("bound", "job"), JOBS)
def test_a_compiled_step_is_within_its_bounds(gpu_compiler: None, bound: StepBound, job: object) -> None:
    report: KernelReport = compile_jobs([job])[0]
    assert excesses(bound, report) == []
    if bound.step.phase == "prefill":
        assert largest_square(report) == 0
