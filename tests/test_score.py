"""The scoring bench: predictions set against rows, the arithmetic of groups, targets, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from score_rows import BENCH, HEADER, Modules, load_bench, write_rows

from roofline.timing.case import Case
from roofline.timing.serving import CasePrediction

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def bench() -> Modules:
    return load_bench()


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda *rows, name="rows.csv", **options: write_rows(tmp_path / name, *rows, **options)


def scored(bench: Modules, path: Path, predict: Callable[[Case], CasePrediction]) -> list[Any]:
    made: list[Any] = bench["score_predict"].predict_rows(bench["cases"].read_rows(path), predict)
    return made


def times(factor: float, spread: float = 0.1) -> Callable[[Case], CasePrediction]:
    """A predictor that is off by a factor, with an interval around it."""

    def predict(case: Case) -> CasePrediction:
        middle = case.measured * factor
        return CasePrediction(middle, middle * (1 - spread), middle * (1 + spread), "", "made up")

    return predict


def test_groups_hold_median_tail_and_the_share_inside(bench: Modules, write: Write) -> None:
    factors = {"r1": 1.02, "r2": 0.9, "r3": 1.3, "r4": 1.0}

    def predict(case: Case) -> CasePrediction:
        return times(factors[case.id])(case)

    path = write({}, {"gpu": "NVIDIA H100 SXM"}, {}, {"grade": "B"}, {"grade": "C"})
    rows = scored(bench, path, predict)
    total = bench["scored"].total_of(rows)
    assert (total.n, total.by, total.key) == (4, "total", "all")
    assert total.median_abs_error == pytest.approx((0.02 + 0.1) / 2)
    assert total.p90_abs_error == pytest.approx(0.1 + 0.7 * 0.2)  # nine tenths of the way from first to fourth
    assert total.inside_interval == 2 / 4  # 0.9 reaches up to 0.99 only
    by_gpu = {one.key: one for one in bench["scored"].groups_of(rows) if one.by == "gpu"}
    assert {key: one.n for key, one in by_gpu.items()} == {"a100-80gb-sxm": 3, "h100-sxm": 1}
    assert by_gpu["h100-sxm"].median_abs_error == pytest.approx(0.1)
    assert {one.by for one in bench["scored"].groups_of(rows)} == {
        "kind", "metric", "engine", "gpu", "model_size", "weights", "gpus", "batch", "context", "source",
    }  # fmt: skip


def test_percentiles_are_straight_lines_between_neighbours(bench: Modules) -> None:
    percentile = bench["error_groups"].percentile
    assert percentile([4.0], 0.9) == 4.0
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.9) == pytest.approx(9.0)


def test_h20_rows_of_the_qwen3_tables_are_in_no_other_group(bench: Modules, write: Write) -> None:
    source = "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md@c7f51a1a"
    h20 = {"model": "Qwen/Qwen3-8B", "framework": "SGLang", "gpu": "NVIDIA H20-96GB", "source": source}
    rows = scored(bench, write(h20, {}), times(3.0, 0.01))
    assert bench["scored"].total_of(rows).n == 1
    groups = bench["scored"].groups_of(rows)
    (apart,) = [one for one in groups if one.by == "apart"]
    assert (apart.key, apart.n, apart.median_abs_error) == ("H20 rows of the Qwen3 tables", 1, pytest.approx(2.0))
    assert all(one.n == 1 and one.key not in ("h20", "sglang") for one in groups)


def test_a_row_counts_for_each_target_that_its_words_fit(bench: Modules, write: Write) -> None:
    out = {"metric": "throughput_out_tok_s", "batch_or_concurrency": "16"}
    rows: list[tuple[dict[str, str], set[str]]] = [
        ({}, {"single stream", "- 16 bits"}),
        ({"model": "Qwen/Qwen2.5-1.5B-Instruct"}, set()),
        (out, {"batched", "- 16 bits"}),
        ({"metric": "ttft_ms", "input_len": "512", "output_len": "1"}, {"prefill", "- 16 bits"}),
        ({"metric": "ttft_ms", "input_len": "512", "batch_or_concurrency": "8"}, set()),
        ({"tp": "2", "n_gpus": "2"}, {"single stream", "tensor parallel"}),
        ({"dtype_or_quant": "GPTQ-Int4", **out}, {"batched", "quantised"}),
        ({"model": "Qwen/Qwen3-30B-A3B", "dtype_or_quant": "FP8"}, {"single stream", "quantised", "mixtures"}),
    ]
    cases, _ = bench["cases"].read_cases(write(*(row for row, _ in rows)))
    for case, (_, names) in zip(cases, rows, strict=True):
        found = [target.name for target in bench["score_targets"].TARGETS if target.takes(case)]
        assert len(found) == len(names)
        assert all(any(name.startswith(start) for start in names) for name in found), (case.id, found)


def test_a_target_says_what_was_reached_and_what_the_data_scatter(bench: Modules, write: Write) -> None:
    rows = [{"value": "80"}, {"value": "84", "source": "another/place"}, {"value": "90", "input_len": "4096"}]
    reached = bench["score_targets"].targets_reached(scored(bench, write(*rows), times(1.03)))
    (single,) = [one for one in reached if one.name.startswith("single stream")]
    assert (single.n, single.reached, single.pairs) == (3, True, 1)
    assert single.median_abs_error == pytest.approx(0.03)
    assert single.scatter == pytest.approx(84 / 80 - 1)
    (missed,) = [
        one
        for one in bench["score_targets"].targets_reached(scored(bench, write(*rows), times(1.05)))
        if one.name.startswith("single stream")
    ]
    assert missed.reached is False
    assert [one.reached for one in reached if one.n == 0] == [None] * (len(reached) - 2)


def test_a_row_that_beats_the_roof_cannot_be(bench: Modules, write: Write) -> None:
    """A 7B model's 16-bit weights can't be read in less than 7 ms, whatever a row says."""

    def slow(case: Case) -> CasePrediction:
        return CasePrediction(100.0, 90.0, 110.0, "", "made up")

    impossible, possible = scored(bench, write({"value": "1000"}, {"value": "84"}), slow)
    assert impossible.predicted is None
    assert impossible.skipped == "can't be: 1000 is 7.0 times the roof of a100-80gb-sxm"
    assert possible.error == pytest.approx(100 / 84 - 1)


def test_a_case_that_is_not_predicted_is_skipped_with_the_reason(bench: Modules, write: Write) -> None:
    (row,) = scored(bench, write({}), lambda case: CasePrediction(None, None, None, "no profile", ""))
    assert (row.skipped, row.error, row.measured) == ("no profile", None, 84.28)


def test_a_prediction_that_fails_is_told_and_the_rest_scored(bench: Modules, write: Write) -> None:
    def fails(case: Case) -> CasePrediction:
        return times(1 / 0 if case.id == "r1" else 1.1)(case)

    first, second = scored(bench, write({}, {}), fails)
    assert first.skipped == "the prediction failed: ZeroDivisionError: division by zero"
    assert second.error == pytest.approx(0.1)


def test_sizes_are_weights_cache_and_activations(bench: Modules, write: Write) -> None:
    """Qwen2.5-7B: 15,231,233,024 bytes of weights, 57,344 of cache a token; a block's widest activations 135,168."""
    row = {"framework": "transformers", "metric": "mem_gb", "input_len": "6144", "value": "16"}
    tables = {"source": "QwenLM/Qwen3 docs/source/getting_started/speed_benchmark.md"}
    old = {"note": "includes full-prompt fp32 logits"}
    two = {"metric": "weights_gib", "tp": "2", "n_gpus": "2", "framework": "vLLM"}
    peak, without, logits, half = scored(bench, write(row, {**row, **tables}, {**row, **old}, {**row, **two}), times(1))
    weights, cache = 15_231_233_024, 57_344
    assert peak.predicted * 2**30 == pytest.approx(weights + 6144 * (cache + 135_168))
    assert without.predicted * 2**30 == pytest.approx(weights + (6144 + 2048) * cache)
    assert logits.predicted * 2**30 == pytest.approx(weights + 6144 * (cache + 152_064 * 6))
    assert half.predicted * 2**30 == pytest.approx(weights / 2, rel=1e-4)  # norms are on both


def test_a_size_that_no_rule_gives_is_skipped(bench: Modules, write: Write) -> None:
    rows = [
        {"metric": "mem_gb", "value": "21"},
        {"metric": "kv_tokens", "value": "90000", "framework": "SGLang"},
        {"metric": "kv_gib", "value": "3", "gpu": "NVIDIA RTX 3080"},
    ]
    assert [row.skipped for row in scored(bench, write(*rows), times(1))] == [
        "mem_gb = 21.0: is what the engine was told to take, or the card's whole use. "
        "Score kv_tokens or weights_gib instead",
        "kv_tokens = 90000.0: sglang has no memory rules here. vLLM's are known",
        "kv_gib = 3.0: no pool is predicted: it wouldn't start. Check the settings",
    ]


def test_the_command_prints_one_object(write: Write, tmp_path: Path) -> None:
    first = write({}, {"framework": "abacus"}, {"metric": "weights_gib", "value": "14.2"})
    second = write({"gpu": "Apple M2"}, name="second.csv")
    done = subprocess.run(
        [sys.executable, str(BENCH / "score.py"), str(first), str(second), "--json"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"rows", "groups", "total", "targets", "skipped"}
    assert all(set(row) == {"id", "predicted", "low", "high", "measured", "error", "skipped"} for row in result["rows"])
    figures = {"by", "key", "n", "median_abs_error", "p90_abs_error", "inside_interval"}
    assert set(result["total"]) == figures
    assert all(set(one) == figures for one in result["groups"])
    assert [row["id"] for row in result["rows"] if row["skipped"] and "abacus" in row["skipped"]] == ["r2"]
    assert [row["skipped"] for row in result["rows"]][-1].startswith("gpu = 'Apple M2': is not a GPU")
    (size,) = [row for row in result["rows"] if row["id"] == "r3"]
    assert size["error"] == pytest.approx(size["predicted"] / 14.2 - 1)
    assert abs(size["error"]) < 0.01
    assert result["total"]["n"] == sum(row["error"] is not None for row in result["rows"])


def test_the_command_names_a_missing_column_and_exits_with_2(write: Write) -> None:
    path = write({}, header=[name for name in HEADER if name != "gpu"])
    done = subprocess.run(
        [sys.executable, str(BENCH / "score.py"), str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{path}: gpu: is a column that is missing. Found: grade, id, ")
    assert "Traceback" not in done.stderr


def test_the_text_has_every_part(bench: Modules, write: Write) -> None:
    text = bench["score"].text(scored(bench, write({}, {"grade": "C"}, {"note": "launch-bound"}), times(1.2)), 2)
    for part in (
        "Targets (a row counts for each that its words fit)",
        "By engine",
        "By context",
        "Worst rows",
        "Skipped rows by reason",
    ):
        assert part in text
    assert "3 rows: 2 scored, 0 apart (H20 rows of the Qwen3 tables), 1 skipped" in text
    assert "the note says that the host or launches set the time" in text


def test_no_published_figure_beats_the_roof_as_it_is_read(bench: Modules, shared: Path) -> None:
    """A wrong reading of a metric (prompts counted, contexts, layers split) would put rows above the chip's peaks."""
    above = set()
    for case in bench["cases"].read_rows(shared / "measurements" / "published.csv").cases[::3]:
        share = None if case.saturated else bench["score_predict"].roof_share(case)
        if share is not None and share > 1.02:
            above.add((case.hardware, case.weights))
    assert not above


def test_a_sample_of_the_published_rows_is_predicted_as_well_as_the_profiles_say(bench: Modules, shared: Path) -> None:
    """The profiles saw these rows: a median beyond 8 % means that reading or predicting changed without a new fit."""
    rows = bench["cases"].read_rows(shared / "measurements" / "published.csv")
    made = [bench["score_predict"].predict_row(case) for case in rows.cases[::8] if not case.h20_qwen3_table]
    total = bench["scored"].total_of(made)
    assert total.n > 0.95 * len(made)
    assert total.median_abs_error < 0.08
    assert total.inside_interval > 0.7
    assert all(row.low <= row.predicted <= row.high for row in made if row.predicted is not None)
