"""Checkpoints exchanged with transformers: what one saves, the other loads to the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import tiny
import torch
from checkpoint_files import assert_same, config_json, leaves
from transformers import AutoConfig, AutoModelForCausalLM

import qwenjax
from qwenjax.checkpoint.layout import tensors_of
from qwenjax.config import ModelConfig

pytestmark = reference.MARK
TOKENS = tiny.tokens("checkpoint", 2, 64)


def loaded_there(folder: Path) -> Any:
    """transformers' model of a folder; that every tensor was used, and none invented, is its own word."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    faults = {name: list(info[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    assert faults == {name: [] for name in faults}
    return model.eval()


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    return reference.logits_of(model, TOKENS)


def built(model_type: str, tied: bool) -> tuple[ModelConfig, Any]:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.9}
    windows = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    config = ModelConfig.from_hf(
        config_json(model_type, tie_word_embeddings=tied, rope_scaling=rope, eos_token_id=[3, 7], **windows)
    )
    return config, tiny.params(config)


@pytest.mark.parametrize("spelling", ["4.x", "5.x"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", reference.MODEL_TYPES)
def test_what_is_saved_gives_equal_logits_in_transformers(
    tmp_path: Path, model_type: str, tied: bool, spelling: Any
) -> None:
    config, params = built(model_type, tied)
    folder = tmp_path / "model"
    qwenjax.save(config, params, folder, spelling=spelling, max_shard_bytes=60_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    state = loaded_there(folder).state_dict()
    for key, tensor in tiny.state_dict(config).items():
        if ".experts." not in key:  # transformers 5 joins those, and the logits tell
            assert np.array_equal(state[key].numpy(), tensor), key
    assert np.abs(logits_of(loaded_there(folder)) - forward(config, params)).max() < reference.TOLERANCE


def forward(config: ModelConfig, params: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return np.asarray(qwenjax.forward(config, params, TOKENS))


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("model_type", reference.MODEL_TYPES)
def test_what_transformers_saves_is_loaded(tmp_path: Path, model_type: str, shards: bool) -> None:
    data = config_json(model_type)
    torch.manual_seed(1)
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**json.loads(json.dumps(data))), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for name, value in theirs.state_dict().items():  # norms that aren't one, biases that aren't zero
        if value.ndim == 1:
            value += torch.rand(value.shape) - 0.5
        assert value.dtype == torch.float32, name
    theirs.save_pretrained(tmp_path, max_shard_size="60KB" if shards else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    config, params = qwenjax.load(tmp_path)
    assert config == ModelConfig.from_hf(data)
    qwenjax.save(config, params, tmp_path / "ours")
    ours = loaded_there(tmp_path / "ours").state_dict()
    assert all(torch.equal(ours[key], value) for key, value in theirs.state_dict().items())
    assert np.abs(logits_of(theirs) - forward(config, params)).max() < reference.TOLERANCE


def test_a_conversion_rounds_as_torch_does(tmp_path: Path) -> None:
    config, params = built("qwen3", False)
    qwenjax.save(config, params, tmp_path / "model")
    for name in ("bfloat16", "float16"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=getattr(torch, name))
        _, ours = qwenjax.load(tmp_path / "model", name)
        qwenjax.save(config, ours, tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=getattr(torch, name))
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), key
    assert len(list(tensors_of(config))) == len(leaves(params)) + 3 * 3  # q, k, v and gate, up lie in one array


def test_a_tied_model_saved_with_its_head_is_the_same(tmp_path: Path) -> None:
    config, params = built("qwen3", True)
    qwenjax.save(config, params, tmp_path / "model")
    model = loaded_there(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "theirs")
    _, again = qwenjax.load(tmp_path / "theirs")
    assert_same(again, jax.tree.map(jnp.asarray, params))
