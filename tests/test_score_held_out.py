"""Held-out scores: no row's interval knows the row, and each is what the other folds' errors make."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from score_rows import Modules, load_bench, write_rows

MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-14B-Instruct")
RATES = (160.0, 84.0, 46.0)
GROUP = "vllm-0.6-a100"


@dataclass(frozen=True)
class Folds:
    """Ten single-stream rows of each of three models, their fit, and made-up held-out errors."""

    modules: Modules
    rows: Any
    fitted: Any

    def scored(self, errors: dict[str, float], nearest: bool = False) -> dict[str, Any]:
        """The rows of each model as scored when all of a model's rows have this error, one in ten more."""
        held = self.modules["fit_write"].Held
        made = [
            held(row, errors[row.case.model] * (1 + (place % 10) / 10), nearest, GROUP)
            for place, row in enumerate(self.rows[GROUP])
        ]
        every = {"model": made, "source": made, "gpu": made}
        return dict(self.modules["held_out"].scored_folds(self.rows, self.fitted, every, "model"))


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> Folds:
    modules = load_bench()
    modules |= {name: importlib.import_module(name) for name in ("fit", "fit_write", "held_out")}
    cells = [
        {"model": model, "value": f"{rate * (1 + place / 100):g}"}
        for model, rate in zip(MODELS, RATES, strict=True)
        for place in range(10)
    ]
    path = write_rows(tmp_path_factory.mktemp("held") / "rows.csv", *cells)
    rows, left = modules["fit"].read_groups(path)
    assert left == []
    assert len(rows[GROUP]) == 30
    return Folds(modules, rows, modules["fit"].fit_all(rows))


def factors(scored: Any) -> dict[str, set[tuple[float, float]]]:
    """By model the interval in shares of the expected rate."""
    found: dict[str, set[tuple[float, float]]] = {}
    for row in scored:
        shares = round(row.low / row.predicted, 6), round(row.high / row.predicted, 6)
        found.setdefault(row.asked.model, set()).add(shares)
    return found


def test_an_interval_knows_the_other_folds_errors_and_not_its_own(folds: Folds) -> None:
    usual = dict(zip(MODELS, (0.1, 0.2, 0.3), strict=True))
    before = factors(folds.scored(usual)["single"])
    after = factors(folds.scored({**usual, MODELS[2]: 0.9})["single"])
    assert set(before) == set(after) == set(MODELS)
    assert before[MODELS[2]] == after[MODELS[2]]
    for model in MODELS[:2]:
        assert min(after[model]) < min(before[model]) or max(after[model])[1] > max(before[model])[1]


def test_a_prediction_is_off_by_the_held_out_error(folds: Folds) -> None:
    for row in folds.scored(dict.fromkeys(MODELS, 0.2))["single"]:
        ratio = math.log(row.measured / row.predicted)  # of rates, so the inverse of the times'
        assert any(ratio == pytest.approx(0.2 * (1 + place / 10), abs=1e-6) for place in range(10))
        assert row.provenance == f"profile {GROUP} without it"


def test_rows_without_a_profile_of_their_own_are_a_kind_apart(folds: Folds) -> None:
    scored = folds.scored(dict.fromkeys(MODELS, 0.1), nearest=True)
    assert {kind: len(rows) for kind, rows in scored.items()} == {
        "single": 0, "batched": 0, "prefill": 0, "elsewhere": 30,
    }  # fmt: skip
    assert {row.provenance for row in scored["elsewhere"]} == {f"profile {GROUP} without it, the nearest"}


def test_the_command_has_the_share_inside_by_kind_of_figure(
    folds: Folds, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [{"model": model, "value": f"{rate:g}"} for model, rate in zip(MODELS, RATES, strict=True)]
    path = write_rows(tmp_path / "rows.csv", *cells, {"grade": "C"})
    score = folds.modules["score"]
    assert score.main([str(path), "--held-out", "model"]) == 0
    text = capsys.readouterr().out
    assert "Held out by model: figures inside intervals of 80 % that didn't see them" in text
    with pytest.raises(SystemExit) as left:
        score.main([str(path), str(path), "--held-out", "model"])
    assert left.value.code == 2
    assert "--held-out fits one file: name one" in capsys.readouterr().err
