"""The kernels of compiled steps on a chip's roofline, coloured by op, and their time by cause below."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from roofline.kernel_rows import Kernel
from roofline.plot_axes import (
    BLUE,
    GREEN,
    ORANGE,
    PAGE_INCHES,
    PALE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Ink,
    Tag,
    check_path,
    draw_roof,
    drawing,
    freeze,
    headline,
    mark_handle,
    new_figure,
    panel_title,
    roof_axes,
    save,
    write_labels,
)
from roofline.plot_data import Roof
from roofline.plot_waterfall import draw_waterfall, waterfall_inches
from roofline.report.units import percent
from roofline.waterfall import Waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour for ops that belong together, another marker within it: readable in grey too.
_STYLES = {
    "qkv_proj": (BLUE, "o"),
    "o_proj": (BLUE, "s"),
    "scores": (VERMILLION, "o"),
    "softmax": (VERMILLION, "^"),
    "values": (VERMILLION, "s"),
    "gate_up_proj": (GREEN, "o"),
    "down_proj": (GREEN, "s"),
    "router": (PURPLE, "o"),
    "top_k": (PURPLE, "^"),
    "experts_gate_up_proj": (ORANGE, "o"),
    "experts_swiglu": (ORANGE, "^"),
    "experts_down_proj": (ORANGE, "s"),
    "combine": (ORANGE, "D"),
    "shared_gate_up_proj": (YELLOW, "o"),
    "shared_down_proj": (YELLOW, "s"),
    "shared_expert_gate": (YELLOW, "D"),
    "unembed": (SKY, "D"),
}
_OTHER_STYLE = (PALE, "D")
_LARGEST_POINTS, _SMALLEST_POINTS = 9.0, 3.0  # diameters: areas go with the share of the time
_ROOF_INCHES = 2.9
_HANDLE_INCHES, _LETTER_INCHES = 0.34, 0.058  # of a legend's entry


@dataclass(frozen=True)
class KernelPanel:
    """One compiled step: its name, kernels, and time by cause."""

    title: str
    kernels: tuple[Kernel, ...]
    waterfall: Waterfall


@dataclass(frozen=True)
class KernelPoint:
    """Kernels of one op and one shape of work: FLOPs and bytes of one run, and the share of all kernels' time."""

    op: str
    flops: int
    bytes: int
    time_s: float
    count: int
    time_fraction: float


def kernel_points(kernels: Iterable[Kernel]) -> tuple[KernelPoint, ...]:
    """The kernels that have FLOPs, those of one op, kind and size together; the others have no place on a log axis."""
    kernels = tuple(kernels)
    total = sum(kernel.count * (kernel.time_s or 0.0) for kernel in kernels)
    counts: dict[tuple[str, int, int, float], int] = {}
    for kernel in kernels:
        if kernel.flops and kernel.bytes and kernel.time_s:
            key = kernel.op, kernel.flops, kernel.bytes, kernel.time_s
            counts[key] = counts.get(key, 0) + kernel.count
    return tuple(KernelPoint(*key, count, count * key[3] / total) for key, count in counts.items())


def plot_kernels(panels: Sequence[KernelPanel], roof: Roof, path: str | os.PathLike[str], title: str) -> None:
    """Writes one or two compiled steps side by side as .png, .svg or .pdf: kernels on the roof, and their waterfalls.

    Each mark is at its least time by the chip's peaks, so it lies on the roof: what the figure shows is where, how much
    of the time, and what else the step does.
    """
    check_path(path)
    save(lambda: _figure(panels, roof, title), path)


def kernels_figure(panels: Sequence[KernelPanel], roof: Roof, title: str) -> Figure:
    """The figure that `plot_kernels` writes, for those who want to go on with it."""
    with drawing():
        return _figure(panels, roof, title)


def _figure(panels: Sequence[KernelPanel], roof: Roof, title: str) -> Figure:
    lower_inches = max(waterfall_inches(panel.waterfall) for panel in panels)
    figure = new_figure(_ROOF_INCHES + lower_inches + 0.5)
    headline(figure, title)
    (upper,), (lower,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(_ROOF_INCHES, lower_inches))
    points = [kernel_points(panel.kernels) for panel in panels]
    grid = upper.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    shown = [point for of_panel in points for point in of_panel]
    for axes in grid:
        intensities = [point.flops / point.bytes for point in shown]
        roof_axes(axes, intensities, [point.flops / point.time_s for point in shown], [roof])
        axes.set_xlabel("Arithmetic intensity of the kernel (FLOP/B)")
        axes.label_outer()
    names = [name for name in (*_STYLES, *(p.op for p in shown)) if any(p.op == name for p in shown)]
    handles = [mark_handle(name, *_mark(name), 5.0) for name in dict.fromkeys(names)]
    widest = _HANDLE_INCHES + _LETTER_INCHES * max(map(len, names), default=0)
    columns = min(len(handles), max(1, int(PAGE_INCHES / widest)))
    upper.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)
    for number, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
        panel_title(axes, f"({'ab'[number]}) {panel.title}")
    below = lower.subplots(1, len(panels), squeeze=False)[0]
    for number, (axes, panel) in enumerate(zip(below, panels, strict=True), len(panels)):
        draw_waterfall(axes, panel.waterfall)
        panel_title(axes, f"({'abcd'[number]}) Its time by cause")
    freeze(figure)
    for axes, of_panel in zip(grid, points, strict=True):
        _kernels(axes, roof, of_panel)
    return figure


def _mark(op: str) -> tuple[str, str]:
    colour, marker = _STYLES.get(op, _OTHER_STYLE)
    return marker, colour


def _kernels(axes: Axes, roof: Roof, points: Sequence[KernelPoint]) -> None:
    """Marks by op, their areas by share of the time, the large ones named with it."""
    ink = Ink([], [])
    tags = draw_roof(axes, roof, ink)
    largest = max((point.time_fraction for point in points), default=1.0)
    for point in sorted(points, key=lambda point: -point.time_fraction):
        marker, colour = _mark(point.op)
        diameter = max(_SMALLEST_POINTS, _LARGEST_POINTS * sqrt(point.time_fraction / largest))
        at = point.flops / point.bytes, point.flops / point.time_s
        (line,) = axes.plot(*at, marker=marker, markersize=diameter, zorder=3)
        line.set(markerfacecolor=colour, markeredgecolor="white", markeredgewidth=0.5)
        text = f"{point.op} {percent(point.time_fraction)}"
        ink.marks.append((*at, diameter / 2 + 0.5, text))
        if point.time_fraction >= 0.01:
            tags.append(Tag(text, *at, radius=diameter / 2, optional=point.time_fraction < 0.05))
    write_labels(axes, tags, ink)
