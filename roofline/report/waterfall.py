"""A waterfall's terms as a table: each, what the sum is by then, and where the figure comes from."""

from __future__ import annotations

from qwenjax.tables import Table
from roofline.report.units import milliseconds, percent
from roofline.waterfall import Waterfall


def waterfall_table(waterfall: Waterfall) -> Table:
    """The terms in order, milliseconds; the last row is their sum."""
    rows = []
    sum_s = 0.0
    for term in waterfall.terms:
        sum_s += term.time_s
        rows.append(
            [
                term.name,
                milliseconds(term.time_s),
                milliseconds(sum_s),
                percent(term.time_s / waterfall.total_s),
                term.source,
                term.note,
            ]
        )
    closing = "measured (median)" if waterfall.measured_s is not None else "what this program must take"
    rows.append(["total", milliseconds(waterfall.total_s), "", percent(1.0), closing, ""])
    columns = ("term", "ms", "sum, ms", "share", "source", "what it is")
    return Table(title(waterfall), columns, rows, text=("term", "source", "what it is"), totals=True)


def title(waterfall: Waterfall) -> str:
    """Which step it is: "Waterfall of a decode (batch 1, 1 new of 512 tokens)"."""
    step = f"batch {waterfall.batch}, {waterfall.query_len} new of {waterfall.context} tokens"
    return f"Waterfall of a {waterfall.phase} ({step})"
