"""Tables of kernel times: what a row is, and how a CSV file of a known form is read and checked."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qwenjax.errors import InputError
from roofline.hardware import Hardware
from roofline.timing.efficiency import Efficiency

Columns = dict[str, Any]
Run = Callable[[Columns, Hardware, Efficiency, dict[str, Any]], Any]


@dataclass
class Table:
    """Rows of one kind of kernel: what they are, what they took, and the function that predicts them together."""

    file: str
    kernel: str
    group: str  # of the efficiency constants
    run: Run
    lines: list[int]
    columns: Columns
    measured_s: Any
    size: str  # the column that rows are grouped by
    shape: tuple[str, ...] = ()  # the columns that name a shape, for leaving shapes out
    cache: dict[str, Any] = field(default_factory=dict)

    def predict_s(self, chip: Hardware, eff: Efficiency) -> Any:
        """Seconds of every row, with weights and cache as the benchmark left them in L2."""
        return self.run(self.columns, chip, eff, self.cache)

    def take(self, index: Any) -> Table:
        columns = {name: values[index] for name, values in self.columns.items()}
        lines = list(np.array(self.lines)[index])
        return Table(
            self.file, self.kernel, self.group, self.run, lines, columns, self.measured_s[index], self.size, self.shape
        )


@dataclass(frozen=True)
class Skipped:
    """A row that can't be used, by file and line, and why."""

    file: str
    line: int
    reason: str


@dataclass
class Rows:
    """The rows of a file that can be used: lines, columns and seconds."""

    lines: list[int]
    columns: Columns
    seconds: Any

    def where(self, mask: Any) -> Rows:
        lines = list(np.array(self.lines)[mask])
        return Rows(lines, {name: values[mask] for name, values in self.columns.items()}, self.seconds[mask])


@dataclass(frozen=True)
class Source:
    """A file that was read: its rows, the model it is of, and how its routing was made."""

    file: str
    rows: Rows
    model: str
    crowded: bool

    def table(self, kernel: str, group: str, run: Run, rows: Rows, size: str, shape: tuple[str, ...] = ()) -> Table:
        return Table(self.file, kernel, group, run, rows.lines, rows.columns, rows.seconds, size, shape)


@dataclass(frozen=True)
class Form:
    """The columns of a file and the function that makes tables of it."""

    numbers: tuple[str, ...]  # whole, and not below the least
    texts: tuple[str, ...]
    time: str  # microseconds
    build: Callable[[Source, list[Skipped]], list[Table]]
    least: int = 1


def read_rows(path: Path, form: Form, skipped: list[Skipped]) -> Rows:
    """The rows that can be used; the others are added to `skipped`. InputError where the columns are others."""
    wanted = (*form.texts, *form.numbers, form.time)
    try:
        with path.open(newline="", encoding="utf-8") as handle:
            reader = csv.DictReader(handle)
            header = tuple(reader.fieldnames or ())
            if sorted(header) != sorted(wanted):
                remedy = f"A file of this name has the columns {', '.join(wanted)}"
                raise InputError(str(path), ", ".join(header), "has other columns", remedy)
            entries = list(enumerate(reader, start=2))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(path), None, f"can't be read: {error}", "Give a CSV file in UTF-8") from None
    kept: list[tuple[int, dict[str, Any]]] = []
    for line, entry in entries:
        reason = _fault(entry, form)
        if reason:
            skipped.append(Skipped(path.name, line, reason))
        else:
            kept.append((line, entry))
    columns: Columns = {name: np.array([float(entry[name]) for _, entry in kept]) for name in form.numbers}
    columns |= {name: np.array([entry[name] for _, entry in kept]) for name in form.texts}
    return Rows([line for line, _ in kept], columns, np.array([float(entry[form.time]) * 1e-6 for _, entry in kept]))


def _fault(entry: Mapping[str, Any], form: Form) -> str:
    """Why a row can't be used, empty where it can."""
    if None in entry or any(value is None for value in entry.values()):
        return "has more or fewer cells than the header"
    for name in (*form.numbers, form.time):
        try:
            value = float(entry[name])
        except ValueError:
            return f"{name} = {entry[name]!r} is not a number"
        least = form.least if name in form.numbers else 0.0
        if not math.isfinite(value) or value < least or (name == form.time and value <= 0):
            return f"{name} = {entry[name]} is out of range"
        if name in form.numbers and value != int(value):
            return f"{name} = {entry[name]} is not a whole number"
    return ""
