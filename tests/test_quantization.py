"""What quantization_config and hf_quant_config.json say, and the kinds that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from config_base import QWEN3, Json, changed, read

from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.quantization import Quantization, read_hf_quant_config, read_quantization

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
COMPRESSED_WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(inputs: Json | None = None, **weights: Any) -> Json:
    group = {"targets": ["Linear"], "weights": {**COMPRESSED_WEIGHTS, **weights}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


COMPRESSED = compressed()
MODELOPT = {"quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]}


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (None, None),
        (FP8, Quantization("fp8", 8, block=(128, 128))),
        (
            {**FP8, "weight_block_size": [64, 32], "modules_to_not_convert": ["lm_head"]},
            Quantization("fp8", 8, block=(64, 32), modules_to_not_convert=("lm_head",)),
        ),
        (GPTQ, Quantization("gptq", 4, 128)),
        ({**GPTQ, "bits": 8, "group_size": -1}, Quantization("gptq", 8, None)),
        (AWQ, Quantization("awq", 4, 128)),
        ({**AWQ, "modules_to_not_convert": None}, Quantization("awq", 4, 128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, Quantization("awq", 4, 64)),
        ({**AWQ, "w_bit": 4, "q_group_size": None}, Quantization("awq", 4, 128)),
        (MODELOPT, Quantization("modelopt", 4, 16, modules_to_not_convert=("lm_head",), algorithm="NVFP4")),
        ({**MODELOPT, "quant_method": None}, read_quantization(MODELOPT)),
        ({**MODELOPT, "quant_method": "modelopt"}, read_quantization(MODELOPT)),
        ({"quant_algo": "FP8"}, Quantization("modelopt", 8, algorithm="FP8")),
        ({"quant_method": "fp8", "activation_scheme": "static"}, Quantization("fp8", 8)),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
            Quantization("fbgemm_fp8", 8, None, None, ("lm_head",), "FP8", per_channel=True),
        ),
        (COMPRESSED, Quantization("compressed-tensors", 4, 128, None, ("lm_head",), "INT")),
        (
            compressed(num_bits=8, strategy="channel", group_size=None, inputs={"num_bits": 8, "type": "int"}),
            Quantization("compressed-tensors", 8, None, None, ("lm_head",), "INT", True, "int8"),
        ),
        (
            compressed(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            Quantization("compressed-tensors", 8, None, (128, 128), ("lm_head",), "FP8"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            Quantization("bitsandbytes", 4, 64, algorithm="nf4"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            Quantization("bitsandbytes", 4, 64, algorithm="fp4-double"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]},
            Quantization("bitsandbytes", 8, None, None, ("lm_head",), "INT", True, "int8"),
        ),
    ],
)
def test_kinds_that_are_read(block: Any, expected: Quantization | None) -> None:
    assert read_quantization(block) == expected
    assert read(QWEN3, quantization_config=block).quantization == expected


METHODS = (
    "Known: fp8, gptq, awq, modelopt, compressed-tensors, bitsandbytes, fbgemm_fp8. Use the unquantised checkpoint."
)
GROUP = "must be a positive integer, or -1 for the whole input axis. Qwen's checkpoints say 128."
BLOCK = "must be two positive integers. Qwen's FP8 checkpoints say [128, 128]."


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("fp8", "quantization_config = 'fp8': must be null or an object. Remove it for unquantised weights."),
        ([], "quantization_config = []: must be null or an object. Remove it for unquantised weights."),
        ({}, f"quantization_config.quant_method: is null, but must be a kind that is known here. {METHODS}"),
        *(
            (
                {"quant_method": method},
                f"quantization_config.quant_method = {method!r}: must be a kind that is known here. {METHODS}",
            )
            for method in ("hqq", "torchao", "mxfp4", "gguf", "FP8", 8, ["fp8"])
        ),
        *(
            ({**FP8, "weight_block_size": value}, f"quantization_config.weight_block_size = {value!r}: {BLOCK}")
            for value in (128, [128], [128, 0], [128, True], [128.0, 128.0], "128")
        ),
        ({"quant_method": "fp8"}, f"quantization_config.weight_block_size: is null, but {BLOCK}"),
        *(
            ({**GPTQ, "bits": bits}, f"quantization_config.bits = {bits!r}: must be one of 2, 3, 4, 8. Check the file.")
            for bits in (0, 1, 5, 16, -4, "4", True, [4])
        ),
        (
            {**COMPRESSED, "config_groups": {}},
            "quantization_config.config_groups = {}: must be an object of one group. "
            "Several at once aren't implemented.",
        ),
        (
            compressed(num_bits=3),
            "quantization_config.config_groups.group_0.weights.num_bits = 3: and type 'int' are no pair that is known "
            "here. Known: int of 4 or 8, float of 4 or 8.",
        ),
        (
            compressed(strategy="token"),
            "quantization_config.config_groups.group_0.weights.strategy = 'token': must be tensor, channel, group, "
            "block or tensor_group. Check the file.",
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": False},
            "quantization_config.load_in_4bit = False: is off, and so is load_in_8bit. Check the file.",
        ),
        ({"quant_method": "gptq"}, "quantization_config.bits: is null, but must be one of 2, 3, 4, 8. Check the file."),
        *(
            ({**AWQ, "group_size": group}, f"quantization_config.group_size = {group!r}: {GROUP}")
            for group in (0, -2, "128", 128.0, True, [128])
        ),
        ({"quant_method": "awq", "bits": 4}, f"quantization_config.group_size: is null, but {GROUP}"),
        (
            {**AWQ, "w_bit": 8},
            "quantization_config.bits: is given in spellings that disagree (bits 4 and w_bit 8). Keep one of them.",
        ),
        (
            {"quant_algo": "W4A8_AWQ"},
            "quantization_config.quant_algo = 'W4A8_AWQ': must be a kind that is known here. Known: FP8, NVFP4.",
        ),
        (
            {"quant_method": "modelopt"},
            "quantization_config.quant_algo: is null, but must be a kind that is known here. Known: FP8, NVFP4.",
        ),
        (
            {**MODELOPT, "ignore": "lm_head"},
            "quantization_config.ignore = 'lm_head': must be a list of names. Check the file.",
        ),
        (
            {**GPTQ, "modules_to_not_convert": [1]},
            "quantization_config.modules_to_not_convert = [1]: must be a list of names. Check the file.",
        ),
    ],
)
def test_refused(block: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelConfig.from_hf(changed(QWEN3, quantization_config=block))
    assert str(caught.value) == text


# hf_quant_config.json, which modelopt writes beside config.json

HF_QUANT: Json = {
    "producer": {"name": "modelopt"},
    "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
}


def folder_with(tmp_path: Path, config: Json, beside: Any) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    return tmp_path


def test_the_file_beside_is_read_with_a_folder_or_its_config(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, QWEN3, HF_QUANT)
    expected = Quantization("modelopt", 4, 16, modules_to_not_convert=("lm_head",), algorithm="NVFP4")
    assert ModelConfig.from_hf(folder).quantization == expected
    assert ModelConfig.from_hf(folder / "config.json").quantization == expected


def test_the_config_itself_comes_first(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, changed(QWEN3, quantization_config=FP8), HF_QUANT)
    assert ModelConfig.from_hf(folder).quantization == read_quantization(FP8)


def test_a_config_of_another_name_does_not_own_the_file_beside(tmp_path: Path) -> None:
    folder_with(tmp_path, QWEN3, HF_QUANT)
    (tmp_path / "other.json").write_text(json.dumps(QWEN3))
    assert ModelConfig.from_hf(tmp_path / "other.json").quantization is None


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({}, "quantization: is null, but must be an object in hf_quant_config.json. Check the file."),
        ([], "quantization: is null, but must be an object in hf_quant_config.json. Check the file."),
        (
            {"quantization": "NVFP4"},
            "quantization = 'NVFP4': must be an object in hf_quant_config.json. Check the file.",
        ),
        (
            {"quantization": {"quant_algo": None}},
            "quantization.quant_algo: is null, but must be a kind that is known here. Known: FP8, NVFP4.",
        ),
        (
            {"quantization": {"quant_algo": "FP8", "exclude_modules": {"a": 1}}},
            "quantization.exclude_modules = {'a': 1}: must be a list of names. Check the file.",
        ),
    ],
)
def test_files_beside_that_say_nothing(content: Any, text: str) -> None:
    with pytest.raises(InputError) as caught:
        read_hf_quant_config(content)
    assert str(caught.value) == text


def test_real_files(shared: Path) -> None:
    folder = shared / "configs"
    for name, bits, kept in (
        ("nvidia-Qwen3-235B-A22B-NVFP4", 4, 95),
        ("Qwen3-32B-FP8-Static-PerTensor", 8, 1),
    ):
        read_file = read_hf_quant_config(json.loads((folder / f"{name}.hf_quant_config.json").read_text()))
        assert (read_file.method, read_file.bits, len(read_file.modules_to_not_convert)) == ("modelopt", bits, kept)
    per_tensor = ModelConfig.from_hf(folder / "Qwen3-32B-FP8-Static-PerTensor.json").quantization
    assert per_tensor == Quantization("modelopt", 8, modules_to_not_convert=("lm_head",), algorithm="FP8")
    blocks = ModelConfig.from_hf(folder / "Qwen3-235B-A22B-FP8.json").quantization
    assert blocks is not None
    assert (blocks.block, len(blocks.modules_to_not_convert)) == ((128, 128), 1 + 3 * 94)
