"""Everything that must stay fast, in one table: compiled GPU steps, the CPU, the loader, whole processes, a sweep.

`python bench/run.py [--only steps,cpu,processes]` prints a table with each figure beside its bound and one line of JSON
with all of it and the commit. A part whose tools aren't installed is left out with a word why. Ends with status 1 if a
figure is beyond its bound. Times are this machine's: run it while nothing else does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import cpu
from step_bounds import figures, jobs

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.tables import Table, render
from roofline.hardware import known_ids
from roofline.kernels import compile_jobs
from roofline.measure import environment
from roofline.predict import sweep

_RUNS = 5
_PROCESSES = (  # what is started, its words, the most seconds it may take
    ("import roofline", ("-c", "import roofline"), 0.15),
    ("roofline params", ("-m", "roofline", "params", "Qwen2.5-7B"), 0.4),
    ("roofline predict", ("-m", "roofline", "predict", "Qwen2.5-7B", "--hardware", "rtx-4090", "--prompt", "1024",
                          "--output", "256", "--profile", "vllm"), 0.5),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One figure and what it may be at most, or at least."""

    what: str
    figure: str
    value: float
    most: float | None = None
    least: float | None = None

    @property
    def holds(self) -> bool:
        return (self.most is None or self.value <= self.most) and (self.least is None or self.value >= self.least)


def steps() -> Iterator[Row]:
    """The compiled steps of bench/step_bounds.py; compile times are for this machine."""
    pairs = list(jobs())
    for (bound, job), report in zip(pairs, compile_jobs([job for _, job in pairs]), strict=True):
        what = f"{bound.name}, {job.hardware.id}"
        for name, value in figures(report).items():
            if (most := getattr(bound, name)) is not None:
                yield Row(what, name, value, most)
        yield Row(what, "compile_s", report.compiled.compile_s, 60 if job.config.is_moe else 15)


def cpu_rates() -> Iterator[Row]:
    """bench/cpu.py: shares of the machine's own rates, and times over transformers' and safetensors'."""
    found = cpu.record()
    for row in found["steps"]:
        what = f"{found['model']} {row['step']} on CPU"
        yield Row(what, "share_of_rate", row["share_of_rate"], least=0.9)
        if row["over_torch"] is not None:
            yield Row(what, "time_over_torch", row["over_torch"], 1.0)
    yield Row("load 2.4 GB", "time_over_safetensors", found["loading"]["over_safetensors"], 1.3)


def processes() -> Iterator[Row]:
    """Whole processes, the best of several, and a sweep inside one."""
    for what, words, most in _PROCESSES:
        times = []
        for _ in range(_RUNS):
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], capture_output=True, check=True)
            times.append(time.perf_counter() - start)
        yield Row(what, "process_s", min(times), most)
    config, chips = ModelConfig.from_hf("Qwen2.5-7B"), known_ids()[:10]
    batches, contexts = range(1, 101), range(100, 10_001, 100)
    start = time.perf_counter()
    points = sweep(config, chips, batches, contexts)["time_s"].size
    yield Row(f"sweep of {points:,} points", "seconds", time.perf_counter() - start, 1.0)


PARTS = {"steps": steps, "cpu": cpu_rates, "processes": processes}


def main() -> None:
    parser = argparse.ArgumentParser(description="What must stay fast, beside its bounds.")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts to run, of {', '.join(PARTS)}")
    parts = parser.parse_args().only.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--only: no such part: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    for part in parts:
        print(f"{part} ...", file=sys.stderr)
        try:
            rows += PARTS[part]()
        except (InputError, ImportError) as error:
            left_out[part] = str(error)
    print(render([_table(rows)]))
    for part, why in left_out.items():
        print(f"{part}: left out: {why}")
    record: dict[str, Any] = {**environment(), "rows": [{**asdict(row), "holds": row.holds} for row in rows]}
    print(json.dumps({**record, "left_out": left_out}))
    sys.exit(not all(row.holds for row in rows))


def _table(rows: list[Row]) -> Table:
    body = [[row.what, row.figure, f"{row.value:,.4g}", _limit(row), "yes" if row.holds else "NO"] for row in rows]
    return Table("What must stay fast", ("what", "figure", "value", "bound", "holds"), body, text=("what", "figure"))


def _limit(row: Row) -> str:
    if row.least is not None:
        return f">= {row.least:g}"
    return "-" if row.most is None else f"<= {row.most:,.4g}"


if __name__ == "__main__":
    main()
