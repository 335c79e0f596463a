"""What was measured here: a calibration, and steps set against it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwenjax.tables import Table
from roofline.hardware import Hardware
from roofline.report.units import milliseconds, percent, quantity
from roofline.report.waterfall import waterfall_table

if TYPE_CHECKING:
    from roofline.compare import Comparison


def calibration_record(chip: Hardware, path: Path) -> dict[str, Any]:
    figures = {name: figure.value for name, figure in chip.figures.items()}
    return {
        "hardware": chip.id,
        "device": chip.name,
        "file": str(path),
        "figures": figures,
        "measured": dict(chip.measured),
    }


def calibration_text(record: dict[str, Any]) -> Iterator[str | Table]:
    figures, measured = record["figures"], record["measured"]
    yield f"{record['device']} reads {quantity(figures['peak_bandwidth_bytes_per_s'], 'B/s')}; kept in {record['file']}"
    peaks = [
        [name.removeprefix("peak_flops_per_s."), quantity(value, "FLOP/s")]
        for name, value in figures.items()
        if name.startswith("peak_flops_per_s.")
    ]
    yield Table("Best matrix product", ("dtype", "rate"), peaks, text=("dtype",))
    for dtype, entries in measured["products"].items():
        shapes = list(dict.fromkeys((entry["columns"], entry["summands"]) for entry in entries))
        rates = {(entry["rows"], entry["columns"], entry["summands"]): entry["flops_per_s"] for entry in entries}
        rows = [
            [str(count), *(quantity(rates.get((count, *shape)), "FLOP/s") for shape in shapes)]
            for count in dict.fromkeys(entry["rows"] for entry in entries)
        ]
        yield Table(
            f"{dtype} products of [rows, summands] and a weight", ("rows", *(f"{c} x {s}" for c, s in shapes)), rows
        )
    fixed = [
        ["launch of one small op", quantity(measured["launch_s"], "s")],
        ["call of a compiled function", quantity(measured["dispatch_s"], "s")],
        *([f"{name} (bytes in and out)", quantity(rate, "B/s")] for name, rate in measured["elementwise"].items()),
    ]
    yield Table("Fixed costs and elementwise ops", ("what", "figure"), fixed, text=("what",))


def compare_record(result: Comparison, chip: Hardware, plot: str | None) -> dict[str, Any]:
    record = dict(vars(result))
    calibration = {
        "file": chip.id,
        "date": chip.measured["environment"]["date"],
        "peak_bandwidth_bytes_per_s": chip.peak_bandwidth_bytes_per_s,
        "peak_flops_per_s": chip.flops_per_s(result.dtype),
    }
    return record | {"hardware": chip.id, "calibration": calibration, "plot": plot}


def compare_text(record: dict[str, Any]) -> Iterator[str | Table]:
    env = record["environment"]
    yield (
        f"{record['model']} in {record['dtype']} on {env['device']}: predictions are off by "
        f"{percent(record['median_abs_error'])} in the median, {percent(record['max_abs_error'])} at most"
    )
    yield f"{record['layers']} layers; jax {env['jax']}, jaxlib {env['jaxlib']}, Python {env['python']}, {env['date']}"
    yield from (f"note: {note}" for note in record["notes"])
    rows = [
        [
            row.phase,
            str(row.batch),
            str(row.query_len),
            str(row.context),
            milliseconds(row.measured_s),
            milliseconds(row.predicted_s),
            f"{100 * row.error:+.1f} %",
            milliseconds(row.bound_s),
            percent(row.mfu),
            percent(row.mbu),
            f"{row.batch * row.query_len / row.measured_s:,.1f}",
        ]
        for row in record["rows"]
    ]
    columns = (
        "phase",
        "batch",
        "new",
        "context",
        "measured ms",
        "predicted ms",
        "error",
        "bound ms",
        "MFU",
        "MBU",
        "tokens/s",
    )
    yield Table("Steps (bound: the roof that calibrate measured)", columns, rows, text=("phase",))
    yield from _split(record["ops"])
    yield from map(waterfall_table, record["waterfalls"])
    if record["plot"]:
        yield f"plot: {record['plot']}"


def _split(parts: Any) -> Iterator[Table]:
    for step in dict.fromkeys((part.phase, part.batch, part.query_len, part.context) for part in parts):
        mine = [part for part in parts if (part.phase, part.batch, part.query_len, part.context) == step]
        total = sum(part.measured_s for part in mine) or 1.0
        rows = [
            [part.op, milliseconds(part.measured_s), percent(part.measured_s / total), milliseconds(part.predicted_s)]
            for part in mine
        ]
        phase, batch, new, context = step
        title = f"Where the time of a {phase} went (batch {batch}, {new} new of {context} tokens)"
        yield Table(title, ("ops", "measured ms (profiler's share)", "share", "predicted ms"), rows, text=("ops",))
