"""Kernel rows of published.csv as tables to fit to, for what the folders of kernel times don't have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from cases import read_rows
from kernel_cases import KernelCase
from kernel_csv import Columns, Run, Table
from kernel_routing import routed

from roofline.hardware import Hardware
from roofline.timing.efficiency import Efficiency
from roofline.timing.kernels import gemm_s, moe_s
from roofline.weight_schemes import scheme_of

_PACKED_BITS: Final = 8  # weights narrower than this are unpacked to 16 bits before they are multiplied


def published_tables(path: Path) -> dict[str, list[Table]]:
    """By chip: products in 16 bits, and experts with packed weights."""
    cases = read_rows(path).kernels
    products = [case for case in cases if case.kind == "gemm" and _bits(case) == 16]
    experts = [case for case in cases if case.kind == "experts" and _bits(case) < _PACKED_BITS]
    found: dict[str, list[Table]] = {}
    for chip in sorted({case.hardware for case in (*products, *experts)}):
        own = [_products([case for case in products if case.hardware == chip])]
        own.append(_experts([case for case in experts if case.hardware == chip]))
        found[chip] = [table for table in own if table is not None]
    return found


def _bits(case: KernelCase) -> float:
    return float(scheme_of(case.weights).linear.bits)


def _products(cases: Sequence[KernelCase]) -> Table | None:
    columns = {name: np.array([float(case.sizes[name]) for case in cases]) for name in ("m", "n", "k")}

    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        return gemm_s(columns["m"], columns["n"], columns["k"], chip=chip, eff=eff, resident=True)

    return _table("published gemm", "gemm", run, cases, columns, "m", ("n", "k"))


def _experts(cases: Sequence[KernelCase]) -> Table | None:
    names = ("tokens", "hidden", "width", "per_token", "experts")
    columns = {name: np.array([float(case.sizes[name]) for case in cases]) for name in names}
    columns["bits"] = np.array([_bits(case) for case in cases])
    columns["distinct"] = np.array([_distinct(case) for case in cases])

    def run(columns: Columns, chip: Hardware, eff: Efficiency, cache: dict[str, Any]) -> Any:
        sizes = [columns[name] for name in (*names, "distinct")]
        bits = float(columns["bits"][0])
        return moe_s(*sizes, chip=chip, eff=eff, weight_bits=bits, resident=True)

    return _table("published packed experts", "moe", run, cases, columns, "tokens", ("hidden",))


def _distinct(case: KernelCase) -> float:
    told = re.search(r"routing distribution (\w+?_[\d.]*\d)", case.note)
    sizes = (case.sizes["tokens"], case.sizes["per_token"], case.sizes["experts"])
    return routed(*sizes, 1, told[1] if told else "balanced")[1]


def _table(
    kernel: str, group: str, run: Run, cases: Sequence[KernelCase], columns: Columns, size: str, shape: tuple[str, ...]
) -> Table | None:
    if not cases:
        return None
    seconds = np.array([case.seconds for case in cases])
    return Table("published.csv", kernel, group, run, list(range(len(cases))), columns, seconds, size, shape)
