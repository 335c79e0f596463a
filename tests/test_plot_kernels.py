"""Figures of kernels and waterfalls: marks lie on the roof, bars join, and every text is clear of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from figure_texts import check_labels, check_page, is_axes

from qwenjax import ModelConfig
from roofline import Step, predict_step
from roofline.hardware import load_hardware
from roofline.kernel_rows import Kernel
from roofline.plot_data import Roof, roof_of
from roofline.plot_kernels import KernelPanel, kernel_points, kernels_figure, plot_kernels
from roofline.plot_measured import compare_figure
from roofline.waterfall import Term, Waterfall, program_terms, step_waterfall

pytest.importorskip("matplotlib", reason="figures need the `plot` extra")
CHIP = load_hardware("rtx-4090")


def panel(model: str, step: Step) -> KernelPanel:
    """A program with a kernel of each op in each layer, elementwise ones through memory."""
    ideal = predict_step(ModelConfig.from_hf(model), step, CHIP)
    device = ideal.device
    kernels = []
    for op in ideal.ops:
        runs = op.row.layers
        flops, moved = op.row.flops // runs, (op.row.bytes + op.row.activation_bytes) // runs
        time_s = max(flops / device.flops_per_s, moved / device.bandwidth_bytes_per_s)
        kernels.append(
            Kernel(op.row.op, op.row.op, (op.row.op,), "loop fusion", runs, False, True, False, flops, moved, 0,
                   time_s, "memory", "compiler")
        )  # fmt: skip
    terms = program_terms(ideal, kernels, 2e-6)
    where = (step.phase, step.batch, step.query_len, step.kv_len)
    return KernelPanel(f"{step.phase} of {step.query_len}", tuple(kernels), step_waterfall(where, terms, None))


@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B", "Qwen2-57B-A14B", "Qwen3-0.6B"])
def test_kernels_lie_on_the_roof_and_every_text_is_readable(model: str) -> None:
    panels = [panel(model, Step.prefill(1, 1024)), panel(model, Step.decode(8, 2048))]
    figure = kernels_figure(panels, roof_of(CHIP), f"{model} on a card that isn't there")
    check_labels(figure)
    check_page(figure)
    roof = roof_of(CHIP)
    for shown in panels:
        for point in kernel_points(shown.kernels):
            rate = point.flops / point.time_s
            assert rate <= roof.attainable_flops_per_s(point.flops / point.bytes) * (1 + 1e-9)
    titles = [axes.get_title(loc="left") for axes in figure.findobj(is_axes)]
    assert titles == ["(a) prefill of 1024", "(b) decode of 1", "(c) Its time by cause", "(d) Its time by cause"]


def test_kernels_of_one_op_and_size_are_one_mark_with_their_share() -> None:
    shown = panel("Qwen2.5-7B", Step.decode(1, 2048)).kernels
    doubled = (*shown, *shown)
    points = kernel_points(doubled)
    assert [point.op for point in points] == [kernel.op for kernel in shown if kernel.flops]
    gate_up = next(point for point in points if point.op == "gate_up_proj")
    assert gate_up.count == 2 * 28
    total = sum(kernel.count * (kernel.time_s or 0) for kernel in doubled)
    assert gate_up.time_fraction == pytest.approx(56 * gate_up.time_s / total)


def falls(measured_s: float) -> tuple[Waterfall, ...]:
    terms = (
        Term("roof", 0.6 * measured_s, "exact", ""),
        Term("rates of these shapes", 0.5 * measured_s, "measured here", ""),
        Term("residual", -0.1 * measured_s, "measured here", ""),
    )
    return tuple(
        step_waterfall((phase, 1, new, 512), terms, measured_s) for phase, new in (("prefill", 512), ("decode", 1))
    )


def bars(axes: Any) -> list[tuple[float, float]]:
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches]


def test_a_waterfalls_bars_join_and_end_at_the_measured_time() -> None:
    row = {"phase": "decode", "batch": 1, "query_len": 1, "context": 512, "measured_s": 0.1, "predicted_s": 0.11,
           "bound_s": 0.06, "error": 0.1, "mfu": 0.1, "mbu": 0.6, "flops": 1e9, "bytes": 1e9}  # fmt: skip
    figure = compare_figure([row], [], Roof("here", 250e9, 30e9), "A model, here", falls(0.1))
    check_page(figure)
    panels = {axes.get_title(loc="left"): axes for axes in figure.findobj(is_axes)}
    wanted = [(0, 60), (60, 110), (110, 100), (0, 100)]  # milliseconds; the residual is below zero
    for title in ("(d) Why: prefill, batch 1, 512 tokens", "(e) Why: decode, batch 1, context 512"):
        assert bars(panels[title]) == [pytest.approx(pair) for pair in wanted]


def test_the_figure_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "kernels.svg"
    plot_kernels([panel("Qwen3-0.6B", Step.decode(1, 64))], roof_of(CHIP), path, "One step")
    assert path.read_text().rstrip().endswith("</svg>")
    assert [file.name for file in tmp_path.iterdir()] == ["kernels.svg"]
