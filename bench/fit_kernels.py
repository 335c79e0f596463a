"""Fits the kernel constants of each chip that has kernel times: `python bench/fit_kernels.py ../shared/measurements`.

That folder holds kernels/ with one folder for each chip, and published.csv, whose kernel rows serve where there is no
such folder. Writes roofline/data/efficiency/CHIP.toml, the same bytes each time: constants with unit and bounds, what
they were fitted on, the error there and on rows and shapes that a fit didn't see (each half from the other; a quarter
of the shapes from the rest). numpy only.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from error_groups import Group, group_of
from kernel_csv import Table
from kernel_least_squares import Bounds, fit_log
from kernel_published import published_tables
from kernel_starts import KERNELS, SOURCES, STARTS, WEIGHTS
from kernel_tables import chip_of, read_folder

from qwenjax.errors import InputError
from roofline.hardware import Hardware, load_hardware
from roofline.timing.efficiency import GROUPS, Efficiency

_HEAD: Final = "# Written by bench/fit_kernels.py from published kernel times; change what it fits, not this.\n"
_DIGITS: Final = 4
_FIT_ROWS: Final = 3000  # of a table, drawn by lot: fifteen constants don't need more
_HELD_OUT_ROWS: Final = 1500
_QUARTERS: Final = 4
_TAIL: Final = 0.1  # of the rows that lie below the interval, and above it


class GroupFit:
    """One group of constants of one chip, fitted to the tables of its kernels."""

    def __init__(self, chip: Hardware, group: str, tables: Sequence[Table]) -> None:
        self.chip, self.group, self.tables = chip, group, list(tables)
        fields = [field for field in dataclasses.fields(GROUPS[group]) if "low" in field.metadata]
        self.fields = {field.name: field.metadata for field in fields}
        self.start = STARTS[chip.id][group]
        if set(self.start) != set(self.fields):
            raise InputError(f"{chip.id} {group}", sorted(self.start), "has other constants", "Start each of them once")
        self.bounds = [Bounds(meta["low"], meta["high"]) for meta in self.fields.values()]
        self.kernel = KERNELS.get((chip.id, group), {})

    def efficiency(self, values: Sequence[float]) -> Efficiency:
        fitted = GROUPS[self.group](**dict(zip(self.fields, map(float, values), strict=True)), **self.kernel)
        nothing: dict[str, Any] = dict.fromkeys(GROUPS)
        return Efficiency(**(nothing | {self.group: fitted}))

    def log_ratio(self, tables: Sequence[Table], values: Sequence[float]) -> Any:
        """Logarithms of predicted over measured, table after table."""
        efficiency = self.efficiency(values)
        return np.concatenate([np.log(t.predict_s(self.chip, efficiency) / t.measured_s) for t in tables])

    def fit(self, tables: Sequence[Table], most_rows: int) -> list[float]:
        tables = [_drawn(table, most_rows) for table in tables if len(table.lines)]
        weights = np.concatenate([_weights(table) for table in tables])
        start = [self.start[name] for name in self.fields]
        tie = 0.02 if sum(len(table.lines) for table in tables) < 100 else 1e-4
        values = fit_log(lambda values: self.log_ratio(tables, values), start, self.bounds, weights, tie)
        return [float(f"{value:.{_DIGITS}g}") for value in values]

    def held_out(self, folds: Sequence[Sequence[Any]]) -> Any:
        """Log ratios of the rows of each fold, from constants fitted without it; a fold has a mask for each table."""
        found = []
        for masks in folds:
            pairs = list(zip(self.tables, masks, strict=True))
            kept = [table.take(~mask) for table, mask in pairs if (~mask).any()]
            left = [table.take(mask) for table, mask in pairs if mask.any()]
            if kept and left:
                found.append(self.log_ratio(left, self.fit(kept, _HELD_OUT_ROWS)))
        return np.concatenate(found) if found else np.zeros(0)

    def halves(self) -> list[list[Any]]:
        masks = [np.random.default_rng(0).permutation(len(table.lines)) % 2 == 0 for table in self.tables]
        return [masks, [~mask for mask in masks]]

    def quarters(self) -> list[list[Any]]:
        """A quarter of the shapes each, by a hash of what names them; none where rows have no shape."""
        if not all(table.shape for table in self.tables):
            return []
        part = [_parts(table) for table in self.tables]
        return [[mask == index for mask in part] for index in range(_QUARTERS)]


def _weights(table: Table) -> Any:
    """Of each row: a single row of activations has a kernel of its own and is what one user's decode runs."""
    single = table.columns.get("m", np.zeros(len(table.lines))) == 1
    return WEIGHTS.get(table.kernel, 1.0) * (1.0 + 9.0 * single)


def _parts(table: Table) -> Any:
    names = zip(*(table.columns[name] for name in table.shape), strict=True)
    keys = ["/".join(f"{value:g}" for value in shape) for shape in names]
    return np.array([zlib.crc32(key.encode()) % _QUARTERS for key in keys])


def _drawn(table: Table, most: int) -> Table:
    if len(table.lines) <= most:
        return table
    return table.take(np.sort(np.random.default_rng(0).permutation(len(table.lines))[:most]))


def group_text(fit: GroupFit) -> str:
    """One group of a chip's file: constants, what they were fitted on, and their errors."""
    values = fit.fit(fit.tables, _FIT_ROWS)
    own, halves, shapes = fit.log_ratio(fit.tables, values), fit.held_out(fit.halves()), fit.held_out(fit.quarters())
    low, high = np.quantile(np.exp(-halves), (_TAIL, 1 - _TAIL))
    lines = [f"[{fit.group}]", f'source = "{SOURCES[fit.chip.id]}"']
    told = [("own_rows", own), ("held_out_halves", halves), ("held_out_shapes", shapes)]
    lines += [f"{name} = {_errors(_errors_of(ratio))}" for name, ratio in told if len(ratio)]
    lines.append(f"interval = {{ low = {low:.3f}, high = {high:.3f} }} # 80 % of held-out measured over predicted")
    lines += ["", f"[{fit.group}.constants]"]
    for (name, meta), value in zip(fit.fields.items(), values, strict=True):
        bounds = f"low = {meta['low']:g}, high = {meta['high']:g}"
        lines.append(
            f'{name} = {{ value = {value:g}, unit = "{meta["unit"]}", {bounds}, meaning = "{meta["meaning"]}" }}'
        )
    if fit.kernel:
        lines += ["", f"[{fit.group}.kernel]"]
        lines += [f"{name} = {str(value).lower()}" for name, value in fit.kernel.items()]
    lines += ["", f"[{fit.group}.errors]"]
    place = 0
    for table in fit.tables:
        errors = _errors_of(own[place : place + len(table.lines)])
        place += len(table.lines)
        lines.append(f'"{table.kernel}" = {_errors(errors)}')
    print(f"{fit.chip.id} {fit.group}: " + ", ".join(f"{n} {_percent(_errors_of(r))}" for n, r in told if len(r)))
    return "\n".join(lines) + "\n"


def _errors_of(log_ratio: Any) -> Group:
    """Errors of predicted over measured, given as logarithms."""
    return group_of("", "", (np.exp(log_ratio) - 1).tolist())


def _errors(errors: Group) -> str:
    median, p90 = errors.median_abs_error, errors.p90_abs_error
    return f"{{ rows = {errors.n}, median_abs_error = {median:.4f}, p90_abs_error = {p90:.4f} }}"


def _percent(errors: Group) -> str:
    return f"{errors.median_abs_error:.1%}/{errors.p90_abs_error:.1%} of {errors.n}"


def fit_tables(chip: Hardware, tables: Sequence[Table]) -> str:
    """The text of a chip's file, from the tables of its kernels."""
    head = _HEAD
    groups = [GroupFit(chip, group, [table for table in tables if table.group == group]) for group in STARTS[chip.id]]
    return head + "\n" + "\n".join(group_text(fit) for fit in groups)


def read_tables(folder: Path, published: Mapping[str, Sequence[Table]]) -> dict[str, list[Table]]:
    """The tables of every chip: those of its folder, and published rows of a kind that no folder has."""
    found: dict[str, list[Table]] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        chip = chip_of(path)
        if chip.id not in STARTS:
            remedy = f"Add them to bench/kernel_starts.py. Known: {', '.join(STARTS)}"
            raise InputError("chip", chip.id, "has no starting values", remedy)
        crowded = bool(KERNELS.get((chip.id, "moe"), {}).get("crowds_first_rank"))
        found[chip.id], skipped = read_folder(path, crowded)
        for row in skipped:
            print(f"skipped {row.file}:{row.line}: {row.reason}", file=sys.stderr)
    for name, tables in published.items():
        if name not in STARTS:
            continue
        own = found.setdefault(name, [])
        had = {table.group for table in own}
        own += [table for table in tables if table.group not in had or "packed" in table.kernel]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Fits every chip and writes the files; 2 where the measurements can't be used."""
    parser = argparse.ArgumentParser(description="Fit kernel constants to kernel times.")
    parser.add_argument("measurements", type=Path, help="the folder that holds kernels/ and published.csv")
    parser.add_argument("--only", metavar="ID", help="one chip")
    default = Path(__file__).resolve().parent.parent / "roofline" / "data" / "efficiency"
    parser.add_argument("-o", "--output", type=Path, default=default, help="where the files go")
    options = parser.parse_args(argv)
    try:
        published = published_tables(options.measurements / "published.csv")
        for chip, tables in read_tables(options.measurements / "kernels", published).items():
            if options.only in (None, chip):
                text = fit_tables(load_hardware(chip), tables)
                (options.output / f"{chip}.toml").write_text(text, encoding="utf-8")
    except (InputError, OSError) as problem:
        print(problem, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
