"""Measurement files made up for the tests of the scoring bench, and its modules, which lie outside the packages."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import ModuleType

BENCH = Path(__file__).resolve().parent.parent / "bench"
Modules = dict[str, ModuleType]
HEADER = [
    "grade", "id", "model", "arch_params_known", "framework", "framework_version", "gpu", "n_gpus", "tp",
    "dtype_or_quant", "batch_or_concurrency", "input_len", "output_len", "metric", "value", "source", "note",
]  # fmt: skip
USUAL = {
    "grade": "A", "id": "r1", "model": "Qwen/Qwen2.5-7B-Instruct", "arch_params_known": "y", "framework": "vLLM",
    "framework_version": "0.6.3", "gpu": "NVIDIA A100-SXM4-80GB", "n_gpus": "1", "tp": "1", "dtype_or_quant": "BF16",
    "batch_or_concurrency": "1", "input_len": "1", "output_len": "2048", "metric": "e2e_tok_s", "value": "84.28",
    "source": "somebody/somewhere README.md", "note": "",
}  # fmt: skip


def load_bench() -> Modules:
    """The bench's modules by name, imported as its scripts import each other."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    names = (
        *("cases", "case_fields", "case_notes", "error_groups", "kernel_cases"),
        *("score", "score_predict", "score_targets", "scored"),
    )
    return {name: importlib.import_module(name) for name in names}


def write_rows(path: Path, *rows: dict[str, str], header: list[str] = HEADER) -> Path:
    """A CSV of usual rows, r1 and on, each with the given cells changed."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for number, row in enumerate(rows, 1):
            full = {**USUAL, "id": f"r{number}", **row}
            writer.writerow([full[column] for column in header])
    return path
