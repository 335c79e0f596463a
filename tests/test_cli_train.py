"""`qwenjax train`: a run from a config, one that is cut off and goes on, and one from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from cli_run import figures, run

import qwenjax

SMALL = {"num_hidden_layers": 1, "num_attention_heads": 6, "head_dim": 4, "hidden_size": 20, "vocab_size": 256}
TEXT = "the same line, again and again. " * 8
OPTIONS = "--steps 30 --batch-size 4 --sequence-len 8 --learning-rate 0.02 --warmup-steps 2 --log-every 10"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds config.json, text, and `whole`, the result of a run in one go."""
    path = tmp_path_factory.mktemp("train")
    (path / "config.json").write_text(json.dumps(tiny.config_json("qwen3", **SMALL)))
    (path / "text").write_text(TEXT)
    record = figures(f"qwenjax train {path}/config.json --data {path}/text -o {path}/whole {OPTIONS}")
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "train_state.npz"]
    assert record.pop("loss_nats_per_token") < record.pop("unigram_entropy_nats_per_token") == pytest.approx(2.371228)
    config, _ = qwenjax.load(path / "whole")
    assert record == {
        "folder": str(path / "whole"),
        "step": 30,
        "steps": 30,
        "num_params": sum(leaf.size for leaf in jax.tree.leaves(qwenjax.param_shapes(config))),
        "files": files,
    }
    return path


def test_a_run_that_is_cut_off_goes_on(folder: Path) -> None:
    command = f"qwenjax train {folder}/config.json --data {folder}/text -o {folder}/parts {OPTIONS}"
    first = run(f"{command} --stop-at 10")
    assert first.status == 0
    assert first.stderr.splitlines()[0] == f"starting from random weights: {folder}/config.json has none"
    assert first.stderr.splitlines()[1].startswith("step 10/30  loss ")
    assert first.stdout.startswith(f"{folder}/parts: ")
    assert "parameters after step 10 of 30, loss " in first.stdout
    second = run(command)
    assert [line.split("  loss")[0] for line in second.stderr.splitlines()] == ["step 20/30", "step 30/30"]
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (folder / "parts" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_a_run_starts_from_a_checkpoint(folder: Path) -> None:
    options = OPTIONS.replace("0.02", "1e-7").replace("--steps 30", "--steps 3")
    result = run(f"qwenjax train {folder}/whole --data {folder}/text -o {folder}/tuned {options}")
    assert result.status == 0
    assert "random" not in result.stderr
    (_, before), (_, after) = qwenjax.load(folder / "whole"), qwenjax.load(folder / "tuned")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before, after)
    assert (before["embed_tokens"] != after["embed_tokens"]).any()


def test_what_cannot_be_used_is_one_message(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "file").write_text("kept")
    command = f"qwenjax train {folder}/config.json --data {folder}/text"
    afresh = "Go on with the settings of the run, or start afresh in another folder."
    cases = {
        f"{command} -o {folder}/other {OPTIONS}": (
            f"{folder}/other: exists and holds no run to go on with. Name a new folder, or that of a run."
        ),
        f"{command} -o {folder}/whole {OPTIONS} --seed 1": (
            f"seed = 1: the run in {folder}/whole/train_state.npz has 0. {afresh}"
        ),
        f"{command} -o {folder}/new {OPTIONS} --remat half": (
            "remat = 'half': is no known policy. Use one of none, full, dots."
        ),
        f"{command} -o {folder}/new --steps 3 --sequence-len 9999": (
            f"{folder}/text: holds 256 bytes, fewer than one sequence of 9999. Use a longer text or shorter sequences."
        ),
    }
    for line, message in cases.items():
        result = run(line)
        assert (result.status, result.stdout, result.stderr) == (2, "", f"{message}\n")
    assert not (folder / "new").exists()
    assert [path.name for path in (folder / "other").iterdir()] == ["file"]
