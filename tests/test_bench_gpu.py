"""The GPU bench as a process on this CPU, with tiny models: its record, its arithmetic, and what goes wrong."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import tiny

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from roofline.compare import CompareRow
from roofline.count import count_weight_bytes
from roofline.gpu_compile import Compiled, CompileJob
from roofline.hardware import load_hardware
from roofline.hlo import parse_hlo
from roofline.kernel_rows import read_kernels
from roofline.predict import predict_step

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "bench" / "gpu.py"
QUICK = ("--prompts", "16", "--shapes", "1", "--sample-s", "0.05")
Json = dict[str, Any]


def command(output: Path, *options: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "-o", str(output), *options]


def environment() -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def run(output: Path, *options: str, status: int = 0) -> tuple[Json, Json, str]:
    """The file's record, the object on the last line, and what stands before it."""
    done = subprocess.run(command(output, *options), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    shown, _, last = done.stdout.rstrip().rpartition("\n")
    return json.loads(output.read_text()), json.loads(last), shown


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    jsons = {
        "dense": tiny.config_json(num_hidden_layers=1),
        "sparse": tiny.moe_json(num_hidden_layers=1),
        "short": tiny.config_json(num_hidden_layers=1, max_position_embeddings=8),
    }
    for name, data in jsons.items():
        (folder / f"{name}.json").write_text(json.dumps(data))
    return {name: folder / f"{name}.json" for name in jsons}


@pytest.fixture(scope="module")
def dense(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Json, str]:
    """Everything, for a dense model; beside it a model that isn't there, which must not stop the rest."""
    output = tmp_path_factory.mktemp("dense") / "out.json"
    return run(
        output, "--model", "nosuch", "--model", str(models["dense"]), "--batches", "1,2", *QUICK, "--commit", "abc",
        status=1,
    )  # fmt: skip


def test_the_record_says_where_and_when(dense: tuple[Json, Json, str]) -> None:
    record, last, _ = dense
    env = record["environment"]
    assert record["status"] == "done"
    assert env["commit"] == last["commit"] == "abc"
    assert env["platform"] == "cpu"
    assert env["packages"]["jax"] == env["jax"]
    assert env["variables"]["JAX_PLATFORMS"] == "cpu"
    assert {"card", "at_start", "date", "jaxlib", "platform_version", "uncommitted"} <= set(env)
    assert record["budget_s"] == 420.0


def test_ceilings_are_amounts_over_times(dense: tuple[Json, Json, str]) -> None:
    ceilings = dense[0]["ceilings"]
    assert [entry["name"] for entry in ceilings] == ["read", "copy", "matmul", "matmul", "matmul", "launch", "dispatch"]
    for entry in ceilings:
        assert min(entry["samples"]) == entry["best_s"] <= entry["median_s"] <= max(entry["samples"])
        for unit in {"bytes", "flops"} & set(entry):
            assert entry[f"best_{unit}_per_s"] == entry[unit] / entry["best_s"] >= entry[f"median_{unit}_per_s"]
    read, copy, *products = ceilings[:5]
    assert copy["bytes"] == 2 * read["bytes"]
    assert products[1]["flops"] == 2 * 512**3
    assert products[2]["flops"] == 2 * 16 * 288 * 40  # the widest weight of the tiny model: K 3, J 6, H 16, D 40


def test_rows_are_those_of_compare_and_keep_below_the_roof(
    dense: tuple[Json, Json, str], models: dict[str, Path]
) -> None:
    record = dense[0]
    config = ModelConfig.from_hf(models["dense"])
    assert [(row["phase"], row["batch"], row["query_len"], row["context"]) for row in record["rows"]] == [
        ("decode", 1, 1, 16), ("prefill", 1, 16, 16), ("decode", 2, 1, 16)
    ]  # fmt: skip
    bandwidth = max(entry.get("best_bytes_per_s", 0.0) for entry in record["ceilings"])
    peak = max(entry.get("best_flops_per_s", 0.0) for entry in record["ceilings"])
    for row in record["rows"]:
        assert {field.name for field in dataclasses.fields(CompareRow)} <= set(row)
        assert row["bound_s"] <= row["best_s"] == min(row["samples"]) <= row["measured_s"]
        assert row["error"] == row["predicted_s"] / row["measured_s"] - 1
        assert 0 < row["mfu"] < 1
        assert 0 < row["mbu"] < 1
        assert row["mbu"] == pytest.approx(row["bytes"] / row["measured_s"] / bandwidth)
        assert row["mfu"] == pytest.approx(row["flops"] / row["measured_s"] / peak)
        step = Step(row["batch"], row["query_len"], row["context"])
        assert row["bytes"] == predict_step(config, step, "h200").bytes
        assert row["tokens_per_s"] == row["batch"] * row["query_len"] / row["measured_s"]
    assert record["calibration"]["complete"]
    assert {entry["rows"] for entry in record["calibration"]["products"]["bfloat16"]} == {1, 2, 16}


def test_weights_are_the_models_own_and_every_step_compiles_before_it_is_timed(
    dense: tuple[Json, Json, str], models: dict[str, Path]
) -> None:
    record = dense[0]
    expected = count_weight_bytes(ModelConfig.from_hf(models["dense"]), "bfloat16")
    assert [entry["bytes"] for entry in record["weights"]] == [expected, expected]
    assert [entry["counted_bytes"] for entry in record["weights"]] == [expected, expected]
    told = ("phase", "batch", "query_len", "context")
    steps = [[entry[key] for key in told] for entry in record["compiles"]]
    assert steps == [[row[key] for key in told] for row in record["rows"]]


def test_the_loop_is_set_against_the_single_call(dense: tuple[Json, Json, str]) -> None:
    (loop,) = dense[0]["loops"]
    assert loop["steps"] == 15  # the cache of 16 holds a token before the first
    assert loop["single_step_s"] == dense[0]["rows"][0]["measured_s"]
    assert loop["host_share"] == 1 - loop["loop_step_s"] / loop["single_step_s"]


def test_parts_of_a_step_sum_to_it(dense: tuple[Json, Json, str]) -> None:
    record = dense[0]
    for row in record["rows"][:2]:
        parts = [part for part in record["ops"] if part["phase"] == row["phase"]]
        assert sum(part["measured_s"] for part in parts) == pytest.approx(row["measured_s"])
        assert sum(part["predicted_s"] for part in parts) == pytest.approx(row["predicted_s"])
        (waterfall,) = [found for found in record["waterfalls"] if found["phase"] == row["phase"]]
        terms = {term["name"]: term["time_s"] for term in waterfall["terms"]}
        assert sum(terms.values()) == pytest.approx(row["measured_s"])
        assert terms["residual"] == pytest.approx(row["measured_s"] - row["predicted_s"])
        kernels = next(entry["num_kernels"] for entry in record["kernels"] if entry["phase"] == row["phase"])
        assert terms["launches"] == pytest.approx(kernels * record["calibration"]["launch_s"])


def test_kernels_are_listed_and_a_missing_card_is_told(dense: tuple[Json, Json, str]) -> None:
    kernels = dense[0]["kernels"]
    assert [entry["phase"] for entry in kernels] == ["decode", "prefill"]
    for entry in kernels:
        assert entry["problem"] == "the device is no card of `roofline hardware`; name it with --card"
        assert entry["gpu_free"] is None
        assert entry["num_kernels"] == sum(entry["kinds"].values()) > 10
        assert entry["num_kernels"] == sum(sum(kinds.values()) for kinds in entry["kinds_by_op"].values())


def test_a_model_that_cannot_be_read_is_told_and_the_others_run(dense: tuple[Json, Json, str]) -> None:
    record, last, shown = dense
    assert record["failed"] == last["failed"] == ["model nosuch"]
    assert record["cases"][0]["error"].startswith("MODEL = 'nosuch': is not a known model.")
    assert "failed: model nosuch: MODEL = 'nosuch': is not a known model." in shown
    assert all(case["error"] is None for case in record["cases"][1:])
    assert [case["name"] for case in record["cases"][1:]] == record["plan"]


def test_the_last_line_is_the_table_as_json(dense: tuple[Json, Json, str]) -> None:
    record, last, shown = dense
    assert [row["measured_s"] for row in last["rows"]] == [row["measured_s"] for row in record["rows"]]
    errors = sorted(abs(row["error"]) for row in record["rows"])
    assert (last["answers"]["median_abs_error"], last["answers"]["max_abs_error"]) == (errors[1], errors[2])
    assert shown.startswith("3 steps measured in ")
    assert f"{1000 * record['rows'][0]['measured_s']:,.3f}" in shown
    assert "samples" not in json.dumps(last)


def test_experts_say_whether_ragged_dot_is_dense_and_cases_that_fail_leave_the_others(
    models: dict[str, Path], tmp_path: Path
) -> None:
    record, last, shown = run(
        tmp_path / "out.json", "--model", str(models["short"]), "--model", str(models["sparse"]), "--batches", "1",
        *QUICK, "--only", "steps,ragged_dot", status=1,
    )  # fmt: skip
    failing = [case for case in record["cases"] if case["error"]]
    assert [case["name"] for case in failing] == record["failed"] == last["failed"]
    assert record["failed"] == [
        "short: compile 2 steps", "short: step, decode batch 1, 1 new of 16",
        "short: step, prefill batch 1, 16 new of 16",
    ]  # fmt: skip
    problem = "InputError: context = 16: is beyond the model's 8 positions."
    assert all(case["error"].startswith(problem) for case in failing)
    assert [(row["model"], row["phase"]) for row in record["rows"]] == [("sparse", "decode"), ("sparse", "prefill")]
    for row in record["rows"]:  # neither roof nor rates were measured: nothing is made up in their place
        assert row["measured_s"] > 0
        assert row["bound_s"] is row["predicted_s"] is row["error"] is row["mfu"] is None
    found = record["answers"]["ragged_dot"]
    assert [entry["rows"] for entry in found] == [5, 320]
    by_way = {(entry["what"], entry["way"], entry["rows"]): entry for entry in record["ragged_dot"]}
    assert set(by_way) == {
        ("product", "ragged_dot", 5), ("product", "dense", 5), ("layer", "ragged_dot", 5), ("layer", "dense", 5),
        ("layer", "gathered", 5), ("product", "ragged_dot", 320), ("product", "dense", 320),
        ("layer", "ragged_dot", 320), ("layer", "dense", 320), ("layer", "grouped", 320),
    }  # fmt: skip
    for entry in found:
        ragged, dense = (by_way["product", way, entry["rows"]] for way in ("ragged_dot", "dense"))
        assert entry["time_of_dense"] == ragged["median_s"] / dense["median_s"]
        assert entry["flops_of_dense"] == ragged["compiled_flops"] / (ragged["needed_flops"] * 21)
        halves = [entry[ratio] >= 0.5 for ratio in ("time_of_dense", "flops_of_dense")]
        assert entry["verdict"] == ("dense" if all(halves) else "unclear" if any(halves) else "not dense")
        assert dense["compiled_flops"] >= dense["needed_flops"] * 21
        assert f"ragged_dot on {entry['rows']} rows is {entry['verdict']}" in shown


def test_a_spent_budget_skips_what_is_left_and_says_so(models: dict[str, Path], tmp_path: Path) -> None:
    record, last, shown = run(tmp_path / "out.json", "--model", str(models["dense"]), "--budget-s", "0", *QUICK)
    assert record["skipped"] == record["plan"] == last["skipped"]
    assert len(record["plan"]) > 10
    assert record["cases"] == record["failed"] == record["ceilings"] == []
    assert "skipped, the budget was spent: ceiling: read" in shown


def test_a_killed_run_leaves_a_whole_file(models: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    process = subprocess.Popen(
        command(output, "--model", str(models["dense"]), "--only", "ceilings", *QUICK),
        env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    seen: Json = {"cases": []}
    while not seen["cases"] and process.poll() is None:
        time.sleep(0.02)
        seen = json.loads(output.read_text()) if output.exists() else seen
    process.kill()
    process.wait()
    record = json.loads(output.read_text())
    assert record["status"] == "running"
    assert record["cases"][0]["name"] == "ceiling: read"
    assert record["ceilings"][0]["best_bytes_per_s"] > 0


def test_on_a_cpu_the_real_models_are_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "out.json"), env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "gpu.py: device: cpu is no GPU, and 8 billion parameters in bfloat16 would take it hours. Run it on a GPU, "
        "or try it with a small --model.\n"
    )
    assert not (tmp_path / "out.json").exists()


ENTRY = """HloModule jit_step

%fused (p.1: bf16[8,128], p.2: bf16[256,128]) -> bf16[8,256] {
  %p.1 = bf16[8,128]{1,0} parameter(0)
  %p.2 = bf16[256,128]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,256]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a.1: bf16[8,128], b.1: bf16[256,128]) -> bf16[8,256] {
  %a.1 = bf16[8,128]{1,0} parameter(0)
  %b.1 = bf16[256,128]{1,0} parameter(1)
  %copy.1 = bf16[8,128]{1,0} copy(%a.1)
  PRODUCT
}
"""
SCOPE = 'metadata={op_name="jit(decode_step_impl)/o_proj/dot_general"}'
TRITON = (
    f"ROOT %gemm.1 = bf16[8,256]{{1,0}} fusion(%copy.1, %b.1), kind=kCustom, calls=%fused, {SCOPE}, backend_config="
    '{"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton_nested_gemm_fusion",'
    '"block_level_fusion_config":{"num_warps":"WARPS"}}}'
)
CUBLAS = (
    'ROOT %gemm.1 = bf16[8,256]{1,0} custom-call(%copy.1, %b.1), custom_call_target="__cublas$lt$matmul", '
    f'{SCOPE}, backend_config={{"gemm_backend_config":{{"selected_algorithm":"3"}}}}'
)


def test_autotuned_kernels_are_set_against_those_of_the_default_tiling(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPT.parent)
    kernels = importlib.import_module("gpu_kernels")
    job = CompileJob(ModelConfig.from_hf(models["dense"]), Step.decode(1, 16), load_hardware("h200"))
    default, tuned, library = (
        kernels.read_program(parse_hlo(ENTRY.replace("PRODUCT", product)), job)
        for product in (TRITON.replace("WARPS", "2"), TRITON.replace("WARPS", "8"), CUBLAS)
    )
    assert kernels.difference(default, default) == []
    settings = [json.loads(made["settings"])["fusion_backend_config"] for made in kernels.difference(tuned, default)]
    assert [part["block_level_fusion_config"] for part in settings] == [{"num_warps": "2"}, {"num_warps": "8"}]
    assert [(made["here"], made["gpu_free"]) for made in kernels.difference(tuned, default)] == [(0, 1), (1, 0)]
    assert kernels.kinds_by_op(default)["o_proj"] == {"triton gemm": 1}
    assert library.kinds == {"copy": 1, "call __cublas$lt$matmul": 1}
    assert [made["kind"] for made in kernels.difference(library, default)] == ["call __cublas$lt$matmul", "triton gemm"]


def test_a_gpu_free_compile_is_set_against_what_was_measured(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compile itself needs an extra; what is made of its program doesn't, so this CPU's own stands in."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    kernels, steps, shared = (importlib.import_module(f"gpu_{name}") for name in ("kernels", "steps", "record"))
    config, step = ModelConfig.from_hf(models["dense"]), Step.decode(1, 16)
    row = steps.step_record(config, step) | {"measured_s": 0.5}
    record = {"rows": [row], "kernels": [], "ceilings": [], "environment": {}, "calibration": {}}
    bench = shared.Bench(record, tmp_path / "out.json", card="h200", models={"dense": (config, {})})
    text = steps.compiled_step(config, step).as_text()
    compiled = Compiled(text, 1.5, 100, 10, 20, 0, "0.10", None)
    monkeypatch.setattr(kernels, "compile_step", lambda *_, **__: compiled)
    monkeypatch.setattr(kernels, "check_compiler", lambda: "9.10")
    kernels.compare_kernels(bench, config, step)
    (entry,) = record["kernels"]
    free = entry["gpu_free"]
    assert entry["differing"] == []
    assert entry["problem"] is None
    assert (free["num_kernels"], free["kinds"]) == (entry["num_kernels"], entry["kinds"])
    assert (free["temp_bytes"], free["compile_s"], free["measured_s"]) == (20, 1.5, 0.5)
    rows = read_kernels(parse_hlo(text), CompileJob(config, step, load_hardware("h200")))
    assert free["predicted_s"] == sum(kernel.count * (kernel.time_s or 0) for kernel in rows) > 0
    assert free["error"] == free["predicted_s"] / 0.5 - 1
    with zipfile.ZipFile(bench.programs) as archive:
        assert sorted(archive.namelist()) == ["dense_decode_1_1_16_gpu_free.hlo", "dense_decode_1_1_16_here.hlo"]
        assert archive.read("dense_decode_1_1_16_here.hlo").decode() == text
