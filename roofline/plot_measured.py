"""Measured steps beside predicted ones: on the machine's roof, as bars, and by group of ops."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwenjax.errors import InputError
from roofline.plot_axes import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
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
from roofline.report.units import percent, quantity
from roofline.waterfall import Waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

_PHASES = {"prefill": ("o", BLUE, 5.6), "decode": ("s", VERMILLION, 5.0)}
_BARS = (("measured", GREY, ""), ("predicted", SKY, ""), ("least possible", "white", "////"))
# Light and dark by turns, with hatching, so that neighbours differ in grey too.
_FILLS = (
    (BLUE, ""),
    (ORANGE, ""),
    (GREEN, ""),
    (YELLOW, ""),
    (VERMILLION, ""),
    (SKY, ""),
    (PURPLE, ""),
    (PALE, ""),
    (BLUE, "////"),
    (ORANGE, "\\\\\\\\"),
    (GREEN, "////"),
    (YELLOW, "\\\\\\\\"),
    (VERMILLION, "////"),
    (SKY, "\\\\\\\\"),
)
_ROW_INCHES = 0.42  # three lines of text
_LARGEST_ROW_INCHES = 0.9
_SEGMENT = 0.09  # of the axis: a narrower segment has no room for its percentage


@dataclass(frozen=True)
class _Row:
    """One measured step; times in seconds, error is predicted over measured minus one."""

    phase: str
    batch: int
    query_len: int
    context: int
    measured_s: float
    predicted_s: float
    bound_s: float
    error: float
    mfu: float
    mbu: float
    flops: float
    bytes: float


@dataclass(frozen=True)
class _Split:
    """A step's measured and predicted time by group of ops, in seconds."""

    name: str
    measured_s: dict[str, float]
    predicted_s: dict[str, float]


def plot_compare(
    rows: Sequence[Any],
    ops: Sequence[Any],
    ceilings: Roof,
    path: str | os.PathLike[str],
    title: str,
    waterfalls: Sequence[Waterfall] = (),
) -> None:
    """Writes measured steps against predicted ones as .png, .svg or .pdf: on the roof, as bars, and by group of ops.

    rows: mappings or objects with phase, batch, query_len, context, measured_s, predicted_s, bound_s, error, mfu, mbu,
    flops and bytes, times in seconds. ops: phase, op, measured_s and predicted_s, with batch, query_len and context
    where one phase has several steps; none leaves that panel out. ceilings: what was measured on the machine.
    waterfalls: of one or two steps, drawn below.
    """
    check_path(path)
    table, splits = _rows(rows), _splits(ops)
    save(lambda: _figure(table, splits, ceilings, title, waterfalls), path)


def compare_figure(
    rows: Sequence[Any], ops: Sequence[Any], ceilings: Roof, title: str, waterfalls: Sequence[Waterfall] = ()
) -> Figure:
    """The figure that `plot_compare` writes, for those who want to go on with it."""
    table, splits = _rows(rows), _splits(ops)
    with drawing():
        return _figure(table, splits, ceilings, title, waterfalls)


def _rows(rows: Sequence[Any]) -> list[_Row]:
    if not rows:
        raise InputError("rows", [], "has no measured step", "Measure at least one")
    table = [_Row(**{name: _value("rows", row, name) for name in _Row.__dataclass_fields__}) for row in rows]
    for row in table:
        if row.phase not in _PHASES:
            raise InputError("rows.phase", row.phase, "is not a phase of a step", "Use prefill or decode")
    return table


def _splits(ops: Sequence[Any]) -> list[_Split]:
    """The rows of each step together, in the order in which they came."""
    splits: dict[tuple[Any, ...], _Split] = {}
    for row in ops:
        phase, op = str(_value("ops", row, "phase")), str(_value("ops", row, "op"))
        where = tuple(_get(row, name) for name in ("batch", "query_len", "context"))
        name = phase if None in where else _step_name(phase, *where)
        split = splits.setdefault((phase, *where), _Split(name, {}, {}))
        for times, field in ((split.measured_s, "measured_s"), (split.predicted_s, "predicted_s")):
            times[op] = times.get(op, 0.0) + float(_value("ops", row, field))
    return [split for split in splits.values() if sum(split.measured_s.values()) > 0]


def _get(row: Any, name: str) -> Any:
    return row.get(name) if isinstance(row, Mapping) else getattr(row, name, None)


def _value(field: str, row: Any, name: str) -> Any:
    value = _get(row, name)
    if value is None:
        raise InputError(f"{field}.{name}", None, "is missing", "Give the rows that `roofline compare` makes")
    if name in ("measured_s", "predicted_s", "bound_s", "flops", "bytes") and field == "rows" and not value > 0:
        raise InputError(f"{field}.{name}", value, "must be greater than zero", "Leave out steps that didn't run")
    return value


def _step_name(phase: str, batch: int, query_len: int, context: int) -> str:
    if phase == "decode":
        return f"decode, batch {batch}\ncontext {context}"
    chunk = f"{query_len} tokens" if context == query_len else f"{query_len} of {context} tokens"
    return f"{phase}, batch {batch}\n{chunk}"


def _figure(
    rows: list[_Row], splits: list[_Split], ceilings: Roof, title: str, waterfalls: Sequence[Waterfall]
) -> Figure:
    split_inches = 0.95 + 0.45 * len(splits) if splits else 0.0
    height = max(3.2 + split_inches, 0.8 + _ROW_INCHES * len(rows))
    below = max(map(waterfall_inches, waterfalls), default=0.0)
    figure = new_figure(height + below + 0.3)
    headline(figure, title)
    whole: FigureBase = figure
    if waterfalls:
        (whole,), (bottom,) = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, below))
        _waterfalls(bottom, waterfalls)
    ((left, right),) = whole.subfigures(1, 2, squeeze=False, width_ratios=(1.05, 1))
    upper = left
    if splits:
        heights = (height - split_inches, split_inches)
        (upper,), (lower,) = left.subfigures(2, 1, squeeze=False, height_ratios=heights)
        _stacks(lower.subplots(), splits)
    _bars(right.subplots(), rows, slots=height / _LARGEST_ROW_INCHES)
    axes = upper.subplots()
    axes.set_title("(a) Measured steps and the machine's roof")
    intensities = [row.flops / row.bytes for row in rows]
    rates = [row.flops / time for row in rows for time in (row.measured_s, row.predicted_s)]
    roof_axes(axes, intensities, rates, [ceilings])
    _roof_legend(upper, rows)
    freeze(figure)
    _steps(axes, rows, ceilings)
    return figure


def _waterfalls(figure: FigureBase, waterfalls: Sequence[Waterfall]) -> None:
    for letter, axes, fall in zip(
        "de", figure.subplots(1, len(waterfalls), squeeze=False)[0], waterfalls, strict=False
    ):
        draw_waterfall(axes, fall)
        name = _step_name(fall.phase, fall.batch, fall.query_len, fall.context).replace("\n", ", ")
        panel_title(axes, f"({letter}) Why: {name}")


def _roof_legend(figure: FigureBase, rows: Sequence[_Row]) -> None:
    handles = []
    for phase in dict.fromkeys(row.phase for row in rows):
        handles.append(mark_handle(f"{phase}, measured", *_PHASES[phase]))
        handles.append(mark_handle(f"{phase}, predicted", *_PHASES[phase], hollow=True))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles) // 2)


def _steps(axes: Axes, rows: Sequence[_Row], ceilings: Roof) -> None:
    """Measured steps as points, numbered as the bars are, each joined to its hollow prediction."""
    ink = Ink([], [])
    tags = draw_roof(axes, ceilings, ink)
    for number, row in enumerate(rows, 1):
        marker, colour, size = _PHASES[row.phase]
        x, measured, predicted = row.flops / row.bytes, row.flops / row.measured_s, row.flops / row.predicted_s
        axes.plot((x, x), (measured, predicted), color=colour, linewidth=0.7, zorder=2.5)
        axes.plot(x, predicted, marker=marker, color=colour, markersize=size, markerfacecolor="none", zorder=3)
        axes.plot(x, measured, marker=marker, color=colour, markersize=size * 0.8, zorder=4)
        ink.marks.extend([(x, measured, size / 2, str(number)), (x, predicted, size / 2, str(number))])
        ink.lines.append(((x, measured), (x, predicted)))
        tags.append(Tag(str(number), x, measured, radius=size / 2, colour=colour))
    write_labels(axes, tags, ink)


def _bars(axes: Axes, rows: Sequence[_Row], slots: float) -> None:
    """Three bars a step: measured, with its time; predicted, with its error; the bound, with how much of it is used."""
    height = 0.29
    for i, row in enumerate(rows):
        prefill = row.phase == "prefill"
        used = f"MFU {percent(row.mfu)}" if prefill else f"MBU {percent(row.mbu)}"
        texts = (quantity(row.measured_s, "s"), f"{100 * row.error:+.1f} %", used)
        times = (row.measured_s, row.predicted_s, row.bound_s)
        for j, ((label, colour, hatch), time, text) in enumerate(zip(_BARS, times, texts, strict=True)):
            at, width = i + (j - 1) * height, time / row.measured_s
            style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": BLACK, "linewidth": 0.5}
            axes.barh(at, width, height * 0.9, label=label if i == 0 else None, **style)
            axes.text(0.99, at, text, ha="right", va="center_baseline", transform=axes.get_yaxis_transform())
    axes.axvline(1, color=GREY, linewidth=0.5, zorder=0)
    names = [_step_name(row.phase, row.batch, row.query_len, row.context) for row in rows]
    axes.set_yticks(range(len(rows)), [f"{number}  {name}" for number, name in enumerate(names, 1)])
    axes.set_ylim(max(len(rows), slots) - 0.5, -0.5)
    longest = max(max(row.predicted_s, row.measured_s) / row.measured_s for row in rows)
    axes.set_xlim(0, 1.45 * longest)  # with room for the texts
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest])
    axes.tick_params(axis="y", length=0)
    _tidy(axes)
    axes.set_title("(b) Time, measured = 1, and error")
    axes.figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.4)


def _stacks(axes: Axes, splits: Sequence[_Split]) -> None:
    """Measured and predicted time of each step, stacked by group of ops."""
    names = list(dict.fromkeys(op for split in splits for op in split.measured_s))
    ticks = []
    for i, split in enumerate(splits):
        whole = sum(split.measured_s.values())
        for j, (word, times) in enumerate((("measured", split.measured_s), ("predicted", split.predicted_s))):
            at = i + 0.4 * j
            ticks.append((at, f"{split.name.split(',')[0]}, {word}"))
            left = 0.0
            for k, name in enumerate(names):
                width = times.get(name, 0.0) / whole
                colour, hatch = _FILLS[k % len(_FILLS)]
                style: dict[str, Any] = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
                axes.barh(at, width, 0.36, left=left, label=name if i + j == 0 else None, **style)
                if width >= _SEGMENT:
                    ink = "white" if colour == BLUE else BLACK
                    axes.text(left + width / 2, at, f"{width:.0%}", ha="center", va="center_baseline", color=ink)
                left += width
    axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_title("(c) The same by group of ops")
    _tidy(axes)
    axes.figure.legend(loc="outside lower center", ncols=3, columnspacing=1.2, handlelength=1.4)


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
