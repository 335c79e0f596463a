"""Weights in a checkpoint's files: packed integers by their bits, scales and zero points apart, tensor by tensor."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from checkpoint_files import FLOAT8, State, write_folder
from cli_run import figures
from config_base import QWEN3_MOE, Json

import qwenjax
from qwenjax.checkpoint.counting import count_tensors
from qwenjax.checkpoint.shards import StoredTensor
from qwenjax.config import ModelConfig
from roofline.count import count_params


def state_of(data: Json) -> State:
    return dict(tiny.state_dict(ModelConfig.from_hf(data)))


def packed(bits: int, out: int, into: int, kind: str, *, group: int = 16, container: Any = np.int32) -> State:
    """One linear layer's tensors as AutoGPTQ (inputs packed) or AutoAWQ (outputs packed) lay them out."""
    per = np.dtype(container).itemsize * 8
    rows, columns = (into * bits // per, out) if kind == "gptq" else (into, out * bits // per)
    tensors = {
        "qweight": np.zeros((rows, columns), container),
        "qzeros": np.zeros((into // group, -(-out * bits // per)), container),
        "scales": np.ones((into // group, out), np.float16),
    }
    return tensors | ({"g_idx": np.zeros(into, np.int32)} if kind == "gptq" else {})


def header(state: State) -> dict[str, StoredTensor]:
    names = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8", "int8": "I8"}
    names |= {"float8_e4m3fn": "F8_E4M3", "bfloat16": "BF16"}
    return {key: StoredTensor(Path("x"), names[value.dtype.name], value.shape, 0) for key, value in state.items()}


def named(name: str, tensors: State) -> State:
    return {f"{name}.{part}": value for part, value in tensors.items()}


def test_eight_weights_lie_in_an_integer() -> None:
    tensors = header({"a.qweight": np.zeros((8, 64), np.int32)})
    assert count_tensors(tensors, 4).num_weights == 8 * 64 * 8
    assert count_tensors(tensors, 8).num_weights == 8 * 64 * 4
    unknown = count_tensors(tensors)
    assert (unknown.num_weights, unknown.unknown_width) == (0, ("a.qweight",))


@pytest.mark.parametrize("stated", [None, 4, 8])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["gptq", "awq"])
@pytest.mark.parametrize("left_out", [(), ("g_idx",), ("qzeros", "scales")])
def test_the_width_is_that_of_the_neighbours(kind: str, bits: int, stated: int | None, left_out: Any) -> None:
    """Zero points beside scales tell it, or GPTQ's order of groups; a config may say another, or nothing."""
    tensors = {key: value for key, value in packed(bits, 96, 64, kind).items() if key not in left_out}
    totals = count_tensors(header(named("m", tensors)), stated)
    if kind == "awq" and "qzeros" in left_out:
        assert totals.num_weights == (96 * bits // 32 * 64 * 32 // stated if stated else 0)
        return
    assert totals.num_weights == 96 * 64
    assert totals.num_quantization_values == sum(prod(v.shape) for k, v in tensors.items() if k != "qweight")
    assert totals.num_bytes == sum(value.nbytes for value in tensors.values())


def test_integers_of_other_sizes_and_one_scale_for_all_inputs() -> None:
    for container in (np.int64, np.uint8):
        tensors = header(named("m", packed(4, 96, 64, "gptq", container=container)))
        assert count_tensors(tensors).num_weights == 96 * 64
    assert count_tensors(header(named("m", packed(4, 96, 64, "gptq", group=64))), 8).num_weights == 96 * 64


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("out", [1, 4, 60, 100])
def test_outputs_that_fill_no_whole_integer(out: int, bits: int) -> None:
    """A router's few outputs, or a scalar gate's one: the zero points are padded, and the order of groups tells."""
    tensors = header(named("m", packed(bits, out, 64, "gptq")))
    assert count_tensors(tensors).num_weights == count_tensors(tensors, 2).num_weights == out * 64
    del tensors["m.g_idx"]
    assert count_tensors(tensors, bits).num_weights == out * 64


@pytest.mark.parametrize(
    ("tensors", "weights", "apart"),
    [
        ({"weight": np.zeros((96, 64), FLOAT8), "weight_scale_inv": np.ones((1, 1), np.float32)}, 96 * 64, 1),
        ({"weight": np.zeros((96, 64), FLOAT8), "weight_scale": np.ones((), np.float32),
          "input_scale": np.ones((), np.float32)}, 96 * 64, 2),
        ({"weight": np.zeros((96, 32), np.uint8), "weight_scale": np.zeros((96, 4), FLOAT8),
          "weight_scale_2": np.ones((), np.float32)}, 96 * 64, 96 * 4 + 1),
        ({"weight_packed": np.zeros((96, 32), np.uint8), "weight_scale": np.zeros((96, 4), FLOAT8),
          "weight_global_scale": np.ones(1, np.float32)}, 96 * 64, 96 * 4 + 1),
        ({"weight": np.zeros((96 * 32, 1), np.uint8), "weight.absmax": np.zeros(96, np.uint8),
          "weight.quant_map": np.zeros(16, np.float32)}, 96 * 64, 96 + 16),
        ({"weight": np.zeros((96, 64), np.int8), "SCB": np.zeros(96, np.float32)}, 96 * 64, 96),
        ({"weight": np.zeros((96, 64), np.float16), "bias": np.zeros(96, np.float16)}, 96 * 65, 0),
    ],
    ids=["fp8 blocks", "fp8 tensor", "nvfp4", "compressed nvfp4", "bitsandbytes 4", "bitsandbytes 8", "plain"],
)  # fmt: skip
def test_other_kinds_count_their_weights_too(tensors: State, weights: int, apart: int) -> None:
    totals = count_tensors(header(named("m", tensors)))
    assert (totals.num_weights, totals.num_quantization_values, totals.unknown_width) == (weights, apart, ())


def quantised_moe(bits: int, *plain: str) -> State:
    """M3 as GPTQ stores it: every linear packed but the head and what `plain` names, the router among them or not."""
    state: State = {}
    for key, value in state_of(QWEN3_MOE).items():
        name = key.removesuffix(".weight")
        keep = value.ndim != 2 or name.endswith(("embed_tokens", "lm_head", *plain))
        state |= (
            {key: value.astype(np.float16)}
            if keep
            else named(name, packed(bits, value.shape[0], value.shape[1], "gptq"))
        )
    return state


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kept", [None, [], ["mlp.gate"], ["lm_head"]])
@pytest.mark.parametrize("plain", [("mlp.gate",), ("mlp.gate", "down_proj"), ()], ids=str)  # (): the router is packed
def test_each_tensor_of_a_quantised_mixture_decides_for_itself(
    tmp_path: Path, bits: int, kept: Any, plain: tuple[str, ...]
) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 16, "modules_to_not_convert": kept}
    folder = write_folder(tmp_path, {**QWEN3_MOE, "quantization_config": quantization}, quantised_moe(bits, *plain))
    record = figures("qwenjax inspect", str(folder))
    expected = count_params(ModelConfig.from_hf(QWEN3_MOE)).num_params
    assert record["num_params"] == record["stored"]["num_weights"] == expected
    assert record["stored"]["num_quantization_values"] > 0
    assert record["stored"]["num_bytes"] == sum(value.nbytes for value in quantised_moe(bits, *plain).values())
    assert any("holds GPTQ weights, which can't be loaded" in note["text"] for note in record["notes"])
    assert figures("roofline params", str(folder))["num_params"] == expected


def test_an_fp8_router_and_a_plain_expert_load_as_they_lie(tmp_path: Path) -> None:
    state = state_of(QWEN3_MOE)
    router, expert = "model.layers.0.mlp.gate.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
    for key in [key for key in state if key.endswith("_proj.weight") and key != expert] + [router]:
        rows, columns = state[key].shape
        state[key] = state[key].astype(FLOAT8)
        state[f"{key}_scale_inv"] = np.full((-(-rows // 128), -(-columns // 128)), 0.5, np.float32)
    data = {**QWEN3_MOE, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    folder = write_folder(tmp_path, data, state)
    _, params = qwenjax.load(folder, "float32")
    np.testing.assert_array_equal(params["layers"][0]["router"], state[router].astype(np.float32) / 2)
    stored = figures("qwenjax inspect", str(folder))["stored"]
    assert stored["num_weights"] == count_params(ModelConfig.from_hf(QWEN3_MOE)).num_params
