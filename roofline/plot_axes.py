"""What figures share: style, file, roofline axes, ceilings and labels. matplotlib is imported when drawing."""

from __future__ import annotations

import importlib
import math
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qwenjax.errors import InputError
from roofline.plot_data import Kind, Roof
from roofline.plot_labels import Box, Candidate, Label, Mark, Segment, along, around, place
from roofline.report.units import quantity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Okabe and Ito's colours, which colour-blind readers tell apart; markers differ too, for print in grey.
BLUE, VERMILLION, GREEN, SKY, ORANGE, PURPLE, YELLOW = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#56B4E9",
    "#E69F00",
    "#CC79A7",
    "#F0E442",
)
BLACK, GREY, PALE = "#111111", "#6b6b6b", "#c4c4c4"
DASHED = (0, (4, 2))
MARKS: dict[Kind, tuple[str, str, float]] = {  # marker, colour, diameter in points
    "matmul": ("o", BLUE, 5.8),
    "attention": ("s", VERMILLION, 4.0),
    "grouped": ("^", GREEN, 5.4),
    "step": ("D", BLACK, 7.6),
}
PAGE_INCHES = 7.0  # the text width of a two-column page
FONT_POINTS = 7.0
DPI = 240
_HEADLINE_CHARACTERS, _TITLE_CHARACTERS = 104, 52  # what fits the page, and a panel of half its width
_OPTIONAL = 20.0  # what a label that can be left out may cost: a place close by, and no leader
_FORMATS = {".png": "png", ".svg": "svg", ".pdf": "pdf"}
_STYLE = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same figure everywhere
    "font.size": FONT_POINTS,
    "axes.titlesize": 8,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.6,
    "axes.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "legend.frameon": False,
    "legend.fontsize": FONT_POINTS,
    "legend.handletextpad": 0.4,
    "hatch.linewidth": 0.5,
    "svg.hashsalt": "roofline",
    "svg.fonttype": "path",
    "pdf.fonttype": 42,
}


@contextmanager
def drawing() -> Iterator[None]:
    """matplotlib with our style and nobody else's; the caller's settings are back afterwards."""
    try:
        style = importlib.import_module("matplotlib.style")
    except ImportError:
        remedy = 'Install it: pip install "qwenjax-roofline[plot]"'
        raise InputError("matplotlib", None, "isn't installed, and figures are drawn with it", remedy) from None
    with style.context(["default", _STYLE]):
        yield


def new_figure(height_inches: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGE_INCHES, height_inches), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def headline(figure: Figure, text: str) -> None:
    """Writes the figure's title, its lines broken where the page ends."""
    lines = [textwrap.fill(line, _HEADLINE_CHARACTERS) for line in text.splitlines()]
    figure.suptitle("\n".join(lines), fontsize=8.5, x=0.02, ha="left", linespacing=1.3)


def panel_title(axes: Axes, text: str) -> None:
    axes.set_title(textwrap.fill(text, _TITLE_CHARACTERS))


def freeze(figure: Figure) -> None:
    """Computes the layout once; labels are placed on what it gives."""
    figure.canvas.draw()
    figure.set_layout_engine("none")


def check_path(path: str | os.PathLike[str]) -> Path:
    """Refuses a file that no figure can be written to, before anything is computed."""
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix in (".html", ".htm"):
        raise InputError("path", str(target), "HTML figures aren't there yet", "Use .png, .svg or .pdf")
    if suffix not in _FORMATS:
        raise InputError("path", str(target), "has no suffix of a known figure format", "Use .png, .svg or .pdf")
    if not os.path.isdir(target.parent):
        raise InputError("path", str(target), "is in a folder that doesn't exist", f"Make {target.parent} first")
    return target


def save(draw: Callable[[], Figure], path: str | os.PathLike[str]) -> None:
    """Draws and writes the figure; the file appears whole or not at all."""
    target = check_path(path)
    kind = _FORMATS[target.suffix.lower()]
    metadata: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    with drawing():
        figure = draw()
        try:
            with temporary.open("wb") as file:
                figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
            os.replace(temporary, target)
        except OSError as error:
            problem = f"can't be written: {error.strerror or error}"
            raise InputError("path", str(target), problem, "Choose another file") from None
        finally:
            if os.path.lexists(temporary):
                temporary.unlink()


def mark_handle(text: str, marker: str, colour: str, size: float, *, hollow: bool = False) -> Line2D:
    """A mark for a legend."""
    from matplotlib.lines import Line2D

    face = "none" if hollow else colour
    return Line2D([], [], linestyle="", marker=marker, color=colour, markersize=size, markerfacecolor=face, label=text)


class Tag(NamedTuple):
    """A label to be placed: beside the mark at (x, y), or along the line from there to `end`, all in data units."""

    text: str
    x: float
    y: float
    radius: float = 0.0  # of the mark, in points
    colour: str = BLACK
    end: tuple[float, float] | None = None
    above: bool = True
    wish: float = 0.5
    optional: bool = False


class Ink(NamedTuple):
    """What labels have to stay clear of: marks (x, y, radius in points, the text that names it), and lines."""

    marks: list[tuple[float, float, float, str]]
    lines: list[Segment]


def write_labels(axes: Axes, tags: Sequence[Tag], ink: Ink) -> None:
    """Writes labels where they overlap neither each other nor a mark and stay inside, else not; after `freeze`."""
    points = _to_points(axes)
    labels = [_label(axes, tag, points) for tag in tags]
    marks = [Mark(Box(*points(x, y), 2 * radius, 2 * radius), text) for x, y, radius, text in ink.marks]
    lines = [(points(*start), points(*end)) for start, end in ink.lines]
    for tag, chosen in zip(tags, place(labels, marks, lines, _area(axes)), strict=True):
        if chosen is not None:
            _write(axes, tag, chosen, points(tag.x, tag.y))


def _to_points(axes: Axes) -> Callable[[float, float], tuple[float, float]]:
    scale = 72 / DPI

    def points(x: float, y: float) -> tuple[float, float]:
        at = axes.transData.transform((x, y))
        return float(at[0]) * scale, float(at[1]) * scale

    return points


def _area(axes: Axes) -> Box:
    box, scale = axes.get_window_extent(), 72 / DPI
    return Box((box.x0 + box.x1) / 2 * scale, (box.y0 + box.y1) / 2 * scale, box.width * scale, box.height * scale)


def _label(axes: Axes, tag: Tag, points: Callable[[float, float], tuple[float, float]]) -> Label:
    text = axes.text(0, 0, tag.text, linespacing=1.1)
    extent, scale = text.get_window_extent(), 72 / DPI
    text.remove()
    width, height = extent.width * scale, extent.height * scale
    if tag.end is not None:
        return Label(along((points(tag.x, tag.y), points(*tag.end)), width, height, tag.wish, tag.above))
    at = points(tag.x, tag.y)
    candidates = around(at, width, height, tag.radius)
    return Label(candidates, tag.text, at, _OPTIONAL) if tag.optional else Label(candidates, tag.text, at)


def _write(axes: Axes, tag: Tag, chosen: Candidate, at: tuple[float, float]) -> None:
    leader = {"arrowstyle": "-", "lw": 0.5, "color": GREY, "shrinkA": 0, "shrinkB": tag.radius}
    axes.annotate(
        tag.text,
        (tag.x, tag.y),
        (chosen.box.x - at[0], chosen.box.y - at[1]),
        textcoords="offset points",
        ha="center",
        va="center",
        color=tag.colour,
        linespacing=1.1,
        rotation=math.degrees(chosen.box.angle),
        arrowprops=leader if chosen.leader else None,
        bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
        zorder=6,
    )


def roof_axes(axes: Axes, intensities: Sequence[float], rates: Sequence[float], roofs: Sequence[Roof]) -> None:
    """Logarithmic axes wide enough for the points, the ridges and room for labels."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ridges = [roof.ridge_intensity for roof in roofs]
    low = min(*intensities, *ridges) / 10**1.1
    high = max(*intensities, *ridges) * 10**1.1
    bottom = min(*rates, *(roof.attainable_flops_per_s(low) for roof in roofs))
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(bottom / 10**0.15, max(roof.flops_per_s for roof in roofs) * 10**0.8)
    scale, unit = (1e12, "T") if max(roof.flops_per_s for roof in roofs) >= 1e12 else (1e9, "G")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(LogLocator(subs=range(2, 10), numticks=12))
        axis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(f"Rate ({unit}FLOP/s)")
    axes.set_xlabel("Arithmetic intensity (FLOP/B)\nbytes: weights and KV cache, which must cross memory")
    axes.grid(which="major", color="#ececec", linewidth=0.5)
    axes.set_axisbelow(True)


def draw_roof(axes: Axes, roof: Roof, ink: Ink) -> list[Tag]:
    """Draws a machine's ceilings and its ridge, and returns their labels."""
    (low, high), bottom = axes.get_xlim(), axes.get_ylim()[0]
    ridge = (roof.ridge_intensity, roof.flops_per_s)
    foot = (low, roof.bandwidth_bytes_per_s * low)
    axes.plot((foot[0], ridge[0], high), (foot[1], ridge[1], ridge[1]), color=BLACK, linewidth=1.1, zorder=2)
    axes.plot((ridge[0], ridge[0]), (bottom, ridge[1]), color=BLACK, linewidth=0.5, linestyle=":", zorder=1.5)
    axes.plot(*ridge, marker="|", color=BLACK, markersize=7, markeredgewidth=1.1, zorder=2)
    ink.lines.extend([(foot, ridge), (ridge, (high, ridge[1])), ((ridge[0], bottom), ridge)])
    tags = [
        Tag(quantity(roof.bandwidth_bytes_per_s, "B/s"), *foot, end=ridge, wish=0.15),
        Tag(quantity(roof.flops_per_s, "FLOP/s"), low, ridge[1], end=(high, ridge[1]), wish=1.0),
        Tag(f"ridge {roof.ridge_intensity:.3g} FLOP/B", ridge[0], bottom * 1.3),
    ]
    measured = roof.measured_bandwidth_bytes_per_s
    if measured is not None:
        start, end = (low, measured * low), (roof.flops_per_s / measured, roof.flops_per_s)
        axes.plot(*zip(start, end, strict=True), color=BLACK, linewidth=0.8, linestyle=DASHED, zorder=2)
        ink.lines.append((start, end))
        tags.append(Tag(f"{quantity(measured, 'B/s')} measured", *start, end=end, wish=0.15, above=False))
    return tags


def draw_other_roof(axes: Axes, roof: Roof, ink: Ink) -> list[Tag]:
    """Another machine's ceilings, pale, to compare with, and their name as a label."""
    (low, high), ridge = axes.get_xlim(), (roof.ridge_intensity, roof.flops_per_s)
    foot = (low, roof.bandwidth_bytes_per_s * low)
    axes.plot((foot[0], ridge[0], high), (foot[1], ridge[1], ridge[1]), color=PALE, linewidth=1.1, zorder=1.2)
    ink.lines.extend([(foot, ridge), (ridge, (high, ridge[1]))])
    return [Tag(roof.name, low, ridge[1], end=(high, ridge[1]), wish=1.0, colour=GREY)]
