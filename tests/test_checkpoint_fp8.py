"""FP8 checkpoints with block scales: dequantised in float32, decided by each tensor's own dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoint_files import BFLOAT16, FLOAT8, Array, State, config_json, leaves, write_folder
from hf_bridge import fused_experts

import qwenjax
from qwenjax.checkpoint import reading
from qwenjax.checkpoint.quantised import scale_shape
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

BLOCK = (16, 24)  # ragged on every axis of the tiny model: 40, 56, 192, 48
STATED = {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3", "activation_scheme": "dynamic"}
KEPT = ("embed_tokens", "norm", "lm_head", "mlp.gate.weight", "shared_expert_gate")


def quantise(value: Array, block: tuple[int, int]) -> tuple[Array, Array]:
    """FP8 values and the scale of each block, so that value = stored * scale, one block after another."""
    *experts, rows, columns = value.shape
    flat = value.reshape(-1, rows, columns)
    stored = np.zeros(flat.shape, FLOAT8)
    scales = np.zeros((len(flat), -(-rows // block[0]), -(-columns // block[1])), np.float32)
    for e, i, j in np.ndindex(scales.shape):
        part = np.s_[e, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[e, i, j] = np.abs(flat[part]).max() / 448
        stored[part] = (flat[part] / scales[e, i, j]).astype(FLOAT8)
    return stored.reshape(value.shape), scales.reshape(*experts, *scales.shape[1:])


def dequantise(stored: Array, scales: Array, block: tuple[int, int]) -> Array:
    repeated = scales.astype(np.float32).repeat(block[0], -2).repeat(block[1], -1)
    whole: Array = stored.astype(np.float32) * repeated[..., : stored.shape[-2], : stored.shape[-1]]
    return whole


def quantised(state: State, block: tuple[int, int], scale_dtype: Any = np.float32) -> tuple[State, State]:
    """The files' tensors, and the plain tensors that they mean."""
    files, plain = {}, {}
    for key, value in state.items():
        if value.ndim < 2 or any(name in key for name in KEPT):
            files[key] = plain[key] = value
            continue
        stored, scales = quantise(value, block)
        files[key], files[f"{key}_scale_inv"] = stored, scales.astype(scale_dtype)
        plain[key] = dequantise(stored, files[f"{key}_scale_inv"], block)
    return files, plain


def close(params: Any, expected: Any, dtype: Any) -> None:
    """Equal after the same rounding."""
    found, wanted = leaves(params), leaves(expected)
    assert sorted(found) == sorted(wanted)
    for name, leaf in found.items():
        assert np.array_equal(np.asarray(leaf), np.asarray(wanted[name]).astype(dtype)), name


@pytest.mark.parametrize("piece", [1, 500, 2**23])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_blocks_are_scaled_to_their_ragged_edges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, piece: int
) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    data = config_json(model_type, quantization_config=STATED)
    config = ModelConfig.from_hf(config_json(model_type))
    files, plain = quantised(tiny.state_dict(config), BLOCK)
    loaded, params = qwenjax.load(write_folder(tmp_path, data, files))
    close(params, tiny.hf_bridge.from_state_dict(config, plain), np.float32)
    assert loaded == config  # what is in memory isn't quantised any more
    kinds = {(note.kind, note.field): note.text for note in loaded.notes}
    assert kinds["ignored", "quantization_config"] == "the FP8 weights were dequantised as they were loaded"


def test_scaling_is_in_float32_and_rounded_once(tmp_path: Path) -> None:
    data = config_json("qwen3", quantization_config=STATED, torch_dtype="bfloat16")
    config = tiny.config()
    files, plain = quantised(tiny.state_dict(config), BLOCK, BFLOAT16)
    _, params = qwenjax.load(write_folder(tmp_path, data, files))
    close(params, tiny.hf_bridge.from_state_dict(config, plain), jnp.bfloat16)
    key = "model.layers.0.self_attn.o_proj.weight"
    scales = files[f"{key}_scale_inv"].repeat(16, 0).repeat(24, 1)[:40, :192]
    twice = (files[key].astype(BFLOAT16) * scales).astype(np.float32)
    assert not np.array_equal(twice, plain[key])  # in bfloat16 it would be another matrix


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_fused_experts_have_blocks_of_their_own(tmp_path: Path, model_type: str) -> None:
    data = config_json(model_type, quantization_config=STATED)
    config = ModelConfig.from_hf(config_json(model_type))
    files, plain = quantised(fused_experts(tiny.state_dict(config)), BLOCK)
    assert files["model.layers.0.mlp.experts.gate_up_proj_scale_inv"].shape == (5, 3, 2)
    _, params = qwenjax.load(write_folder(tmp_path, data, files))
    key = "model.layers.2.mlp.experts.gate_up_proj"
    wanted = plain[key].reshape(5, 2, 24, 40)
    assert np.array_equal(np.asarray(params["layers"][2]["experts_gate_up_proj"]), wanted)
    down = plain["model.layers.0.mlp.experts.down_proj"]
    assert np.array_equal(np.asarray(params["layers"][0]["experts_down_proj"]), down)


def test_blocks_of_128_where_no_config_says_so(tmp_path: Path) -> None:
    data = config_json("qwen3", num_hidden_layers=1)
    config = ModelConfig.from_hf(data)
    files, plain = quantised(tiny.state_dict(config), (128, 128))
    assert files["model.layers.0.self_attn.q_proj.weight_scale_inv"].shape == (2, 1)
    loaded, params = qwenjax.load(write_folder(tmp_path, data, files))
    close(params, tiny.hf_bridge.from_state_dict(config, plain), np.float32)
    assert loaded == config


def test_each_tensor_decides_for_itself(tmp_path: Path) -> None:
    # bug report I3: modules_to_not_convert is left out, one matrix is plain, and one that is usually plain isn't.
    data = config_json("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[], quantization_config=STATED)
    config = ModelConfig.from_hf(config_json("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[]))
    state = tiny.state_dict(config)
    files, plain = quantised(state, BLOCK)
    key, router = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.gate.weight"
    files[key] = plain[key] = state[key]
    del files[f"{key}_scale_inv"]
    files[router], files[f"{router}_scale_inv"] = quantise(state[router], BLOCK)
    plain[router] = dequantise(files[router], files[f"{router}_scale_inv"], BLOCK)
    _, params = qwenjax.load(write_folder(tmp_path, data, files))
    close(params, tiny.hf_bridge.from_state_dict(config, plain), np.float32)


def test_a_config_that_says_fp8_over_plain_weights_loads_them(tmp_path: Path) -> None:
    data = config_json("qwen3", quantization_config=STATED)
    config, params = qwenjax.load(write_folder(tmp_path, data, tiny.state_dict(tiny.config())))
    close(params, tiny.params(tiny.config()), np.float32)
    assert config.quantization is None


def test_scales_that_are_missing_misshapen_or_stray_are_told_together(tmp_path: Path) -> None:
    data = config_json("qwen3", num_hidden_layers=1, quantization_config=STATED)
    files, _ = quantised(tiny.state_dict(ModelConfig.from_hf(data)), BLOCK)
    layer = "model.layers.0"
    del files[f"{layer}.self_attn.q_proj.weight_scale_inv"]
    files[f"{layer}.self_attn.o_proj.weight_scale_inv"] = np.ones((8, 3), np.float32)
    files[f"{layer}.mlp.up_proj.weight_scale_inv"] = np.ones((4, 2), np.int32)
    files[f"{layer}.mlp.down_proj.weight"] = np.ones((40, 56), np.float32)
    files[f"{layer}.mlp.gate_proj.weight"] = np.ones((56, 40), jnp.float8_e5m2)
    files[f"{layer}.input_layernorm.weight"] = np.ones(40, FLOAT8)
    folder = write_folder(tmp_path, data, files)
    with pytest.raises(InputError) as caught:
        qwenjax.load(folder)
    assert str(caught.value) == (
        f"{folder}: the tensors don't fit config.json (3 wrong dtype, 1 missing, 1 misshapen, 2 unexpected):\n"
        f"  wrong dtype: {layer}.input_layernorm.weight: is F8_E4M3, expected BF16, F16, F32, or F8_E4M3 matrices\n"
        f"  wrong dtype: {layer}.mlp.gate_proj.weight: is F8_E5M2, expected BF16, F16, F32, or F8_E4M3 matrices\n"
        f"  wrong dtype: {layer}.mlp.up_proj.weight_scale_inv: is I32, expected BF16, F16, F32\n"
        f"  missing: {layer}.self_attn.q_proj.weight_scale_inv: expected [12, 2], the scales of "
        f"{layer}.self_attn.q_proj.weight, which is F8_E4M3\n"
        f"  misshapen: {layer}.self_attn.o_proj.weight_scale_inv: is [8, 3], expected [3, 8] for blocks of 16x24\n"
        f"  unexpected: {layer}.mlp.down_proj.weight_scale_inv: F32 [3, 3]\n"
        f"  unexpected: {layer}.mlp.gate_proj.weight_scale_inv: F32 [4, 2]. "
        "config.json and the weights are of different models: use the config.json of these weights."
    )


def test_the_last_block_of_an_axis_may_be_a_part_of_one() -> None:
    assert scale_shape((5120, 25600), (128, 128)) == (40, 200)
    assert scale_shape((8, 129, 127), (128, 128)) == (8, 2, 1)


def test_a_tied_head_is_compared_with_an_fp8_embedding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PIECE", 100)  # two rows and a half
    data = config_json("qwen3", tie_word_embeddings=True)
    state = tiny.state_dict(ModelConfig.from_hf(data))
    key = "model.embed_tokens.weight"
    stored, scales = quantise(state[key], (128, 128))
    head = dequantise(stored, scales, (128, 128))
    files = state | {key: stored, f"{key}_scale_inv": scales, "lm_head.weight": head}
    _, params = qwenjax.load(write_folder(tmp_path, data, files))
    assert np.array_equal(np.asarray(params["embed_tokens"]), head)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
