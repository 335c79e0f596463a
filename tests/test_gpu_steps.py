"""The steps that matter, compiled for the cards that matter: kernels, bytes, temporaries and FLOPs within bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from roofline.hlo import parse_hlo
from roofline.kernels import KernelReport, compile_jobs

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from step_bounds import StepBound, excesses, jobs

CHANNELS = 256  # more than heads or their channels, fewer than a width
JOBS = [pytest.param(bound, job, id=f"{bound.name} on {job.hardware.id}") for bound, job in jobs()]


@pytest.mark.gpu_compile
@pytest.mark.parametrize(("bound", "job"), JOBS)
def test_a_compiled_step_is_within_its_bounds(gpu_compiler: None, bound: StepBound, job: object) -> None:
    report: KernelReport = compile_jobs([job])[0]
    assert excesses(bound, report) == []
    if bound.step.phase == "prefill":
        assert square_arrays(report, bound.step.query_len) == []


def square_arrays(report: KernelReport, tokens: int) -> list[tuple[int, ...]]:
    """Sizes of arrays that hold something for each pair of tokens, or vectors for each token and expert."""
    module, experts = parse_hlo(report.compiled.hlo), report.job.config.num_experts

    def is_square(sizes: tuple[int, ...]) -> bool:
        rest = [size for size in sizes if size not in (tokens, experts)]
        return sizes.count(tokens) > 1 or (tokens in sizes and experts in sizes and max(rest, default=0) >= CHANNELS)

    return sorted({array.dims for i in module.entry.instructions for array in i.arrays if is_square(array.dims)})
