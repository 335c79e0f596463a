"""Tensors against the config: each used exactly once, and everything that doesn't fit told in one error."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoint_files import BFLOAT16, State, assert_same, config_json, tiny_folder, write_file, write_folder
from hf_bridge import fused_experts

import qwenjax
from qwenjax.checkpoint import loading
from qwenjax.checkpoint.layout import HEAD_KEY, tensors_of
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

ONE_CHECKPOINT = "Use the config.json and all files of one checkpoint."
OTHER_MODEL = "config.json and the weights are of different models: use the config.json of these weights."


def error_of(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        qwenjax.load(folder)
    return str(caught.value)


def misfit(folder: Path, counts: str, *lines: str, remedy: str = ONE_CHECKPOINT) -> str:
    told = "\n".join(f"  {line}" for line in lines)
    return f"{folder}: the tensors don't fit config.json ({counts}):\n{told}. {remedy}"


def test_all_that_is_wrong_is_told_at_once_and_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, state = tiny_folder(tmp_path, "qwen2")
    del state["model.layers.2.self_attn.k_proj.bias"], state["model.norm.weight"]
    state["model.layers.1.mlp.down_proj.weight"] = state["model.layers.1.mlp.down_proj.weight"].T.copy()
    state["model.layers.0.input_layernorm.weight"] = np.ones(40, np.int64)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    state["score.weight"] = np.ones((2, 40), BFLOAT16)
    write_file(folder / "model.safetensors", state)

    def never(*args: Any) -> None:
        raise AssertionError("memory was spent")

    monkeypatch.setattr(loading, "aligned_empty", never)
    monkeypatch.setattr(loading, "fill", never)
    assert error_of(folder) == misfit(
        folder,
        "1 wrong dtype, 2 missing, 1 misshapen, 2 unexpected",
        "wrong dtype: model.layers.0.input_layernorm.weight: is I64, expected BF16, F16, F32, or F8_E4M3 matrices",
        "missing: model.layers.2.self_attn.k_proj.bias: expected [48]",
        "missing: model.norm.weight: expected [40]",
        "misshapen: model.layers.1.mlp.down_proj.weight: is [56, 40], expected [40, 56]",
        "unexpected: model.layers.0.self_attn.rotary_emb.inv_freq: F32 [8]",
        "unexpected: score.weight: BF16 [2, 40]",
        remedy=OTHER_MODEL,
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_no_key_is_optional(tmp_path: Path, model_type: str) -> None:
    # bug reports 19, H1
    data = config_json(model_type, num_hidden_layers=2)  # one sparse layer, one dense
    state = tiny.state_dict(ModelConfig.from_hf(data))
    for key in state:
        folder = write_folder(tmp_path, data, {other: value for other, value in state.items() if other != key})
        message = error_of(folder)
        assert f"(1 missing):\n  missing: {key}: expected {list(state[key].shape)}. " in message


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_norms_and_biases_of_another_architecture_are_unexpected(tmp_path: Path, kind: str) -> None:
    own, other = ("qwen2", "qwen3") if kind == "weight" else ("qwen3", "qwen2")
    data = config_json(own, num_hidden_layers=1)
    state = tiny.state_dict(ModelConfig.from_hf(config_json(other, num_hidden_layers=1)))
    message = error_of(write_folder(tmp_path, data, state))
    extra = [key for key in state if "q_norm" in key or "k_norm" in key or key.endswith(".bias")]
    assert len(extra) == (2 if kind == "weight" else 3)
    assert all(f"unexpected: {key}: " in message for key in extra)


def test_missing_keys_are_named_as_the_checkpoint_names_its_own(tmp_path: Path) -> None:
    data = config_json("qwen3", tie_word_embeddings=True)
    state = {key.removeprefix("model."): value for key, value in tiny.state_dict(ModelConfig.from_hf(data)).items()}
    del state["norm.weight"]
    folder = write_folder(tmp_path, data, state)
    assert error_of(folder) == misfit(folder, "1 missing", "missing: norm.weight: expected [40]")


def test_a_key_with_and_without_the_prefix(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path)
    write_file(folder / "model.safetensors", {**state, "norm.weight": state["model.norm.weight"]})
    expected = misfit(folder, "1 stored twice", "stored twice: norm.weight: with and without model.")
    assert error_of(folder) == expected


def test_long_lists_end_in_patterns_and_lose_no_count(tmp_path: Path) -> None:
    data = config_json("qwen3_moe", num_experts=40, mlp_only_layers=[])
    state = tiny.state_dict(ModelConfig.from_hf(data))
    kept = {key: value for key, value in state.items() if ".experts." not in key}
    message = error_of(write_folder(tmp_path, data, kept))
    assert "(360 missing)" in message
    assert message.count("\n  missing: model.layers.") == 100
    more = [line for line in message.splitlines() if " more like " in line]
    assert sum(int(line.split()[1]) for line in more) == 260
    assert more[0].startswith("  missing: 87 more like model.layers.*.mlp.experts.*.")


def test_lists_are_in_the_order_of_layers_and_names_may_be_anything(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path)
    names = ["model.layers.2.x", "model.layers.10.x", f"model.layers.{'9' * 5000}.x", "²", "\ud800", ""]
    one = np.ones(1, np.float32)
    write_file(folder / "model.safetensors", dict.fromkeys(reversed(names), one) | state)
    lines = error_of(folder).splitlines()[1:]
    assert [line.split()[1] for line in lines if "model.layers" in line] == [f"{name}:" for name in names[:3]]
    assert len(lines) == 6


@pytest.mark.parametrize(
    ("name", "extra"), [("Qwen2-7B-Instruct", set()), ("Qwen3-1.7B", {HEAD_KEY}), ("Qwen3-4B", set())]
)
def test_keys_and_bytes_are_those_of_published_indices(shared: Path, name: str, extra: set[str]) -> None:
    # Qwen3-1.7B is tied and stores its head all the same; Qwen3-4B is tied and doesn't.
    index = json.loads((shared / "configs" / f"{name}.index.json").read_text())
    config = ModelConfig.from_hf(shared / "configs" / f"{name}.json")
    tensors = list(tensors_of(config))
    assert index["weight_map"].keys() == {tensor.key for tensor in tensors} | extra
    elements = sum(prod(tensor.stored_shape) for tensor in tensors)
    head = config.vocab_size * config.hidden_size if extra else 0
    assert index["metadata"]["total_size"] == 2 * (elements + head)


# Tied and untied heads


def with_head(folder: Path, tied: bool, head: State, **changes: Any) -> Path:
    data = config_json("qwen3", tie_word_embeddings=tied, **changes)
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3", tie_word_embeddings=True)))
    return write_folder(folder, data, state | head)


def embedding(dtype: Any = np.float32) -> Any:
    return tiny.state_dict(tiny.config())["model.embed_tokens.weight"].astype(dtype)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_a_tied_model_is_the_same_with_a_copy_of_the_head_and_without(tmp_path: Path, model_type: str) -> None:
    # bug reports 23, 25, A1, A3
    without, state = tiny_folder(tmp_path / "without", model_type, tie_word_embeddings=True)
    data = config_json(model_type, tie_word_embeddings=True)
    head = {"lm_head.weight": state["model.embed_tokens.weight"]}
    stored = write_folder(tmp_path / "with", data, state | head)
    config, params = qwenjax.load(without)
    again, same = qwenjax.load(stored)
    assert config == again
    assert "lm_head" not in params
    assert_same(same, params)


def test_a_copy_of_the_head_may_be_stored_in_another_dtype(tmp_path: Path) -> None:
    rounded = embedding(BFLOAT16)
    head = {"lm_head.weight": rounded.astype(np.float32), "model.embed_tokens.weight": rounded}
    qwenjax.load(with_head(tmp_path, True, head))


@pytest.mark.parametrize("row", [0, 100])
def test_an_unequal_head_of_a_tied_model(tmp_path: Path, row: int) -> None:
    # bug reports 23
    head = embedding()
    head[row, -1] += 1e-6
    assert error_of(with_head(tmp_path, True, {"lm_head.weight": head})) == (
        "lm_head.weight: differs from model.embed_tokens.weight, although tie_word_embeddings is true. Set "
        "tie_word_embeddings to false in config.json if the head is its own matrix, or remove the tensor."
    )


def test_a_head_of_a_tied_model_that_is_no_copy_at_all(tmp_path: Path) -> None:
    folder = with_head(tmp_path, True, {"lm_head.weight": embedding()[:50]})
    line = "misshapen: lm_head.weight: is [50, 40], expected [101, 40], a copy of the tied embedding"
    assert error_of(folder) == misfit(folder, "1 misshapen", line, remedy=OTHER_MODEL)
    folder = with_head(tmp_path, True, {"lm_head.weight": embedding().astype(np.int32)})
    line = "wrong dtype: lm_head.weight: is I32, expected BF16, F16, F32"
    assert error_of(folder) == misfit(folder, "1 wrong dtype", line)


@pytest.mark.parametrize("says", [False, None])
def test_an_untied_model_without_a_head(tmp_path: Path, says: bool | None) -> None:
    # bug reports A5
    data = config_json("qwen3", tie_word_embeddings=False)
    if says is None:
        del data["tie_word_embeddings"]
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3", tie_word_embeddings=True)))
    folder = write_folder(tmp_path, data, state)
    told = "says tie_word_embeddings" if says is False else "doesn't state tie_word_embeddings, which then is"
    remedy = (
        f"config.json {told} false: write true if the embedding is the head, or add the file that holds it. "
        "An embedding model has none: load(..., lm_head=False) gives what hidden_states needs."
    )
    line = "missing: lm_head.weight: expected [101, 40]"
    assert error_of(folder) == misfit(folder, "1 missing", line, remedy=remedy)


def test_an_untied_head_is_loaded_although_the_flag_is_missing(tmp_path: Path) -> None:
    # bug reports A7
    data = config_json("qwen2")
    del data["tie_word_embeddings"]
    config, params = qwenjax.load(write_folder(tmp_path, data, tiny.state_dict(tiny.config("qwen2"))))
    assert_same(params, tiny.params(tiny.config("qwen2")))
    assert ("warning", "tie_word_embeddings") in {(note.kind, note.field) for note in config.notes}


# Config and weights of two models


def test_weights_of_another_model_say_so(tmp_path: Path) -> None:
    # bug reports N2
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3", hidden_size=48, tie_word_embeddings=True)))
    folder = write_folder(tmp_path, config_json("qwen3", tie_word_embeddings=True), state)
    message = error_of(folder)
    assert "misshapen: model.embed_tokens.weight: is [101, 48], expected [101, 40]\n" in message
    assert message.endswith(f". {OTHER_MODEL}")
    assert sum(line.startswith("  misshapen: ") for line in message.splitlines()) == 2 + 9 * 3


@pytest.mark.parametrize("stored", [2, 4])
def test_weights_of_another_depth_say_so(tmp_path: Path, stored: int) -> None:
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3", num_hidden_layers=stored)))
    message = error_of(write_folder(tmp_path, config_json("qwen3"), state))
    assert message.endswith(
        f". config.json says num_hidden_layers 3, and the files hold {stored} layers: "
        "use the config.json of these weights."
    )


def test_heads_of_another_size_with_equal_products_still_load_by_the_config(tmp_path: Path) -> None:
    # 12 heads of 16 and 24 of 8 have the same matrices: only the head norms and the config tell them apart.
    data = config_json("qwen3", num_attention_heads=24, num_key_value_heads=6, head_dim=8)
    message = error_of(write_folder(tmp_path, data, tiny.state_dict(tiny.config())))
    assert "misshapen: model.layers.0.self_attn.q_norm.weight: is [16], expected [8]" in message


# Experts


def test_dense_keys_where_the_config_says_experts_and_the_reverse(tmp_path: Path) -> None:
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3_moe", mlp_only_layers=[1])))
    message = error_of(write_folder(tmp_path, config_json("qwen3_moe", mlp_only_layers=[2]), state))
    assert "unexpected: model.layers.1.mlp.up_proj.weight: F32 [56, 40]" in message
    assert "missing: model.layers.2.mlp.up_proj.weight: expected [56, 40]" in message
    assert "missing: model.layers.1.mlp.experts.4.down_proj.weight: expected [40, 24]" in message


def test_experts_beyond_the_configs_number_are_unexpected(tmp_path: Path) -> None:
    state = tiny.state_dict(ModelConfig.from_hf(config_json("qwen3_moe", num_experts=6)))
    message = error_of(write_folder(tmp_path, config_json("qwen3_moe"), state))
    assert "unexpected: model.layers.0.mlp.experts.5.gate_proj.weight: F32 [24, 40]" in message
    assert "misshapen: model.layers.0.mlp.gate.weight: is [6, 40], expected [5, 40]" in message


def test_fused_and_single_experts_of_one_layer_are_both_told(tmp_path: Path) -> None:
    data = config_json("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    state = tiny.state_dict(ModelConfig.from_hf(data))
    both = state | fused_experts(state)
    folder = write_folder(tmp_path, data, both)
    message = error_of(folder)
    assert "(15 unexpected)" in message
    assert "unexpected: model.layers.0.mlp.experts.0.up_proj.weight: F32 [24, 40]" in message


def test_fused_experts_the_other_way_round_are_misshapen(tmp_path: Path) -> None:
    data = config_json("qwen3_moe", num_hidden_layers=1, mlp_only_layers=[])
    state = fused_experts(tiny.state_dict(ModelConfig.from_hf(data)))
    key = "model.layers.0.mlp.experts.gate_up_proj"
    state[key] = np.ascontiguousarray(state[key].swapaxes(1, 2))
    folder = write_folder(tmp_path, data, state)
    line = f"misshapen: {key}: is [5, 40, 48], expected [5, 48, 40]"
    assert error_of(folder) == misfit(folder, "1 misshapen", line, remedy=OTHER_MODEL)


# Quantised checkpoints that aren't loaded


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 8}, "gptq': GPTQ"),
        ({"quant_method": "awq", "bits": 4, "group_size": 8}, "awq': AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt': modelopt NVFP4"),
    ],
)
def test_quantised_checkpoints_are_refused_by_the_name_in_their_config(tmp_path: Path, method: Any, told: str) -> None:
    folder, _ = tiny_folder(tmp_path, quantization_config=method)
    assert error_of(folder) == (
        f"quantization_config = '{told} checkpoints can't be loaded. Use the unquantised checkpoint, or Qwen's FP8 one."
    )


def packed(kind: str) -> State:
    """layers.0.o_proj, [40, 192], with eight 4-bit weights in an integer along the axis that the kind packs."""
    state = tiny.state_dict(tiny.config())
    name = "model.layers.0.self_attn.o_proj"
    del state[f"{name}.weight"]
    parts: dict[str, Any] = {
        "GPTQ": {"qweight": np.zeros((24, 40), np.int32), "scales": np.ones((24, 40), np.float16)},
        "AWQ": {"qweight": np.zeros((192, 5), np.int32), "scales": np.ones((24, 40), np.float16)},
        "GPTQ or AWQ": {"qweight": np.zeros((7, 7), np.int32)},
        "modelopt NVFP4": {"weight": np.zeros((40, 96), np.uint8), "weight_scale_2": np.ones((), np.float32)},
        "compressed-tensors": {"weight_packed": np.zeros((40, 24), np.int32)},
        "modelopt or compressed-tensors": {"weight": np.zeros((40, 192), jnp.float8_e4m3fn),
                                           "weight_scale": np.ones((), np.float32)},
        "bitsandbytes": {"weight": np.zeros((3840, 1), np.uint8), "weight.absmax": np.ones(60, np.float32)},
    }[kind]  # fmt: skip
    return {**state, **{f"{name}.{part}": value for part, value in parts.items()}}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("GPTQ", "qweight, I32 [24, 40]"),
        ("AWQ", "qweight, I32 [192, 5]"),
        ("GPTQ or AWQ", "qweight, I32 [7, 7]"),
        ("modelopt NVFP4", "weight_scale_2, F32 []"),
        ("compressed-tensors", "weight_packed, I32 [40, 24]"),
        ("modelopt or compressed-tensors", "weight_scale, F32 []"),
        ("bitsandbytes", "weight.absmax, F32 [60]"),
    ],
)
def test_packed_tensors_are_refused_by_name_without_a_word_in_the_config(tmp_path: Path, kind: str, told: str) -> None:
    # bug reports I3
    folder = write_folder(tmp_path, config_json("qwen3"), packed(kind))
    assert error_of(folder) == (
        f"{folder}: holds {kind} weights, which can't be loaded (model.layers.0.self_attn.o_proj.{told}). "
        "Use the unquantised checkpoint, or Qwen's FP8 one."
    )


def test_an_order_of_groups_means_gptq_whatever_the_shape(tmp_path: Path) -> None:
    state = packed("GPTQ or AWQ") | {"model.layers.0.self_attn.o_proj.g_idx": np.zeros(192, np.int32)}
    folder = write_folder(tmp_path, config_json("qwen3"), state)
    assert error_of(folder) == (
        f"{folder}: holds GPTQ weights, which can't be loaded (model.layers.0.self_attn.o_proj.qweight, I32 [7, 7] "
        "and 1 more). Use the unquantised checkpoint, or Qwen's FP8 one."
    )
