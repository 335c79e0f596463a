"""The seed ledger as a test: every row is computed by the packages and compared with the ledger's own recomputation.

What the seeds print (`expected`) is never asserted: where it is exact the recomputation says the same, and where it is
a slip or lacks its definition the recomputation is the right value. A qualitative row is a property, and holds.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import ledger_cases_anatomy
import ledger_cases_attention
import ledger_cases_cache
import ledger_cases_infra
import ledger_cases_layer
import ledger_cases_moe
import ledger_cases_numerics
import ledger_cases_routing
import ledger_cases_serving
import ledger_cases_toy
import pytest
from ledger_models import Case

LEDGER = Path(__file__).parent / "data" / "seed_ledger.csv"
EXACT = (1e-9, 1e-12)  # relative and absolute: the ledger keeps twelve digits
SINGLE = (2e-6, 2e-6)  # where the numerics contract computes in float32
FLOAT32 = ledger_cases_numerics.FLOAT32 | ledger_cases_toy.FLOAT32

# Rows that nothing here can compute, and why.
NOT_COVERED: dict[str, str] = {
    "S000-162": "an assumption of the text, which its own measurement refutes",
    "S000-168": "lines of a startup log: an input",
    "S000-281": "a measurement of the text: an input of S000-282 and S000-283",
    "S000-284": "a measurement of the text: an input of S000-285 and S000-286",
    "S001-001": "DeepSeek R1 is outside the four architectures",
    "S001-002": "DeepSeek R1 is outside the four architectures",
    "S001-003": "DeepSeek R1 is outside the four architectures",
    "S001-005": "history, not a quantity",
    "S001-046": "prose without a definition: same size in which sense?",
    "S002-002": "a revision hash; the project reads configs, it pins none",
    "S002-007": "the text does not list its 22 steps",
    "S002-008": "the text does not name its third switch",
    "S002-010": "says that the toy's weights are not printed; the fixture is in ledger_cases_toy",
    "S002-027": "checkpoint layout: held by the tests of loading and saving",
    "S002-086": "about the text itself",
    "S003-001": "a named engine and card: an input",
    "S003-037": "the printed lines of the text's script, which the ledger does not hold",
    "S003-050": "minutes and cost of a lab session",
}


def _rows() -> dict[str, dict[str, str]]:
    with LEDGER.open(encoding="utf-8", newline="") as file:
        return {row["id"]: row for row in csv.DictReader(file)}


def _cases() -> dict[str, Case]:
    modules = (
        ledger_cases_anatomy,
        ledger_cases_serving,
        ledger_cases_moe,
        ledger_cases_layer,
        ledger_cases_infra,
        ledger_cases_numerics,
        ledger_cases_routing,
        ledger_cases_attention,
        ledger_cases_cache,
        ledger_cases_toy,
    )
    cases: dict[str, Case] = {}
    for module in modules:
        twice = cases.keys() & module.CASES.keys()
        assert not twice, f"{module.__name__} repeats {sorted(twice)}"
        cases |= module.CASES
    return cases


ROWS, CASES = _rows(), _cases()


def test_the_copy_is_the_shared_ledger(shared: Path) -> None:
    assert LEDGER.read_bytes() == (shared / "seed_ledger.csv").read_bytes()


def test_every_row_is_covered_or_excused_and_never_both() -> None:
    assert len(ROWS) == 500
    assert not CASES.keys() & NOT_COVERED.keys()
    assert CASES.keys() | NOT_COVERED.keys() == ROWS.keys(), sorted(ROWS.keys() ^ (CASES.keys() | NOT_COVERED.keys()))
    assert all(NOT_COVERED.values())


def test_rows_with_a_definite_value_are_not_excused_lightly() -> None:
    definite = {i for i, row in ROWS.items() if row["status"] in ("exact", "rounding", "derived")}
    assert len(definite & NOT_COVERED.keys()) <= 1
    assert len(NOT_COVERED) <= 18


@pytest.mark.parametrize("row_id", sorted(CASES))
def test_row(row_id: str) -> None:
    row = ROWS[row_id]
    computed = CASES[row_id]()
    if row["recomputed"]:
        tolerance = SINGLE if row_id in FLOAT32 else EXACT
        assert_equal(computed, json.loads(row["recomputed"]), tolerance, f"{row_id} {row['claim']}")
    else:
        assert row["status"] == "qualitative", f"{row_id} has nothing to compare with"
        assert computed is True, f"{row_id} {row['formula']}"


def assert_equal(computed: Any, expected: Any, tolerance: tuple[float, float], where: str) -> None:
    """Whole numbers, truth values and shapes exactly; other numbers within the tolerance."""
    if isinstance(expected, list):
        assert len(computed) == len(expected), where
        for one, other in zip(computed, expected, strict=True):
            assert_equal(one, other, tolerance, where)
    elif isinstance(expected, bool):
        assert computed is expected, where
    elif isinstance(computed, int) and isinstance(expected, int):
        assert computed == expected, where
    else:
        relative, absolute = tolerance
        assert computed == pytest.approx(expected, rel=relative, abs=absolute), where
