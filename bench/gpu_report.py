"""The record of bench/gpu.py as tables for people, and its last line: one JSON object without the samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from qwenjax.tables import Table
from roofline.report.units import NOTHING, milliseconds, percent, quantity

Row = Mapping[str, Any]
_STEP = ("model", "phase", "batch", "query_len", "context")


def text(record: Row) -> Iterator[str | Table]:
    """Headline, then a table for each part that was measured, then what was left out and what failed."""
    env = record["environment"]
    yield headline(record)
    yield f"{env['device']}, jax {env['jax']}, jaxlib {env['jaxlib']}, commit {env['commit']}, {env['date']}"
    yield from (f"note: {note}" for note in record["notes"])
    for part in (_ceilings, _steps, _loops, _waterfalls, _ragged, _kernels):
        yield from part(record)
    yield from (f"skipped, the budget was spent: {name}" for name in record["skipped"])
    yield from (f"failed: {case['name']}: {case['error']}" for case in record["cases"] if case["error"])


def headline(record: Row) -> str:
    """How far predictions are from what was measured, in one line."""
    found = answers(record)
    parts = [f"{len(record['rows'])} steps measured in {record['elapsed_s']:.0f} s"]
    if found["median_abs_error"] is not None:
        parts.append(
            f"predictions from measured rates off by {percent(found['median_abs_error'])} in the median, "
            f"{percent(found['max_abs_error'])} at most"
        )
    if found["gpu_free_errors"]:
        worst = max(map(abs, found["gpu_free_errors"]))
        parts.append(f"GPU-free predictions off by {percent(worst)} at most")
    return "; ".join(parts)


def answers(record: Row) -> dict[str, Any]:
    """Errors of both kinds of prediction, and the best share of the roof of a decode and a prefill step."""
    errors = [abs(row["error"]) for row in record["rows"] if row["error"] is not None]
    free = [entry["gpu_free"]["error"] for entry in record["kernels"] if entry["gpu_free"]]
    return {
        "median_abs_error": statistics.median(errors) if errors else None,
        "max_abs_error": max(errors, default=None),
        "gpu_free_errors": [error for error in free if error is not None],
        "best_mbu": max((row["mbu"] or 0 for row in record["rows"] if row["phase"] == "decode"), default=None),
        "best_mfu": max((row["mfu"] or 0 for row in record["rows"] if row["phase"] == "prefill"), default=None),
        "ragged_dot": record["answers"].get("ragged_dot"),
        "kernels": [
            {key: entry[key] for key in (*_STEP, "num_kernels", "kinds")}
            | {
                "gpu_free_kernels": entry["gpu_free"] and entry["gpu_free"]["num_kernels"],
                "gpu_free_kinds": entry["gpu_free"] and entry["gpu_free"]["kinds"],
                "problem": entry.get("problem"),
            }
            for entry in record["kernels"]
        ],
    }


def summary(record: Row, path: str) -> dict[str, Any]:
    """What fits on one line: the figures without samples."""
    env = record["environment"]
    rows = (*_STEP, "layers", "measured_s", "predicted_s", "bound_s", "error", "mfu", "mbu", "tokens_per_s")
    ceilings = ("name", "shape", "best_bytes_per_s", "best_flops_per_s", "median_s")
    return {
        "file": path,
        "status": record["status"],
        "elapsed_s": record["elapsed_s"],
        "device": env["device"],
        "driver": env["card"] and env["card"].get("driver_version"),
        **{key: env[key] for key in ("jax", "jaxlib", "commit", "date")},
        "ceilings": [{key: entry[key] for key in ceilings if key in entry} for entry in record["ceilings"]],
        "rows": [{key: row[key] for key in rows} for row in record["rows"]],
        "answers": answers(record),
        "skipped": record["skipped"],
        "failed": record["failed"],
    }


def _ceilings(record: Row) -> Iterator[Table]:
    rows = []
    for entry in record["ceilings"]:
        unit = next((unit for unit in ("bytes", "flops") if unit in entry), "")
        shown = {"bytes": "B/s", "flops": "FLOP/s"}.get(unit, "s")
        median, best = (entry[f"{which}_{unit}_per_s"] if unit else entry[f"{which}_s"] for which in ("median", "best"))
        rows.append([entry["name"], quantity(median, shown), quantity(best, shown), entry["shape"]])
    if rows:
        yield Table("Ceilings", ("what", "median", "best", "of"), rows, text=("what", "of"))


def _told(row: Row) -> list[str]:
    return [str(row[key]) for key in _STEP]


def _steps(record: Row) -> Iterator[Table]:
    rows = [
        [
            *_told(row),
            milliseconds(row["measured_s"]),
            milliseconds(row["predicted_s"]),
            NOTHING if row["error"] is None else f"{100 * row['error']:+.1f} %",
            milliseconds(row["bound_s"]),
            milliseconds(row["datasheet_bound_s"]),
            percent(row["mfu"]),
            percent(row["mbu"]),
            f"{row['tokens_per_s']:,.1f}",
        ]
        for row in record["rows"]
    ]
    columns = ("model", "phase", "batch", "new", "context", "measured ms", "predicted ms", "error", "bound ms",
               "datasheet ms", "MFU", "MBU", "tokens/s")  # fmt: skip
    if rows:
        title = f"Steps in {record['dtype']} (bound: by the ceilings above; datasheet: by the card's)"
        yield Table(title, columns, rows, text=("model", "phase"))


def _loops(record: Row) -> Iterator[Table]:
    rows = [
        [*_told(row), *(milliseconds(row[f"{way}_step_s"]) for way in ("loop", "queued", "single")),
         percent(row["host_share"])]
        for row in record["loops"]
    ]  # fmt: skip
    columns = ("model", "phase", "batch", "new", "context", "loop ms", "queued ms", "single ms", "host's share")
    if rows:
        yield Table(
            "A decode step in the device's loop, queued, and waited for", columns, rows, text=("model", "phase")
        )


def _waterfalls(record: Row) -> Iterator[Table]:
    """One table of all of them: a column a step, a row a term."""
    found = record["waterfalls"]
    names = dict.fromkeys(term["name"] for waterfall in found for term in waterfall["terms"])
    rows = []
    for name in names:
        times = [{term["name"]: term["time_s"] for term in waterfall["terms"]}.get(name) for waterfall in found]
        rows.append([name, *map(milliseconds, times)])
    rows.append(["measured", *(milliseconds(waterfall["measured_s"]) for waterfall in found)])
    columns = ("term", *(f"{waterfall['model']} {waterfall['phase']}" for waterfall in found))
    if found:
        yield Table("From the roof to the clock, ms", columns, rows, text=("term",), totals=True)


def _ragged(record: Row) -> Iterator[str | Table]:
    rows = [
        [entry["what"], entry["way"], str(entry["rows"]), milliseconds(entry["median_s"]),
         quantity(entry["needed_flops"], "FLOP"), quantity(entry["compiled_flops"], "FLOP"),
         quantity(entry["temp_bytes"], "B")]
        for entry in record["ragged_dot"]
    ]  # fmt: skip
    if rows:
        first = record["ragged_dot"][0]
        sizes = f"{first['experts']} experts of {first['hidden']} x {first['width']}"
        columns = ("what", "way", "rows", "ms", "needed", "compiled", "temporaries")
        yield Table(f"ragged_dot, {sizes}", columns, rows, text=("what", "way"))
    for found in record["answers"].get("ragged_dot", ()):
        ratio = NOTHING if found["flops_of_dense"] is None else f"{found['flops_of_dense']:.2f}"
        yield (
            f"ragged_dot on {found['rows']} rows is {found['verdict']}: {found['time_of_dense']:.2f} of the dense "
            f"product's time, {ratio} of its FLOPs"
        )


def _kernels(record: Row) -> Iterator[Table]:
    rows = []
    for entry in record["kernels"]:
        free = entry["gpu_free"] or {}
        rows.append(
            [
                *_told(entry),
                str(entry["num_kernels"]),
                str(free.get("num_kernels", NOTHING)),
                str(len(entry["differing"])) if "differing" in entry else NOTHING,
                milliseconds(free.get("measured_s")),
                milliseconds(free.get("predicted_s")),
                milliseconds(free.get("at_measured_rates_s")),
                entry.get("problem") or _kinds(entry["kinds"], free.get("kinds", {})),
            ]
        )
    columns = ("model", "phase", "batch", "new", "context", "kernels", "GPU-free", "differing", "measured ms",
               "GPU-free ms", "kinds: here / GPU-free")  # fmt: skip
    if rows:
        yield Table(
            "Kernels, autotuned here and from the GPU-free compile",
            columns,
            rows,
            text=(columns[0], columns[1], columns[-1]),
        )


def _kinds(here: Mapping[str, int], there: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {here.get(kind, 0)}/{there.get(kind, 0)}" for kind in dict.fromkeys((*here, *there)))
