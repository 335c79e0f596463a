"""What a reader sees of a figure: where its texts lie, and that none is in the way of another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any


def outline(text: Any) -> Any:
    """The rectangle that a text covers on the canvas, turned as the text is."""
    from matplotlib.path import Path as Polygon
    from matplotlib.text import Text

    whole, angle = Text.get_window_extent(text), text.get_rotation()  # an annotation's own has its leader in it
    text.set_rotation(0)
    level = Text.get_window_extent(text)
    text.set_rotation(angle)
    x, y, turn = (whole.x0 + whole.x1) / 2, (whole.y0 + whole.y1) / 2, math.radians(angle)
    corners = [
        (
            x + sx * level.width / 2 * math.cos(turn) - sy * level.height / 2 * math.sin(turn),
            y + sx * level.width / 2 * math.sin(turn) + sy * level.height / 2 * math.cos(turn),
        )
        for sx, sy in ((-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1))
    ]
    return Polygon(corners, closed=True)


def shown_texts(figure: Any) -> list[Any]:
    from matplotlib.text import Text

    figure.canvas.draw()  # makes the tick labels
    hidden = [label for axes in figure.findobj(is_axes) for label in labels_beyond(axes)]
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    return [text for text in texts if not any(text is other for other in hidden)]


def is_axes(artist: Any) -> bool:
    return hasattr(artist, "get_xscale")


def labels_beyond(axes: Any) -> Iterator[Any]:
    """Labels of ticks outside the limits, which matplotlib keeps but doesn't draw."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = sorted(axis.get_view_interval())
        for tick in axis.get_major_ticks() + axis.get_minor_ticks():
            if not low <= tick.get_loc() <= high:
                yield from (tick.label1, tick.label2)


def overlaps(texts: list[Any]) -> list[tuple[str, str]]:
    outlines = [outline(text) for text in texts]
    return [
        (texts[i].get_text(), texts[j].get_text())
        for i, j in itertools.combinations(range(len(texts)), 2)
        if outlines[i].intersects_path(outlines[j], filled=True)
    ]


def check_labels(figure: Any) -> int:
    """Labels lie within their axes, on no other label and on no mark; returns how many there are."""
    figure.canvas.draw()
    count = 0
    for axes in figure.findobj(is_axes):
        if axes.get_xscale() != "log":
            continue
        labels = [text for text in axes.texts if text.get_text()]
        count += len(labels)
        assert overlaps(labels) == []
        area = axes.get_window_extent()
        marks = [line for line in axes.lines if line.get_marker() in ("o", "s", "^", "D")]
        for label in labels:
            for x, y in outline(label).vertices:
                assert area.x0 <= x <= area.x1, label.get_text()
                assert area.y0 <= y <= area.y1, label.get_text()
            for mark in marks:
                at = axes.transData.transform((mark.get_xdata()[0], mark.get_ydata()[0]))
                assert not outline(label).contains_point(at), label.get_text()
    return count


def check_page(figure: Any) -> None:
    """Every text is readable, clear of the others and on the page, which is as wide as two columns."""
    texts = shown_texts(figure)
    assert overlaps(texts) == []
    assert min(text.get_fontsize() for text in texts) >= 7
    page, drawn = figure.get_figwidth(), figure.get_tightbbox()
    assert page == 7
    assert min(drawn.x0, drawn.y0) >= 0
    assert drawn.x1 <= page
    assert drawn.y1 <= figure.get_figheight()
