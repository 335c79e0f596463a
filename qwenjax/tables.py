"""Text of both commands: headlines and aligned tables of strings, never cut, without colour unless on a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import NamedTuple

_GAP = 2  # between columns
_LEAST_PROSE = 40  # characters, where a last column of text is longer than that
_UNLIMITED = 1_000_000


class Table(NamedTuple):
    """A titled table of strings. Columns named in `text` are left-aligned; a last one that is text may wrap."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Sequence[str] = ()
    totals: bool = False  # the last row sums the others


def render(blocks: Iterable[str | Table], width: int | None = None) -> str:
    """Lines of text, and tables with an empty line before each. `width` is a terminal's; None: plain and unwrapped."""
    return "".join(_table(block, width) if isinstance(block, Table) else f"{block}\n" for block in blocks)


def _table(table: Table, width: int | None) -> str:
    from rich.console import Console  # about 60 ms, which only those who print a table need to pay
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for column in table.columns:
        is_text = column in table.text
        wraps = is_text and column == table.columns[-1]
        drawn.add_column(Text(column), justify="left" if is_text else "right", no_wrap=not wraps, overflow="fold")
    for number, row in enumerate(table.rows, start=1):
        last = table.totals and number == len(table.rows)
        drawn.add_row(*map(Text, row), style="bold" if last else None)
    file = StringIO()
    console = Console(
        file=file,
        # Figures stay whole: better a line that the terminal wraps than digits that are gone.
        width=_UNLIMITED if width is None else max(width, _least_width(table)),
        force_terminal=width is not None,
        color_system=None if width is None else "auto",
        legacy_windows=False,
    )
    console.print(Text(table.title, style="bold"))
    console.print(drawn)
    lines = file.getvalue().splitlines()
    return "\n" + "".join(f"{line.rstrip()}\n" for line in lines)


def _least_width(table: Table) -> int:
    """Characters that a line needs so that no cell but the prose of a last column is broken."""
    widths = [max(map(len, cells)) for cells in zip(table.columns, *table.rows, strict=True)]
    if table.columns[-1] in table.text:
        widths[-1] = min(widths[-1], _LEAST_PROSE)
    return sum(widths) + _GAP * (len(widths) - 1)
