"""bench/own_kernels.py on this CPU, where plain JAX runs in the kernels' place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from qwenjax.kernels.choice import NAMES

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("data", [tiny.config_json(), tiny.moe_json()], ids=["dense", "sparse"])
def test_without_a_gpu_nothing_differs(tmp_path: Path, data: dict[str, object]) -> None:
    model = tmp_path / "config.json"
    model.write_text(json.dumps(data))
    words = ["--model", str(model), "--layers", "1", "--batches", "2", "--prompt", "8", "--sample-s", "0.01"]
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / "own_kernels.py"), *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown, _, last = done.stdout.rstrip().rpartition("\n")
    rows = json.loads(last)["rows"]
    assert [row["kernels"] for row in rows] == ["none", *(f"{name} alone" for name in NAMES), "all"]
    for row in rows:
        assert row["kernels"] in shown
        assert row["prefill_difference"] < 0.05
        assert row["decode_difference"] < 0.05
        assert row["decode_s"] > 0
