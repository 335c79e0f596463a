"""The `roofline` command as users start it: every command, real processes, and the lists of what is known."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cli_run import as_json, figures, run, text_of
from config_base import QWEN3_MOE

import roofline
from qwenjax.known_models import known_model_facts, known_model_names
from roofline.hardware import describe_hardware, known_ids

# models, hardware


def test_two_models_side_by_side_are_what_the_generation_changed() -> None:
    old, new = figures("roofline models Qwen2-57B-A14B Qwen3-30B-A3B")["rows"]
    # Ledger S000-253 to S000-265.
    assert {key: [old[key], new[key]] for key in LEDGER_106} == LEDGER_106
    shares = [100 * old["active_fraction"], 100 * new["active_fraction"]]
    assert shares == pytest.approx([24.8207692813, 10.9819836154], rel=1e-9)
    lines = [line.split() for line in text_of("roofline models Qwen2-57B-A14B Qwen3-30B-A3B").splitlines()]
    assert ["num_experts", "64", "128", "*"] in lines
    assert ["norm_topk_prob", "no", "yes", "*"] in lines
    assert ["num_experts_per_tok", "8", "8"] in lines


LEDGER_106 = {
    "num_experts": [64, 128],
    "num_experts_per_tok": [8, 8],
    "moe_intermediate_size": [2560, 768],
    "shared_expert_intermediate_size": [20480, 0],
    "norm_topk_prob": [False, True],
    "qkv_bias": [True, False],
    "qk_norm": [False, True],
    "query_width_minus_hidden_size": [0, 2048],
    "num_hidden_layers": [28, 48],
    "hidden_size": [3584, 2048],
    "num_key_value_heads": [4, 4],
    "num_params": [57408658944, 30532122624],
    "num_active_params": [14249270784, 3353032704],
    "kv_bytes_per_token": [57344, 98304],
}


def test_all_known_models_are_listed_with_counts_and_sources() -> None:
    rows = figures("roofline models")["rows"]
    assert tuple(row["hf_id"] for row in rows) == known_model_names(runnable=False)
    assert all(row["source"] == known_model_facts(row["hf_id"]).source for row in rows)
    seven = next(row for row in rows if row["name"] == "Qwen2.5-7B")
    assert [seven["num_params"], seven["num_experts"], seven["norm_topk_prob"]] == [7615616512, None, None]
    text = text_of("roofline models")
    assert all(name in text for name in known_model_names(runnable=False))


def test_a_model_and_a_path_compare_and_equal_names_stay_apart(tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-8B.json"
    path.write_text(json.dumps(QWEN3_MOE))
    rows = figures("roofline models Qwen3-8B", str(path))["rows"]
    assert [row["name"] for row in rows] == ["Qwen3-8B", "Qwen3-8B"]
    assert [row["hf_id"] for row in rows] == ["Qwen/Qwen3-8B", None]
    header = next(line for line in text_of("roofline models Qwen3-8B", str(path)).splitlines() if "fact" in line)
    assert header.split() == ["fact", "Qwen3-8B", "Qwen3-8B", "(2)", "differs"]


def test_all_chips_are_listed_and_one_is_told_whole() -> None:
    assert [row["id"] for row in figures("roofline hardware")["rows"]] == list(known_ids())
    record, chip = figures("roofline hardware RTX-4090"), roofline.load_hardware("rtx-4090")
    assert record["rows"] == as_json(describe_hardware(chip))
    assert [record["id"], record["launch_year"], record["remarks"]] == ["rtx-4090", 2022, list(chip.notes)]
    assert record["links"] == [{"name": "pcie", "generation": "4.0", "lanes": 16, "one_way_bytes_per_s": 31507692308.0}]
    text = text_of("roofline hardware rtx-4090")
    assert all(figure.source in text for figure in chip.figures.values())
    assert "peak_flops_per_s.bfloat16          165.2 TFLOP/s  datasheet           2023" in text


# every command, as users start them


COMMANDS = (
    "params {}",
    "step {} --phase prefill --batch 2 --query-len 100 --hardware rtx-4090",
    "step {} --phase decode",
    "predict {} --hardware h100-sxm --prompt 100 --output 8 --batch 1..3",
    "memory {} --hardware a100-80gb-sxm --max-model-len 4096",
    "models {}",
    "models {} Qwen3-8B",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("model", ["Qwen2.5-7B", "Qwen3-30B-A3B", "path"])
def test_every_command_prints_text_and_figures(command: str, model: str, shared: Path) -> None:
    name = str(shared / "configs" / "Qwen3-4B.json") if model == "path" else model
    line = f"roofline {command.format(name)}"
    text, record = text_of(line), figures(line)
    first = text.splitlines()[0]
    assert first.startswith("Qwen3-4B" if model == "path" else model)
    assert any(character.isdigit() for character in first)
    assert "\x1b" not in text
    assert len(record) > 2


def test_a_path_and_a_name_give_the_same_figures(shared: Path) -> None:
    path = shared / "configs" / "Qwen3-30B-A3B.json"
    same = ("num_params", "groups", "bill", "matmuls", "flops_per_token", "kv_bytes_per_token")
    by_path, by_name = figures(f"roofline params {path}"), figures("roofline params qwen/qwen3-30b-a3b")
    assert {key: by_path[key] for key in same} == {key: by_name[key] for key in same}
    assert [by_path["stored"]["published"], by_name["stored"]["published"]] == [None, 30532122624]


def script(name: str) -> list[str]:
    path = Path(sysconfig.get_path("scripts")) / name
    assert path.exists(), f"{path} is missing: install the package first (pip install -e .)"
    return [str(path)]


@pytest.mark.parametrize("start", ["module", "script"])
def test_real_processes_print_one_object(start: str) -> None:
    command = [sys.executable, "-m", "roofline"] if start == "module" else script("roofline")
    done = subprocess.run([*command, "params", "Qwen2.5-7B", "--json"], capture_output=True, text=True, check=False)
    assert [done.returncode, done.stderr] == [0, ""]
    assert json.loads(done.stdout)["num_params"] == 7615616512


def test_version_and_help() -> None:
    assert run("roofline --version").stdout == "0.1.0\n"
    for command in ("params", "step", "predict", "memory", "experts", "models", "hardware"):
        assert f"  {command}" in run("roofline --help").stdout
        assert f"roofline {command}" in run(f"roofline {command} --help").stdout.split("Options:")[0].partition("\n")[2]


def test_estimates_import_neither_jax_nor_plotting_and_json_no_rich() -> None:
    program = """
import sys
from roofline.cli import main
try:
    main(sys.argv[1:])
except SystemExit as finished:
    assert finished.code == 0
heavy = {"jax", "flax", "matplotlib", "rich"} & set(sys.modules)
print(sorted(heavy), file=sys.stderr)
"""
    line = "predict Qwen3-30B-A3B --hardware rtx-4090 --prompt 10 --output 3 --json"
    done = subprocess.run([sys.executable, "-c", program, *line.split()], capture_output=True, text=True, check=False)
    assert [done.returncode, done.stderr] == [0, "[]\n"]
