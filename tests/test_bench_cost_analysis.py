"""The benchmark of what the usual cost_analysis numbers get wrong: each error is there on the installed JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "cost_analysis.py"


@pytest.fixture(scope="module")
def output() -> str:
    result = subprocess.run([sys.executable, str(BENCH)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def rows(output: str) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads(output.splitlines()[-1])["rows"]}


def test_the_last_line_is_one_json_object_and_the_table_names_each_error(output: str, rows: dict[str, Any]) -> None:
    record = json.loads(output.splitlines()[-1])
    assert set(record) == {"jax", "platform", "rows"}
    assert all(f"\n{name} " in output for name in rows)


def test_a_loop_counts_once(rows: dict[str, Any]) -> None:
    row = rows["a loop's body counts once"]
    assert row["lowered_ratio"] == pytest.approx(1 / 10, rel=1e-4)
    assert row["true"] == 10 * 2 * 64**3


def test_a_ragged_product_counts_every_group(rows: dict[str, Any]) -> None:
    assert rows["ragged_dot is counted dense"]["lowered_ratio"] > 8


def test_bytes_of_a_bfloat16_product_grow_when_it_is_compiled_for_the_cpu(rows: dict[str, Any]) -> None:
    row = rows["bf16 is widened on the CPU"]
    assert row["lowered_ratio"] == 1
    assert row["compiled_ratio"] > 2


def test_totals_beyond_float32_round(rows: dict[str, Any]) -> None:
    row = rows["totals are float32 sums"]
    assert row["true"] == 2**24 + 12
    assert 0 < abs(row["lowered"] - row["true"]) <= 4 * 3


def test_masks_branches_and_calls_are_not_seen(rows: dict[str, Any]) -> None:
    assert rows["the causal mask isn't seen"]["lowered_ratio"] > 1.9
    assert rows["a branch not taken counts"]["lowered_ratio"] > 100
    assert rows["top_k is opaque"]["lowered"] is None
    assert rows["a library call is opaque"]["lowered_ratio"] < 0.5
