"""Roofline figures for papers: a model's steps on one or two chips, and measured steps against predicted ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.count import DtypePolicy
from roofline.hardware import Hardware
from roofline.plot_axes import (
    BLACK,
    DASHED,
    MARKS,
    Ink,
    Tag,
    check_path,
    draw_other_roof,
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
from roofline.plot_data import ChipPoints, Kind, Point, Roof, roofline_points
from roofline.plot_measured import plot_compare
from roofline.report.units import percent, quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_compare", "plot_roofline", "roofline_figure"]

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_KINDS: dict[Kind, str] = {
    "matmul": "weights × tokens",
    "attention": "attention over the KV cache",
    "grouped": "experts",
    "step": "whole step",
}


def plot_roofline(
    config: ModelConfig,
    hardware: Sequence[Hardware],
    path: str | os.PathLike[str],
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    batches: Iterable[int] = BATCHES,
    context: int = 2048,
    prompt: int = 1024,
) -> None:
    """Writes the rooflines of one or two chips with a prefill and decode steps of the model, as .png, .svg or .pdf.

    Lengths in tokens. Every point is a least time (see `predict_step`): ops lie on the roof, a whole step lies below it
    where some of its ops are limited by compute and others by memory.
    """
    check_path(path)
    chips = _checked(config, hardware, dtype, kv_dtype, batches, context, prompt)
    save(lambda: _figure(config, hardware, chips, DtypePolicy.of(dtype, kv_dtype), context, prompt), path)


def roofline_figure(
    config: ModelConfig,
    hardware: Sequence[Hardware],
    *,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    batches: Iterable[int] = BATCHES,
    context: int = 2048,
    prompt: int = 1024,
) -> Figure:
    """The figure that `plot_roofline` writes, for those who want to go on with it."""
    chips = _checked(config, hardware, dtype, kv_dtype, batches, context, prompt)
    with drawing():
        return _figure(config, hardware, chips, DtypePolicy.of(dtype, kv_dtype), context, prompt)


def _checked(
    config: ModelConfig,
    hardware: Sequence[Hardware],
    dtype: str,
    kv_dtype: str | None,
    batches: Iterable[int],
    context: int,
    prompt: int,
) -> tuple[ChipPoints, ...]:
    if not 1 <= len(hardware) <= 2:
        ids = [chip.id for chip in hardware]
        raise InputError("hardware", ids, "a figure shows one or two chips", "Make several figures for more")
    return roofline_points(
        config, hardware, dtype=dtype, kv_dtype=kv_dtype, batches=batches, context=context, prompt=prompt
    )


def _figure(
    config: ModelConfig,
    hardware: Sequence[Hardware],
    chips: tuple[ChipPoints, ...],
    policy: DtypePolicy,
    context: int,
    prompt: int,
) -> Figure:
    figure = new_figure(1.1 + 2.75 * len(chips))
    grid = figure.subplots(len(chips), 2, sharex=True, sharey=True, squeeze=False)
    points = [point for chip in chips for point in chip.points]
    roofs = [chip.roof for chip in chips]
    for axes in grid.flat:
        roof_axes(axes, [p.intensity for p in points], [p.flops_per_s for p in points], roofs)
        axes.label_outer()
    headline(figure, _title(config, hardware, policy, chips[0].decode_batch))
    _legend(figure, points, any(roof.measured_bandwidth_bytes_per_s for roof in roofs))
    for chip, (left, right), letters in zip(chips, grid, ("ab", "cd"), strict=False):
        name = f"{chip.roof.name}, " if len(chips) > 1 else ""
        panel_title(left, f"({letters[0]}) {name}prefill of {prompt} tokens")
        panel_title(right, f"({letters[1]}) {name}decode at context {context}")
    freeze(figure)
    for chip, (left, right) in zip(chips, grid, strict=True):
        others = [roof for roof in roofs if roof is not chip.roof]
        whole = f"whole step\n{quantity(chip.prefill_step.time_s, 's')}"
        _panel(left, chip.roof, others, chip.prefill_ops, [(chip.prefill_step, whole)])
        _panel(right, chip.roof, others, chip.decode_ops, _decode_texts(chip))
    return figure


def _title(config: ModelConfig, hardware: Sequence[Hardware], policy: DtypePolicy, batch: int) -> str:
    kv = "" if policy.kv == policy.weight else f"{policy.kv} "
    chips = " and ".join(chip.name for chip in hardware)
    types = f"{policy.weight} weights and {kv}KV cache"
    bounds = f"Lower bounds in time, with each op's share of its step (decode at batch {batch})"
    return f"{config.name or config.model_type} on {chips}\n{bounds}; {types}"


def _legend(figure: Figure, points: Sequence[Point], measured: bool) -> None:
    from matplotlib.lines import Line2D

    shown = {point.kind for point in points}
    handles = [mark_handle(text, *MARKS[kind]) for kind, text in _KINDS.items() if kind in shown]
    if not all(point.fits for point in points):
        handles.append(mark_handle("hollow: beyond its memory", *MARKS["step"], hollow=True))
    handles.append(Line2D([], [], color=BLACK, linewidth=1.1, label="peak"))
    if measured:
        handles.append(Line2D([], [], color=BLACK, linewidth=0.8, linestyle=DASHED, label="measured bandwidth"))
    columns = len(handles) if len(handles) <= 5 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.5)


def _decode_texts(chip: ChipPoints) -> list[tuple[Point, str]]:
    """The whole steps with their labels: time at both ends and at the batch of the ops, else the batch alone."""
    named = {chip.batches[0], chip.decode_batch, chip.batches[-1]}
    return [
        (point, f"batch {batch}\n{quantity(point.time_s, 's')}" if batch in named else str(batch))
        for batch, point in zip(chip.batches, chip.decode_steps, strict=True)
    ]


def _panel(
    axes: Axes, roof: Roof, others: Sequence[Roof], ops: Sequence[Point], steps: Sequence[tuple[Point, str]]
) -> None:
    """One roof with ops and whole steps on it; the steps, by batch, are joined to a path."""
    ink = Ink([], [])
    tags = draw_roof(axes, roof, ink)
    for other in others:
        tags += draw_other_roof(axes, other, ink)
    path = [(point.intensity, point.flops_per_s) for point, _ in steps]
    axes.plot(*zip(*path, strict=True), color=BLACK, linewidth=0.8, zorder=2.5)
    ink.lines.extend(pairwise(path))
    # Steps lie under the ops, which are smaller: what shares a place stays in sight.
    tags += [_mark(axes, point, text, ink, 3) for point, text in steps]
    tags += [_mark(axes, point, _op_text(point), ink, 4) for point in ops]
    write_labels(axes, tags, ink)


def _mark(axes: Axes, point: Point, text: str, ink: Ink, zorder: float) -> Tag:
    """Draws a point and returns its label; a bare number is a batch that may go without."""
    marker, colour, size = MARKS[point.kind]
    minor = text.isdigit()
    size *= 0.72 if minor else 1.0
    at = (point.intensity, point.flops_per_s)
    face, edge, width = (colour, "white", 0.5) if point.fits else ("none", colour, 0.9)
    (line,) = axes.plot(*at, marker=marker, markersize=size, zorder=zorder)
    line.set(markerfacecolor=face, markeredgecolor=edge, markeredgewidth=width)
    ink.marks.append((*at, size / 2 + 0.5, text))
    return Tag(text, *at, radius=size / 2, colour=colour, optional=minor)


def _op_text(point: Point) -> str:
    """The ops of a mark, two names a line, and their share of the step's time."""
    lines = [", ".join(point.ops[i : i + 2]) for i in range(0, len(point.ops), 2)]
    return ",\n".join(lines) + f" {percent(point.time_fraction)}"
