"""Scores kernel times against a folder of measured ones: `python bench/score_kernels.py FOLDER [--chip ID] [--json]`.

FOLDER has the files of ../shared/measurements/kernels/CHIP; its name says the chip, unless --chip does. Weights and
caches are taken to stay in L2 between calls as far as they fit, as in those benchmarks. Prints median and 90th
percentile of |error| by kernel, by size and, where a folder has every kernel of a model, for whole steps; the worst
rows; and what was skipped. `--json` prints one object: rows [{id, predicted, low, high, measured, error, skipped}] in
seconds, groups [{by, key, n, median_abs_error, p90_abs_error, inside_interval}], total.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from error_groups import Group, group_of
from kernel_csv import Skipped, Table
from kernel_steps import step_sums
from kernel_tables import chip_of, read_folder

from qwenjax.errors import InputError
from qwenjax.tables import Table as Printed
from qwenjax.tables import render
from roofline.hardware import Hardware
from roofline.timing.efficiency import load_efficiency, load_interval

_WORST: Final = 15
_SIZES: Final = (1, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class Row:
    """One kernel time: predicted and measured seconds, the interval, or why there is no prediction."""

    id: str
    kernel: str
    size: str
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    skipped: str | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1

    def record(self) -> dict[str, Any]:
        names = ("id", "predicted", "low", "high", "measured", "error", "skipped")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Score:
    """A folder's rows and groups, and where the constants came from."""

    provenance: str
    rows: list[Row]
    groups: list[Group]
    total: Group

    def record(self) -> dict[str, Any]:
        rows = [row.record() for row in self.rows]
        groups = [group.record() for group in self.groups]
        return {"provenance": self.provenance, "rows": rows, "groups": groups, "total": self.total.record()}


def score_folder(folder: Path, chip_name: str | None = None) -> Score:
    """Predicts every row of a folder; InputError where the folder, a file or the chip can't be used."""
    chip = chip_of(folder, chip_name)
    efficiency, provenance = load_efficiency(chip)
    tables, skipped = read_folder(folder, efficiency.moe.crowds_first_rank)
    rows: list[Row] = []
    for table in tables:
        rows += _predicted(table, chip, table.predict_s(chip, efficiency), efficiency.sources)
    rows += [_left_out(row) for row in skipped]
    groups = [_group("kernel", key, chosen) for key, chosen in _by(rows, "kernel")]
    groups += [_group("size", key, chosen) for key, chosen in _by(rows, "size")]
    for key, pairs in step_sums(tables, chip, efficiency).items():
        groups.append(group_of("step", key, [predicted / measured - 1 for predicted, measured in pairs]))
    return Score(provenance, rows, groups, _group("total", "all", rows))


def _predicted(table: Table, chip: Hardware, seconds: Any, sources: Sequence[tuple[str, str]]) -> list[Row]:
    low, high = load_interval(dict(sources)[table.group], table.group, chip.id)
    sizes = table.columns[table.size]
    return [
        Row(
            f"{table.file}:{line}", table.kernel, f"{table.kernel}, {table.size} {_class(size)}",
            float(time), float(time * low), float(time * high), float(measured),
        )
        for line, size, time, measured in zip(table.lines, sizes, seconds, table.measured_s, strict=True)
    ]  # fmt: skip


def _class(size: float) -> str:
    """A class that a size belongs to, by powers of four."""
    top = next((limit for limit in _SIZES if size <= limit), None)
    return f"over {_SIZES[-1]}" if top is None else f"to {top}"


def _left_out(row: Skipped) -> Row:
    return Row(f"{row.file}:{row.line}", "", "", skipped=row.reason)


def _by(rows: Iterable[Row], name: str) -> list[tuple[str, list[Row]]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.error is not None:
            found.setdefault(getattr(row, name), []).append(row)
    return list(found.items())


def _group(by: str, key: str, rows: Sequence[Row]) -> Group:
    inside = [
        row.low <= row.measured <= row.high
        for row in rows
        if row.low is not None and row.high is not None and row.measured is not None
    ]
    return group_of(by, key, [row.error for row in rows if row.error is not None], inside)


def text(score: Score, worst: int = _WORST) -> str:
    """The score as tables."""
    scored = [row for row in score.rows if row.error is not None]
    skipped = [row for row in score.rows if row.skipped]
    blocks: list[str | Printed] = [f"{len(scored)} rows scored, {len(skipped)} skipped. {score.provenance}"]
    dimensions = dict.fromkeys(group.by for group in score.groups)
    blocks += [_table(by, [group for group in score.groups if group.by == by], score.total) for by in dimensions]
    scored.sort(key=lambda row: -abs(row.error or 0.0))
    lines = [
        (row.id, row.size, f"{row.error:+.0%}", f"{(row.predicted or 0) * 1e6:.1f}", f"{(row.measured or 0) * 1e6:.1f}")
        for row in scored[:worst]
    ]
    columns = ("row", "kernel", "error", "predicted us", "measured us")
    blocks.append(Printed("Worst rows", columns, lines, text=("row", "kernel")))
    if skipped:
        reasons = [(row.id, row.skipped or "") for row in skipped]
        blocks.append(Printed("Skipped rows", ("row", "reason"), reasons, text=("row", "reason")))
    return render(blocks)


def _table(by: str, groups: Sequence[Group], total: Group) -> Printed:
    lines = [
        (group.key, str(group.n), *map(_share, (group.median_abs_error, group.p90_abs_error, group.inside_interval)))
        for group in ([*groups, total] if by == "kernel" else groups)
    ]
    columns = (by, "n", "median |error|", "p90 |error|", "inside interval")
    return Printed(f"By {by}", columns, lines, text=(by,), totals=by == "kernel")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def main(argv: Sequence[str] | None = None) -> int:
    """Scores one folder; 2 where it can't be used."""
    parser = argparse.ArgumentParser(description="Score kernel times against a folder of measured ones.")
    parser.add_argument("folder", type=Path, help="a folder such as measurements/kernels/a100-sxm4-80gb")
    parser.add_argument("--chip", metavar="ID", help="the chip, where the folder's name doesn't say it")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args(argv)
    try:
        score = score_folder(options.folder, options.chip)
    except InputError as problem:
        print(problem, file=sys.stderr)
        return 2
    print(json.dumps(score.record()) if options.json else text(score), end="\n" if options.json else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
