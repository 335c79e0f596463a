"""The `qwenjax` command: a config as it was read, without JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
from cli_run import figures, run, text_of
from config_base import DROP, QWEN2, QWEN3_MOE, changed

import qwenjax
from qwenjax.config import ModelConfig
from roofline.count import count_params

MODELS = ("Qwen2.5-7B", "Qwen2.5-0.5B", "Qwen3-30B-A3B", "Qwen2-57B-A14B")


def written(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path.parent)


def leaves(tree: dict[str, Any]) -> dict[str, set[tuple[int, ...]]]:
    """Shapes by leaf name in a parameter tree, over all layers."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, value in tree.items():
        parts = [leaf for layer in value.values() for leaf in layer.items()] if name == "layers" else [(name, value)]
        for leaf, array in parts:
            shapes.setdefault(leaf, set()).add(tuple(array.shape))
    return shapes


@pytest.mark.parametrize("name", MODELS)
def test_the_leaves_are_the_parameter_tree_of_the_model(name: str) -> None:
    config, record = ModelConfig.from_hf(name), figures(f"qwenjax inspect {name}")
    shapes = leaves(qwenjax.param_shapes(config))
    assert {row["leaf"]: {tuple(row["shape"])} for row in record["rows"]} == shapes
    assert all(row["elements"] == row["layers"] * prod(row["shape"]) for row in record["rows"])
    assert record["num_params"] == count_params(config).num_params


@pytest.mark.parametrize("name", MODELS)
def test_the_architecture_is_the_config_as_read(name: str) -> None:
    config, record = ModelConfig.from_hf(name), figures(f"qwenjax inspect {name}")
    for field in (
        "head_dim",
        "num_key_value_heads",
        "rope_theta",
        "qkv_bias",
        "norm_topk_prob",
        "num_experts",
        "dtype",
    ):
        assert record["config"][field] == getattr(config, field)
    assert record["qk_norm"] == config.qk_norm
    assert record["sparse_layers"] == list(config.sparse_layers)
    assert record["model"] == name


def test_mixed_models_have_dense_and_sparse_leaves(tmp_path: Path) -> None:
    folder = written(tmp_path, changed(QWEN3_MOE, num_hidden_layers=3, mlp_only_layers=[1]))
    record = figures("qwenjax inspect", folder)
    layers = {row["leaf"]: row["layers"] for row in record["rows"]}
    assert [layers[leaf] for leaf in ("embed_tokens", "qkv_proj", "gate_up_proj", "router")] == [1, 3, 1, 2]
    assert record["num_params"] == count_params(ModelConfig.from_hf(folder)).num_params
    assert text_of("qwenjax inspect", folder).splitlines()[0] == (
        f"tiny: qwen3_moe, 3 layers (2 of them mixtures of experts), {record['num_params']:,} parameters"
    )


def test_checkpoint_tensors_are_named_by_the_array_that_holds_them() -> None:
    rows = {row["leaf"]: row for row in figures("qwenjax inspect Qwen2.5-7B")["rows"]}
    assert rows["qkv_proj"] == {
        "leaf": "qkv_proj",
        "letters": "KJHD",
        "shape": [4, 9, 128, 3584],
        "scope": "layer",
        "layers": 28,
        "elements": 28 * 36 * 128 * 3584,
        "tensors": ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
    }
    assert "lm_head" not in {row["leaf"] for row in figures("qwenjax inspect Qwen2.5-0.5B")["rows"]}


def test_defaults_ignored_keys_and_warnings_are_told_with_their_reasons(tmp_path: Path) -> None:
    config = changed(QWEN2, torch_dtype=DROP, rope_theta=DROP, use_sliding_window=False, sliding_window=64)
    result = run("qwenjax inspect", written(tmp_path, config))
    assert (result.status, result.stderr) == (0, "")
    told = result.stdout.split("\n\n")[-3:]
    assert [part.splitlines()[0] for part in told] == ["Taken by default", "Ignored", "Warnings"]
    assert "dtype  missing; estimates take bfloat16 unless told otherwise" in told[0]
    assert "sliding_window  64 has no effect: use_sliding_window is false" in told[1]
    assert "rope_theta  missing; 10000 as transformers takes it." in told[2]
    kinds = {note["kind"] for note in figures("qwenjax inspect", str(tmp_path / "tiny"))["notes"]}
    assert kinds == {"default", "ignored", "warning"}


def test_windows_are_told_by_runs_of_layers(tmp_path: Path) -> None:
    config = changed(QWEN2, num_hidden_layers=5, use_sliding_window=True, sliding_window=64, max_window_layers=3)
    text = text_of("qwenjax inspect", written(tmp_path, config))
    assert "3 layers: all positions; 2 layers: 64 positions" in text


def test_every_real_config_that_is_read_is_inspected(shared: Path) -> None:
    totals = {}
    for path in sorted((shared / "configs").glob("Qwen3-*B.json")):
        result = run("qwenjax inspect", str(path), "--json")
        if result.status == 0:
            totals[path.stem] = json.loads(result.stdout)["num_params"]
    assert totals["Qwen3-8B"] == 8190735360
    assert totals["Qwen3-32B"] == 32762123264
    assert len(totals) >= 6


def test_inspecting_needs_no_jax_in_a_real_process() -> None:
    program = """
import sys
from qwenjax.cli import main
try:
    main(["inspect", "Qwen3-30B-A3B", "--json"])
except SystemExit as finished:
    assert finished.code == 0
print(sorted({"jax", "flax", "numpy"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert json.loads(done.stdout)["num_params"] == 30532122624
    module = [sys.executable, "-m", "qwenjax", "inspect", "Qwen3-30B-A3B", "--json"]
    assert subprocess.run(module, capture_output=True, text=True, check=True).stdout == done.stdout


def test_version_and_help() -> None:
    assert run("qwenjax --version").stdout == "0.1.0\n"
    assert "  inspect" in run("qwenjax --help").stdout
    assert "qwenjax inspect Qwen3-30B-A3B" in run("qwenjax inspect --help").stdout
