"""Reported faults of loaders and calculators around checkpoints, each on its own small folder."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import hf_bridge
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoint_files import BFLOAT16, State, assert_same, leaves, write_file, write_folder, write_index
from cli_run import figures, run, text_of
from config_base import BASES, DROP, QWEN2, QWEN3, QWEN3_MOE, Json, changed

import qwenjax
from qwenjax.checkpoint.layout import HEAD_KEY
from qwenjax.checkpoint.shards import find_tensors
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from roofline.count import count_params

HEADLESS = "lm_head: isn't among the parameters, and logits need it."
TOKENS = tiny.tokens("reports", 2, 9, vocab=256)


def state_of(data: Json) -> State:
    return dict(tiny.state_dict(ModelConfig.from_hf(data)))


def folder_of(folder: Path, data: Json, *without: str, bare: bool = False) -> Path:
    """A checkpoint of this config; without these keys, or without the prefix of all keys."""
    state = {key: value for key, value in state_of(data).items() if key not in without}
    prefix = "model." if bare else ""
    return write_folder(folder, data, {key.removeprefix(prefix): value for key, value in state.items()})


def message_of(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        call(*args, **options)
    return str(caught.value)


# A5: an embedding model says that it isn't tied, and no shard holds a head


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("model_type", BASES)
def test_an_embedding_model_has_hidden_states_and_no_logits(tmp_path: Path, model_type: str, bare: bool) -> None:
    data = BASES[model_type]
    whole = qwenjax.load(folder_of(tmp_path / "whole", data), dtype="float32")
    config, params = qwenjax.load(folder_of(tmp_path / "bare", data, HEAD_KEY, bare=bare), "float32", lm_head=False)
    assert config == whole[0]
    assert_same(params, {leaf: value for leaf, value in whole[1].items() if leaf != "lm_head"})
    hidden_BTD = qwenjax.hidden_states(config, params, TOKENS)
    logits_BTV = qwenjax.forward(*whole, TOKENS)
    np.testing.assert_allclose(hidden_BTD @ whole[1]["lm_head"].T, logits_BTV, rtol=0, atol=2e-5)
    for call in (
        lambda: qwenjax.forward(config, params, TOKENS),
        lambda: qwenjax.generate(config, params, [[1, 2]], max_new_tokens=2),
        lambda: qwenjax.Decoder(config, params),
    ):
        assert message_of(call).startswith(HEADLESS)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", [True, False])
def test_loading_without_a_head_takes_any_checkpoint(tmp_path: Path, tied: bool, stored: bool) -> None:
    data = changed(QWEN3, tie_word_embeddings=tied)
    state = state_of(changed(QWEN3, tie_word_embeddings=True))
    head = {HEAD_KEY: state["model.embed_tokens.weight"]} if stored else {}
    config, params = qwenjax.load(write_folder(tmp_path, data, state | head), lm_head=False)
    assert "lm_head" not in params
    assert config.tie_word_embeddings is tied
    if tied:
        assert qwenjax.forward(config, params, TOKENS).shape == (2, 9, 256)


def test_without_a_head_everything_else_is_asked_for(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN3, HEAD_KEY, "model.norm.weight")
    text = message_of(qwenjax.load, folder, lm_head=False)
    assert "(1 missing):\n  missing: model.norm.weight: expected [64]. " in text


def test_generating_with_an_embedding_model_names_the_way_out(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the `text` extra")
    import tiny_text

    folder = tiny_text.write_text_files(folder_of(tmp_path, QWEN3, HEAD_KEY))
    result = run("qwenjax generate", str(folder), "--prompt", "a")
    assert (result.status, result.stdout) == (2, "")
    assert "missing: lm_head.weight: expected [256, 64]" in result.stderr
    assert result.stderr.endswith("load(..., lm_head=False) gives what hidden_states needs.\n")


@pytest.mark.parametrize("base", [QWEN2, QWEN3])
def test_params_counts_the_head_that_the_files_hold(tmp_path: Path, base: Json) -> None:
    for without, told in (((), False), ((HEAD_KEY,), True)):
        folder = folder_of(tmp_path / f"{len(without)}", base, *without)
        stored = sum(prod(tensor.shape) for tensor in find_tensors(folder).values())
        assert figures("roofline params", str(folder))["stored"]["stored"] == stored
        line = f"The files hold {stored:,} elements; no lm_head stored although untied: -16,384."
        assert (line in text_of("roofline params", str(folder))) == told


def test_inspect_tells_the_bytes_that_are_stored(tmp_path: Path) -> None:
    state = {key: value.astype(BFLOAT16) for key, value in state_of(QWEN3).items() if key != HEAD_KEY}
    folder = str(write_folder(tmp_path, QWEN3, state, shards=3))
    record = figures("qwenjax inspect", folder)
    stored, head = record["stored"], 256 * 64
    assert stored["num_bytes"] == 2 * stored["num_weights"] == sum(value.nbytes for value in state.values())
    assert record["num_params"] - stored["num_weights"] == head
    assert (stored["num_tensors"], stored["lm_head_stored"]) == (len(state), False)
    warnings = [note["text"] for note in record["notes"] if note["kind"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("the tensors don't fit config.json (1 missing). ")
    lines = [line.split("  ") for line in text_of("qwenjax inspect", folder).splitlines()]
    told = {cells[0]: cells[-1].strip() for cells in lines}
    assert told["weights beyond the architecture's"] == f"-{head:,}"
    assert told["bytes"] == f"{stored['num_bytes']:,}"
    assert [row["file"] for row in stored["files"]] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sum(row["bytes"] for row in stored["files"]) == stored["num_bytes"]
    assert told[stored["files"][0]["file"]] == f"{stored['files'][0]['tensors']} BF16"


# A1, A3: a tied model with and without a copy of its head counts once


@pytest.mark.parametrize("model_type", BASES)
def test_a_copy_of_a_tied_head_is_told_and_counts_once(tmp_path: Path, model_type: str) -> None:
    data = changed(BASES[model_type], tie_word_embeddings=True)
    state = state_of(data)
    head = {HEAD_KEY: state["model.embed_tokens.weight"]}
    without = figures("qwenjax inspect", str(write_folder(tmp_path / "a", data, state)))
    copied = figures("qwenjax inspect", str(write_folder(tmp_path / "b", data, state | head)))
    assert without["num_params"] == copied["num_params"] == without["stored"]["num_weights"]
    assert copied["stored"]["num_weights"] - copied["num_params"] == 256 * 64
    assert (without["stored"]["lm_head_stored"], copied["stored"]["lm_head_stored"]) == (False, True)
    assert [note for note in copied["notes"] if note["kind"] == "warning"] == []


# J1, K1: keys with and without the prefix, files with and without an index


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("files", ["one", "one, indexed", "shards", "shards, indexed"])
@pytest.mark.parametrize("base", [QWEN3, QWEN3_MOE], ids=["T3", "M3"])
def test_one_checkpoint_in_every_layout(tmp_path: Path, base: Json, files: str, bare: bool) -> None:
    state = state_of(base)
    stored = {key.removeprefix("model.") if bare else key: value for key, value in state.items()}
    folder = write_folder(tmp_path, base, stored, shards=3 if "shards" in files else 0)
    if "indexed" in files:
        write_index(folder, **({} if "shards" in files else dict.fromkeys(stored, "model.safetensors")))
    assert find_tensors(folder).keys() == stored.keys()
    config, params = qwenjax.load(folder, "float32")
    assert_same(params, tiny.params(config))
    assert figures("qwenjax inspect", str(folder))["stored"]["num_weights"] == count_params(config).num_params


@pytest.mark.parametrize("bare", [False, True])
def test_fused_experts_without_the_prefix(tmp_path: Path, bare: bool) -> None:
    state = hf_bridge.fused_experts(state_of(QWEN3_MOE))
    folder = write_folder(tmp_path, QWEN3_MOE, {k.removeprefix("model.") if bare else k: v for k, v in state.items()})
    config, params = qwenjax.load(folder, "float32")
    assert_same(params, tiny.params(config))


# N2: config and weights of two models


@pytest.mark.parametrize("weights", ["qwen3", "qwen2_moe", "qwen3_moe"])
def test_weights_of_another_architecture(tmp_path: Path, weights: str) -> None:
    folder = write_folder(tmp_path, QWEN2, state_of(BASES[weights]))
    text = message_of(qwenjax.load, folder)
    assert text.startswith(f"{folder}: the tensors don't fit config.json (")
    assert " misshapen" in text or " missing" in text
    record = figures("qwenjax inspect", str(folder))
    told = [note["text"] for note in record["notes"] if note["field"] == str(folder)]
    assert len(told) == 1
    assert told[0].startswith("the tensors don't fit config.json (")
    assert "\n" not in told[0]


def test_a_folder_whose_files_can_not_be_read_is_still_inspected(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN2)
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    record = figures("qwenjax inspect", str(folder))
    assert record["stored"] is None
    assert any("is a Git LFS pointer" in note["text"] for note in record["notes"])
    assert "Files" not in text_of("qwenjax inspect", str(folder)).splitlines()


# A7, 19, H1: nothing is taken for the head or for a bias


@pytest.mark.parametrize("flag", [False, DROP])
@pytest.mark.parametrize("model_type", BASES)
def test_an_untied_head_is_its_own_matrix(tmp_path: Path, model_type: str, flag: Any) -> None:
    data = changed(BASES[model_type], tie_word_embeddings=flag)
    config, params = qwenjax.load(folder_of(tmp_path, data), "float32")
    state = state_of(data)
    np.testing.assert_array_equal(params["lm_head"], state[HEAD_KEY])
    assert not np.array_equal(params["lm_head"], params["embed_tokens"])
    told = {(note.kind, note.field) for note in config.notes}
    assert (("warning", "tie_word_embeddings") in told) == (flag is DROP)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen2_moe"])
def test_a_bias_that_no_key_states_is_loaded_and_never_optional(
    tmp_path: Path, model_type: str, projection: str
) -> None:
    data, key = BASES[model_type], f"model.layers.1.self_attn.{projection}.bias"
    assert not {"attention_bias", "qkv_bias"} & data.keys()
    text = message_of(qwenjax.load, folder_of(tmp_path / "without", data, key))
    assert f"(1 missing):\n  missing: {key}: expected [" in text
    _, params = qwenjax.load(folder_of(tmp_path / "with", data), "float32")
    biases = leaves(params)[".layers.1.qkv_bias"]
    assert float(jnp.abs(biases).min()) > 0


# 29: the ids that end a text are those of two files


@pytest.mark.parametrize(
    ("generation", "own", "expected"),
    [
        ([7, 5], 5, (7, 5)), (7, [5, 9], (7, 5, 9)), (7, DROP, (7,)), (None, 5, (5,)), ([], None, ()), (DROP, 5, (5,)),
        (0, 5, (0, 5)),
    ],
)  # fmt: skip
def test_a_loaded_config_ends_where_either_file_says(tmp_path: Path, generation: Any, own: Any, expected: Any) -> None:
    folder = folder_of(tmp_path / "a", changed(QWEN3, eos_token_id=own))
    (folder / "generation_config.json").write_text(json.dumps(changed({"top_k": 1}, eos_token_id=generation)))
    config, params = qwenjax.load(folder, "float32")
    assert config.eos_token_id == ModelConfig.from_hf(folder / "config.json").eos_token_id == expected
    assert figures("qwenjax inspect", str(folder))["config"]["eos_token_id"] == list(expected)
    if generation == [7, 5]:
        prompts = [[1, 2, 3], [4, 5]]
        free = qwenjax.generate(config, params, prompts, max_new_tokens=6, eos=[])
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [free[0][1], free[1][3]]}))
        ended = qwenjax.generate(ModelConfig.from_hf(folder), params, prompts, max_new_tokens=6)
        ends = {free[0][1], free[1][3], 5}
        wanted = [row[: next((i for i, token in enumerate(row) if token in ends), 5) + 1] for row in free]
        assert ended == wanted
        assert sum(map(len, wanted)) < 12
        qwenjax.save(ModelConfig.from_hf(folder), params, tmp_path / "again")
        assert ModelConfig.from_hf(tmp_path / "again").eos_token_id == ModelConfig.from_hf(folder).eos_token_id


def test_a_generation_config_that_says_nonsense_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN3)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": "<|im_end|>"}))
    assert message_of(ModelConfig.from_hf, folder) == (
        f"{file}: eos_token_id = '<|im_end|>': must be an id or a list of ids. Write [] or null for none."
    )


# L1, L3: nothing is guessed


def test_a_folder_without_depth_is_refused_by_every_command(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, QWEN2)
    (folder / "config.json").write_text(json.dumps(changed(QWEN2, num_hidden_layers=DROP)))
    for command in ("qwenjax inspect", "roofline params", "roofline memory --hardware rtx-4090"):
        result = run(command, str(folder))
        assert (result.status, result.stdout) == (2, "")
        assert result.stderr.startswith("num_hidden_layers: is missing. ")
    write_file(folder / "model.safetensors", state_of(QWEN2))
    assert message_of(qwenjax.load, folder).startswith("num_hidden_layers: is missing. ")
