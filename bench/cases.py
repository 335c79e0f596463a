"""Rows of a measurement file as questions to the predictors: times of models, of kernels, and memory.

`read_rows` turns every row into a Case, a KernelCase or a MemoryCase, or skips it with the reason; one bad row never
stops the rest. Only a file that isn't such a table at all raises InputError.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from case_fields import (
    batch_of,
    checkpoint_scheme,
    engine_of,
    gpu_of,
    length_of,
    model_of,
    positive,
    version_of,
    weights_of,
)
from case_notes import SETTINGS, Notes, read_notes
from kernel_cases import KernelCase, kernel_case
from time_cases import Run, parallelism_of, served_lengths, time_case

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.timing.case import METRICS, Case
from roofline.weight_schemes import WeightScheme, scheme_of

COLUMNS: Final = (
    "grade", "id", "model", "framework", "framework_version", "gpu", "n_gpus", "tp", "dtype_or_quant",
    "batch_or_concurrency", "input_len", "output_len", "metric", "value", "source", "note",
)  # fmt: skip
MEMORY_METRICS: Final = ("mem_gb", "kv_tokens", "kv_gib", "weights_gib")
KERNEL_METRICS: Final = ("bw_gb_s", "tflops")


class Skipped(NamedTuple):
    """A row that isn't scored, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class MemoryCase:
    """A published size: `measured` is in the metric's unit (mem_gb as the row's source counts it, see its note)."""

    id: str
    grade: str
    model: str
    config: ModelConfig
    hardware: str | None  # None: the row doesn't name it; weights can be predicted all the same
    engine: str
    engine_version: str
    weights: str
    scheme: WeightScheme  # the checkpoint's own where its name is known, else the usual one of `weights`
    metric: str
    measured: float
    tp: int
    pp: int
    batch: int
    input_len: int | None
    output_len: int | None
    kv_dtype: str | None
    notes: Notes
    source: str
    note: str


@dataclass(frozen=True)
class Rows:
    """A file, read: what can be asked, and what was left out."""

    cases: tuple[Case, ...]
    kernels: tuple[KernelCase, ...]
    memories: tuple[MemoryCase, ...]
    skipped: tuple[Skipped, ...]


def read_cases(path: Path | str) -> tuple[list[Case], list[Skipped]]:
    """The rows that time a whole model, and every other row with the reason why it isn't one."""
    rows = read_rows(path)
    others = [Skipped(case.id, "a kernel's rate, not a model's") for case in rows.kernels]
    others += [Skipped(case.id, "a size in memory, not a time") for case in rows.memories]
    return list(rows.cases), [*rows.skipped, *others]


def read_rows(path: Path | str) -> Rows:
    """Every row of a CSV of the columns COLUMNS; raises InputError where the file isn't such a table."""
    cells = list(_rows_of(Path(path)))
    lengths = served_lengths([row for _, row, problem in cells if not problem])
    cases: list[Case] = []
    kernels: list[KernelCase] = []
    memories: list[MemoryCase] = []
    skipped: list[Skipped] = []
    for name, row, problem in cells:
        try:
            if problem:
                raise _Left(problem)
            made = _read_row(name, row, lengths)
        except (_Left, InputError) as reason:
            skipped.append(Skipped(name, str(reason)))
            continue
        if isinstance(made, Case):
            cases.append(made)
        elif isinstance(made, KernelCase):
            kernels.append(made)
        else:
            memories.append(made)
    return Rows(tuple(cases), tuple(kernels), tuple(_share_settings(memories)), tuple(skipped))


def _share_settings(cases: list[MemoryCase]) -> list[MemoryCase]:
    """Sizes of one log, each with the settings that only one of its rows may state."""

    def run(case: MemoryCase) -> tuple[Any, ...]:
        return case.source, case.model, case.engine_version, case.hardware, case.weights, case.tp, case.pp

    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case in cases:
        given = {name: value for name in SETTINGS if (value := getattr(case.notes, name)) is not None}
        known[run(case)] = given | known.get(run(case), {})
    return [replace(case, notes=replace(case.notes, **_unsaid(case.notes, known[run(case)]))) for case in cases]


def _unsaid(notes: Notes, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if getattr(notes, name) is None}


class _Left(Exception):
    """A row that is left out, though nothing in it is wrong."""


def _rows_of(path: Path) -> Iterator[tuple[str, dict[str, str], str]]:
    """Each row's name, its cells and what is wrong with its form."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.reader(file))
    except OSError as error:
        raise InputError(str(path), None, f"can't be read: {error.strerror}", "Name a CSV file") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(str(path), None, f"isn't a CSV text: {error}", "Save it as UTF-8") from None
    if not lines:
        raise InputError(str(path), None, "is empty", f"Its first line names the columns {', '.join(COLUMNS)}")
    header = [cell.strip() for cell in lines[0]]
    for column in COLUMNS:
        if column not in header:
            raise InputError(f"{path}: {column}", None, "is a column that is missing", f"Found: {', '.join(header)}")
    for number, line in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in line):
            continue
        rejoined = _rejoin(header, line)
        row = dict(zip(header, rejoined, strict=False))
        problem = "" if len(rejoined) == len(header) else f"has {len(line)} cells under {len(header)} columns"
        yield row.get("id", "").strip() or f"line {number}", row, problem


def _rejoin(header: list[str], line: list[str]) -> list[str]:
    """A source with an unquoted comma in brackets, put together again where it is the column before the last."""
    over, place = len(line) - len(header), len(header) - 2
    if over < 1 or header[-2:] != ["source", "note"] or line[place].count("(") <= line[place].count(")"):
        return line
    return [*line[:place], ",".join(line[place : place + over + 1]), *line[place + over + 1 :]]


def _read_row(
    name: str, row: Mapping[str, str], lengths: Mapping[Run, tuple[int, int]]
) -> Case | KernelCase | MemoryCase:
    grade = row["grade"].strip().upper()
    if grade == "C":
        raise _Left("grade C, which isn't scored")
    if grade not in ("A", "B"):
        raise InputError("grade", row["grade"] or None, "is not one of A, B and C", "Grade the row")
    metric = row["metric"].strip()
    if metric in KERNEL_METRICS:
        _leave_hardware_rows(row)
        return kernel_case(name, grade, row, positive("value", row["value"]))
    if metric in MEMORY_METRICS:
        return _memory_case(name, grade, row)
    if metric not in METRICS:
        known = (*METRICS, *MEMORY_METRICS, *KERNEL_METRICS)
        raise InputError("metric", row["metric"] or None, "is not a known metric", f"Known: {', '.join(known)}")
    return time_case(name, grade, row, metric, lengths)


def _leave_hardware_rows(row: Mapping[str, str]) -> None:
    if "model-bandwidth" in row["note"] or row["framework"].startswith("gpt-fast"):
        raise _Left("the tokens/s of another row times the model's bytes: it would count one run twice")
    if row["model"].strip() == "(hardware)" and "GEMM M=" not in row["note"]:
        raise _Left("a figure of the card alone (datasheet, stream or best matmul), not of a kernel of a step")


def _memory_case(name: str, grade: str, row: Mapping[str, str]) -> MemoryCase:
    engine = engine_of(row["framework"])
    notes = read_notes(row, engine, row["metric"])
    if re.match(r"\s*-", row["value"]):
        raise _Left("a negative pool: what is missing for the engine to start, not a size")
    measured = positive("value", row["value"])
    config = model_of(row["model"])
    tp, pp = parallelism_of(row, engine, notes)
    weights, kv_dtype, _ = weights_of(row["dtype_or_quant"])
    try:
        chip = gpu_of(row["gpu"], row["source"]).id
    except InputError:
        if row["metric"] != "weights_gib":  # the others depend on the card
            raise
        chip = None
    cell = row["batch_or_concurrency"]
    return MemoryCase(
        id=name, grade=grade, model=row["model"].strip(), config=config, hardware=chip, engine=engine,
        engine_version=version_of(row["framework_version"], row["source"]), weights=weights,
        scheme=checkpoint_scheme(row["model"]) or scheme_of(weights), metric=row["metric"].strip(),
        measured=measured, tp=tp, pp=pp, batch=batch_of(cell).concurrency if cell.strip() else 1,
        input_len=length_of("input_len", row["input_len"]), output_len=length_of("output_len", row["output_len"]),
        kv_dtype=kv_dtype, notes=notes, source=row["source"].strip(), note=row["note"].strip(),
    )  # fmt: skip
