"""`qwenjax init`: random checkpoints that load, the same for the same seed, and nothing half-written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import assert_same, config_json, leaves
from cli_run import figures, run, text_of

import qwenjax
from qwenjax.config import ModelConfig
from qwenjax.weights import random_leaves
from roofline.count import count_params

MODEL_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def written(folder: Path, data: dict[str, Any]) -> str:
    path = folder / "tiny.json"
    path.write_text(json.dumps(data))
    return str(path)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_checkpoint_is_the_configs_with_random_weights(tmp_path: Path, model_type: str) -> None:
    source = written(tmp_path, config_json(model_type, eos_token_id=[3, 5]))
    out = tmp_path / "model"
    record = figures("qwenjax init", source, "-o", str(out), "--seed", "7")
    config, params = qwenjax.load(out)
    assert config == ModelConfig.from_hf(source)
    assert_same(params, qwenjax.init_params(config, 7, "float32"))
    assert record == {
        "folder": str(out),
        "model": "tiny",
        "num_hidden_layers": 3,
        "num_params": count_params(config).num_params,
        "weight_bytes": 4 * count_params(config).num_params,
        "dtype": "float32",
        "seed": 7,
        "files": ["config.json", "model.safetensors"],
    }
    assert sum(leaf.size for leaf in leaves(params).values()) == record["num_params"]


def test_layers_dtype_and_spelling_are_as_asked(tmp_path: Path) -> None:
    source = written(tmp_path, config_json("qwen3_moe"))
    out = tmp_path / "model"
    options = ["-o", str(out), "--layers", "1", "--dtype", "bfloat16", "--spelling", "5.x"]
    text = text_of("qwenjax init", source, *options)
    config, params = qwenjax.load(out)
    count = count_params(config).num_params
    assert text == f"{out}: 1 layers, {count:,} random parameters in bfloat16 (seed 0), 2 files\n"
    assert config.num_hidden_layers == len(params["layers"]) == 1
    assert {str(leaf.dtype) for leaf in leaves(params).values()} == {"bfloat16"}
    assert json.loads((out / "config.json").read_text())["num_local_experts"] == 5


def test_seeds_decide_the_weights(tmp_path: Path) -> None:
    source = written(tmp_path, config_json("qwen3"))
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        text_of("qwenjax init", source, "-o", str(tmp_path / name), "--seed", seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    values = np.asarray(qwenjax.load(tmp_path / "c")[1]["embed_tokens"])
    assert 0.015 < values.std() < 0.025  # initializer_range 0.02


def test_a_quantised_config_gives_plain_weights_and_says_so(tmp_path: Path) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 8}
    source = written(tmp_path, config_json("qwen3", quantization_config=quantization, torch_dtype=None))
    result = run("qwenjax init", source, "-o", str(tmp_path / "model"))
    assert result.status == 0
    assert result.stderr == "ignored: quantization_config: random weights aren't quantised (gptq)\n"
    assert qwenjax.load(tmp_path / "model")[0].dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--layers", "4"], "layers = 4: must be from 1 to num_hidden_layers 3. Choose fewer."),
        (["--dtype", "int8"], "--dtype = 'int8': is not a dtype of weights. Known: float32, bfloat16, float16."),
        (["--spelling", "3"], "spelling = '3': is not a spelling of config.json. Known: 4.x, 5.x."),
    ],
)
def test_bad_options_write_nothing(tmp_path: Path, options: list[str], told: str) -> None:
    source = written(tmp_path, config_json("qwen3"))
    result = run("qwenjax init", source, "-o", str(tmp_path / "model"), *options)
    assert (result.status, result.stdout, result.stderr) == (2, "", f"{told}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.json"]


def test_a_folder_with_files_is_kept(tmp_path: Path) -> None:
    source = written(tmp_path, config_json("qwen3"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    result = run("qwenjax init", source, "-o", str(tmp_path / "model"))
    remedy = "Name a new folder, or overwrite it (overwrite=True, --overwrite)."
    told = f"{tmp_path / 'model'}: already holds files. {remedy}\n"
    assert (result.status, result.stdout, result.stderr) == (2, "", told)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["notes.txt"]
    text_of("qwenjax init", source, "-o", str(tmp_path / "model"), "--overwrite")
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["config.json", "model.safetensors", "notes.txt"]


def test_a_model_that_no_disk_holds_is_refused_at_once(tmp_path: Path) -> None:
    config = config_json("qwen3_moe", vocab_size=2**26, num_experts=2**16, moe_intermediate_size=2**24)
    out = tmp_path / "model"
    result = run("qwenjax init", written(tmp_path, config), "-o", str(out))
    assert result.status == 2
    needed = 4 * count_params(ModelConfig.from_hf(config)).num_params
    assert result.stderr.startswith(f"{out}: needs {needed} bytes, and the disk has ")
    assert not out.exists()


def test_progress_goes_to_stderr_in_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = written(tmp_path, config_json("qwen3"))
    quiet = run("qwenjax init", source, "-o", str(tmp_path / "quiet"), "--json")
    assert quiet.stderr == "", "what is done within seconds has no line"
    monkeypatch.setattr("qwenjax.cli_init.FEW_LINES_S", 0.0)
    result = run("qwenjax init", source, "-o", str(tmp_path / "model"), "--json")
    assert json.loads(result.stdout)["folder"] == str(tmp_path / "model")
    lines = result.stderr.splitlines()
    assert len(lines) == 3 + 3 * 8  # arrays outside the layers and in them
    assert re.fullmatch(r"init: 100 % +\d+\.\d s  lm_head", lines[-1])


def test_each_array_alone_is_that_of_the_whole() -> None:
    config = ModelConfig.from_hf(config_json("qwen2_moe"))
    params, leaf_at = qwenjax.init_params(config, 3, "bfloat16"), random_leaves(config, 3, "bfloat16")
    for layer, leaf in ((2, "experts_down_proj"), (0, "router"), (1, "qkv_bias"), (None, "lm_head")):
        whole = (params if layer is None else params["layers"][layer])[leaf]
        np.testing.assert_array_equal(leaf_at(layer, leaf), whole)
