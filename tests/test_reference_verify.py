"""`qwenjax verify` against transformers on tiny checkpoints, and what it says of one that differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import reference
import tiny
from typer.testing import CliRunner

from qwenjax import InputError, ModelConfig, load, save
from qwenjax.cli import app
from qwenjax.verification import verify

pytestmark = reference.MARK

CASES = {
    "qwen3": lambda: tiny.config("qwen3"),
    "qwen2": lambda: tiny.config("qwen2"),
    "qwen3_moe": lambda: tiny.moe_config("qwen3_moe", mlp_only_layers=[0]),
    "qwen2_moe": lambda: tiny.moe_config("qwen2_moe"),
}


def _saved(name: str, folder: Path) -> ModelConfig:
    config = CASES[name]()
    save(config, tiny.params(config), folder)
    return config


@pytest.mark.parametrize("name", CASES)
def test_every_layer_agrees(name: str, tmp_path: Path) -> None:
    config = _saved(name, tmp_path / name)
    done = CliRunner().invoke(app, ["verify", str(tmp_path / name), "--json"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["holds"] is True
    assert [row["layer"] for row in record["rows"]] == [
        "embedding", *(f"layer {i}" for i in range(config.num_hidden_layers - 1)), "last layer and norm", "logits",
    ]  # fmt: skip
    assert all(row["max_abs_difference"] < 2e-5 * max(1, row["reference_std"]) for row in record["rows"])
    routed = [i for i, row in enumerate(record["rows"][1:-1]) if row["routing_agreement"] is not None]
    assert routed == list(config.sparse_layers)
    assert all(record["rows"][i + 1]["routing_agreement"] == 1 for i in routed)
    text = CliRunner().invoke(app, ["verify", str(tmp_path / name), "--tokens", "8"])
    assert "agrees with transformers: logits of 8 tokens are off by" in text.stdout


def test_the_layer_that_differs_is_seen(tmp_path: Path) -> None:
    config = _saved("qwen3", tmp_path / "m")
    config, params = load(tmp_path / "m", "float32")
    params["layers"][1]["post_norm"] = params["layers"][1]["post_norm"] * 1.5
    result = verify(config, params, tmp_path / "m")
    errors = [layer.max_abs_difference for layer in result.layers]
    assert not result.holds
    assert errors[1] < 1e-5 < 1e-2 < errors[2]


def test_without_transformers_it_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _saved("qwen3", tmp_path / "m")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'Run `pip install "qwenjax-roofline\[reference\]"`'):
        CliRunner().invoke(app, ["verify", str(tmp_path / "m")], catch_exceptions=False)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(InputError) as raised:
        CliRunner().invoke(app, ["verify", "nowhere"], catch_exceptions=False)
    assert str(raised.value) == "DIR = 'nowhere': is no folder. Name a checkpoint folder; hub ids are for `generate`."
