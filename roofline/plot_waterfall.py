"""A waterfall as bars: each term starts where the one before it ended, and the last bar is their sum."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from roofline.plot_axes import BLACK, GREEN, GREY, SKY, VERMILLION
from roofline.report.units import quantity
from roofline.waterfall import Waterfall

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAR_INCHES = 0.2
_NOTHING_S = 5e-10  # sums of counted times differ by rounding


def waterfall_inches(waterfall: Waterfall) -> float:
    """The height that its bars, axis and title need."""
    return 0.9 + _BAR_INCHES * (len(waterfall.terms) + 1)


def draw_waterfall(axes: Axes, waterfall: Waterfall) -> None:
    """Terms as bars that start where the last one ended, milliseconds, and their sum below."""
    start = 0.0
    names = [term.name for term in waterfall.terms]
    total_s = waterfall.total_s
    for i, term in enumerate(waterfall.terms):
        colour = GREY if i == 0 else VERMILLION if term.name == "residual" else SKY if term.time_s >= 0 else GREEN
        axes.barh(i, 1e3 * term.time_s, 0.72, left=1e3 * start, color=colour, edgecolor=BLACK, linewidth=0.4)
        start += term.time_s
        end = 1e3 * max(start, start - term.time_s)
        text = quantity(term.time_s, "s") if abs(term.time_s) >= _NOTHING_S else "0 s"
        axes.annotate(text, (end, i), (3, 0), textcoords="offset points", va="center_baseline")
    axes.barh(len(names), 1e3 * total_s, 0.72, color="white", hatch="////", edgecolor=BLACK, linewidth=0.5)
    at = (1e3 * total_s, len(names))
    axes.annotate(quantity(total_s, "s"), at, (3, 0), textcoords="offset points", va="center_baseline")
    closing = "total" if waterfall.measured_s is None else "measured"
    axes.set_yticks(range(len(names) + 1), [*names, closing])
    axes.set_ylim(len(names) + 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.25e3 * max(accumulate(term.time_s for term in waterfall.terms)))  # with room for the texts
    axes.set_xlabel("Time (ms)")
    axes.spines[["top", "right"]].set_visible(False)
