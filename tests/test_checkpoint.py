"""Loading and saving whole checkpoints: every form of files gives the same parameter tree."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoint_files import (
    BFLOAT16,
    assert_same,
    config_json,
    leaves,
    tiny_folder,
    write_file,
    write_folder,
    write_index,
)
from hf_bridge import fused_experts
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import qwenjax
from qwenjax.checkpoint import reading
from qwenjax.checkpoint.saving import save_leaves
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError

MODEL_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")


def expected(config: ModelConfig, dtype: str = "float32") -> Any:
    return tiny.params(config, dtype)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_architecture_loads_to_its_parameter_tree(tmp_path: Path, model_type: str, tied: bool) -> None:
    # bug reports B1, 25, K1
    folder, _ = tiny_folder(tmp_path, model_type, tie_word_embeddings=tied)
    config, params = qwenjax.load(folder)
    assert config == ModelConfig.from_hf(folder)
    assert_same(params, expected(config))
    shapes = qwenjax.param_shapes(config, "float32")
    assert {k: v.shape for k, v in leaves(params).items()} == {k: v.shape for k, v in leaves(shapes).items()}


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("shards", [2, 7])
def test_shards_with_and_without_an_index(tmp_path: Path, shards: int, index: bool) -> None:
    folder, _ = tiny_folder(tmp_path, "qwen3_moe", shards)  # the experts of a layer lie in several shards
    if index:
        write_index(folder)
    config, params = qwenjax.load(str(folder))
    assert_same(params, expected(config))


def test_an_index_that_names_the_single_file(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path)
    weight_map = dict.fromkeys(state, "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config, params = qwenjax.load(folder)
    assert_same(params, expected(config))


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2_moe"])
def test_keys_without_the_prefix_of_the_causal_model(tmp_path: Path, model_type: str) -> None:
    # bug reports J1
    data = config_json(model_type, tie_word_embeddings=True)
    state = tiny.state_dict(ModelConfig.from_hf(data))
    folder = write_folder(tmp_path, data, {key.removeprefix("model."): value for key, value in state.items()})
    config, params = qwenjax.load(folder)
    assert_same(params, expected(config))


@pytest.mark.parametrize("model_type", ["qwen2_moe", "qwen3_moe"])
def test_experts_in_one_tensor(tmp_path: Path, model_type: str) -> None:
    data = config_json(model_type)
    state = fused_experts(tiny.state_dict(ModelConfig.from_hf(data)))
    assert state["model.layers.0.mlp.experts.gate_up_proj"].shape == (5, 48, 40)
    config, params = qwenjax.load(write_folder(tmp_path, data, state))
    assert_same(params, expected(config))


def test_experts_in_one_tensor_in_some_layers_only(tmp_path: Path) -> None:
    data = config_json("qwen3_moe")
    state = tiny.state_dict(ModelConfig.from_hf(data))
    one = {key: value for key, value in fused_experts(state).items() if ".layers.2." in key}
    rest = {key: value for key, value in state.items() if ".layers.2." not in key}
    config, params = qwenjax.load(write_folder(tmp_path, data, rest | one))
    assert_same(params, expected(config))


@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_every_dtype_loads_as_every_dtype(tmp_path: Path, stored: str, wanted: str) -> None:
    data = config_json("qwen3", torch_dtype=stored)
    state = {key: value.astype(jnp.dtype(stored)) for key, value in tiny.state_dict(tiny.config()).items()}
    config, params = qwenjax.load(write_folder(tmp_path, data, state), dtype=wanted)
    assert {str(leaf.dtype) for leaf in leaves(params).values()} == {wanted}
    embedding = state["model.embed_tokens.weight"].astype(jnp.dtype(wanted))
    assert np.asarray(params["embed_tokens"]).tobytes() == embedding.tobytes()
    _, by_object = qwenjax.load(tmp_path, dtype=jnp.dtype(wanted))
    assert_same(by_object, params)
    assert config.dtype == stored


def test_the_dtype_is_the_configs_or_that_of_the_files(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path, torch_dtype="bfloat16")
    assert qwenjax.load(folder)[1]["embed_tokens"].dtype == jnp.bfloat16
    folder, state = tiny_folder(tmp_path, torch_dtype=None)
    assert qwenjax.load(folder)[1]["embed_tokens"].dtype == jnp.float32
    write_file(folder / "model.safetensors", state | {"model.norm.weight": np.ones(40, BFLOAT16)})
    with pytest.raises(InputError) as caught:
        qwenjax.load(folder)
    assert str(caught.value) == (
        "dtype: isn't in config.json, and the files hold bfloat16 and float32. Say which: load(..., dtype=...)."
    )
    assert qwenjax.load(folder, "float32")[1]["final_norm"].dtype == jnp.float32


@pytest.mark.parametrize("dtype", ["float64", "int8", "bf16", object()])
def test_other_dtypes_are_refused(tmp_path: Path, dtype: Any) -> None:
    with pytest.raises(InputError, match=r"is not a dtype that weights are loaded as\. Known: float32, bfloat16"):
        qwenjax.load(tmp_path, dtype)


def test_values_beyond_float16_are_refused_and_not_made_infinite(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path)
    state["model.layers.1.mlp.up_proj.weight"][3, 4] = 1e5
    write_file(folder / "model.safetensors", state)
    with pytest.raises(InputError) as caught:
        qwenjax.load(folder, "float16")
    assert str(caught.value) == (
        "model.layers.1.mlp.up_proj.weight: has values beyond the range of float16 (65504). "
        "Load it as bfloat16 or float32."
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_that_are_no_numbers_are_loaded_as_they_are(tmp_path: Path, dtype: str) -> None:
    folder, state = tiny_folder(tmp_path)
    odd = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    state["model.norm.weight"][:4] = odd
    write_file(folder / "model.safetensors", state)
    found = np.asarray(qwenjax.load(folder, dtype)[1]["final_norm"])[:4].astype(np.float32)
    assert np.array_equal(found, odd, equal_nan=True)
    assert np.signbit(found[3])


@pytest.mark.parametrize("pad", range(1, 8))
def test_tensors_may_lie_at_any_byte(tmp_path: Path, pad: int) -> None:
    data = config_json("qwen2", torch_dtype="bfloat16")
    state = {key: value.astype(BFLOAT16) for key, value in tiny.state_dict(ModelConfig.from_hf(data)).items()}
    folder = write_folder(tmp_path, data, state)
    write_file(folder / "model.safetensors", state, pad=pad)
    config, params = qwenjax.load(folder)
    assert_same(params, expected(config, "bfloat16"))


@pytest.mark.parametrize("piece", [1, 50, 1000])
def test_the_size_of_the_pieces_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(reading, "PIECE", piece)
    data = config_json("qwen2_moe", tie_word_embeddings=True)
    state = tiny.state_dict(ModelConfig.from_hf(data))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    config, params = qwenjax.load(write_folder(tmp_path, data, fused_experts(state)))
    assert_same(params, expected(config))


def test_progress_is_told_once_for_each_array_and_ends_at_one(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path)
    told: list[tuple[str, float]] = []
    _, params = qwenjax.load(folder, progress=lambda what, share: told.append((what, share)))
    shares = [share for _, share in told]
    assert len(told) == len(leaves(params))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert [what for what, _ in told][-3:] == ["embed_tokens", "final_norm", "lm_head"]
    assert told[0][0] == "layer 0 input_norm"


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_order_files_and_dtypes_change_nothing(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    model_type = data.draw(st.sampled_from(MODEL_TYPES))
    json_data = config_json(model_type)
    config = ModelConfig.from_hf(json_data)
    # Values that every dtype holds exactly, so that the dtype of a file can't show.
    state = {key: np.round(value * 4) for key, value in tiny.state_dict(config).items()}
    if data.draw(st.booleans()):
        state = fused_experts(state)
    keys = data.draw(st.permutations(list(state)))
    dtypes = data.draw(
        st.lists(st.sampled_from([np.float32, np.float16, BFLOAT16]), min_size=len(keys), max_size=len(keys))
    )
    mixed = {key: state[key].astype(dtype) for key, dtype in zip(keys, dtypes, strict=True)}
    folder = tmp_path_factory.mktemp("mixed")
    write_folder(folder, json_data, mixed, data.draw(st.integers(0, 5)))
    _, params = qwenjax.load(folder)
    plain = write_folder(tmp_path_factory.mktemp("plain"), json_data, state)
    assert_same(params, qwenjax.load(plain)[1])
    assert float(np.abs(np.asarray(params["embed_tokens"])).max()) == 4


@pytest.mark.parametrize("shape", [(1,), (7, 5), (33, 3, 129)])
def test_arrays_lie_so_that_jax_takes_them_over_without_a_copy(shape: tuple[int, ...]) -> None:
    values = reading.aligned_empty(shape, BFLOAT16)
    values[...] = 1
    with jax.default_device(jax.devices("cpu")[0]):
        placed = jax.device_put(values)
    assert (values.shape, values.ctypes.data % 64) == (shape, 0)
    assert placed.unsafe_buffer_pointer() == values.ctypes.data


_PEAK = """
import json, resource, sys
import jax, numpy
import qwenjax
from qwenjax.checkpoint import reading
from qwenjax.checkpoint.saving import save_leaves
jax.device_put(numpy.zeros(8)).block_until_ready()
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
config, params = qwenjax.load(sys.argv[1])
print(json.dumps([before, peak(), sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
                  max(leaf.nbytes for leaf in jax.tree.leaves(params))]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory in bytes is read as Linux tells it")
def test_peak_memory_is_the_result_and_at_most_the_largest_array(tmp_path: Path) -> None:
    data = config_json("qwen3_moe", moe_intermediate_size=3000, num_experts=8, mlp_only_layers=[], hidden_size=256,
                       num_hidden_layers=4, torch_dtype="bfloat16")  # fmt: skip
    config = ModelConfig.from_hf(data)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), qwenjax.param_shapes(config))
    qwenjax.save(config, params, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path / "model")],
        capture_output=True, text=True, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, peak, result, largest = json.loads(done.stdout)
    assert result > 4 * largest > 8e7  # reading everything first, or copying it all, would show
    assert peak - before < result + largest


# Saving


@pytest.mark.parametrize("spelling", ["4.x", "5.x"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_what_is_saved_loads_bit_for_bit(tmp_path: Path, model_type: str, spelling: Any) -> None:
    config = ModelConfig.from_hf(config_json(model_type))
    params = expected(config, "bfloat16")
    qwenjax.save(config, params, tmp_path / "a" / "model", spelling=spelling)
    again, loaded = qwenjax.load(tmp_path / "a" / "model")
    assert_same(loaded, params)
    assert (again.dtype, config.dtype) == ("bfloat16", "float32")
    written = json.loads((tmp_path / "a" / "model" / "config.json").read_text())
    assert ("rope_parameters" in written, "torch_dtype" in written) == ((spelling == "5.x"), (spelling == "4.x"))
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["model"]  # nothing temporary is left
    assert sorted(path.name for path in (tmp_path / "a" / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_the_files_are_those_of_the_safetensors_library(tmp_path: Path) -> None:
    config = tiny.config()
    state = tiny.state_dict(config)
    qwenjax.save(config, tiny.params(config), tmp_path / "ours")
    read = load_file(tmp_path / "ours" / "model.safetensors")
    assert set(read) == set(state)
    assert all(np.array_equal(read[key], value) for key, value in state.items())
    header = (tmp_path / "ours" / "model.safetensors").read_bytes()
    length = int.from_bytes(header[:8], "little")
    assert length % 8 == 0
    assert json.loads(header[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    theirs = write_folder(tmp_path / "theirs", tiny.config_json(), {})
    save_file(state, theirs / "model.safetensors", {"format": "pt"})
    assert_same(qwenjax.load(theirs)[1], tiny.params(config))


def test_shards_have_a_largest_size_and_an_index(tmp_path: Path) -> None:
    config = tiny.config("qwen2")
    params = tiny.params(config)
    limit = 40_000
    qwenjax.save(config, params, tmp_path / "model", max_shard_bytes=limit)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    state = tiny.state_dict(config)
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    assert set(index["weight_map"]) == set(state)
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 3
    for name in files:
        sizes = [value.nbytes for value in load_file(tmp_path / "model" / name).values()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert_same(qwenjax.load(tmp_path / "model")[1], params)


@pytest.mark.parametrize(("spare", "files"), [(0, 1), (-1, 2)])
def test_a_file_holds_as_much_as_it_may(tmp_path: Path, spare: int, files: int) -> None:
    config = tiny.config("qwen2")
    total = sum(value.nbytes for value in tiny.state_dict(config).values())
    qwenjax.save(config, tiny.params(config), tmp_path / "model", max_shard_bytes=total + spare)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == files


def test_a_folder_with_files_is_refused_unless_told(tmp_path: Path) -> None:
    config = tiny.config()
    params = tiny.params(config)
    target = tmp_path / "model"
    target.mkdir()
    qwenjax.save(config, params, target, max_shard_bytes=40_000)  # an empty one is taken
    (target / "tokenizer.json").write_text("{}")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(InputError) as caught:
        qwenjax.save(config, params, target)
    assert (
        str(caught.value)
        == f"{target}: already holds files. Name a new folder, or overwrite it (overwrite=True, --overwrite)."
    )
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    halved = jax.tree.map(lambda leaf: leaf / 2, params)
    qwenjax.save(config, halved, target, overwrite=True)
    names = sorted(path.name for path in target.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]  # no shard of the old one is left
    assert_same(qwenjax.load(target)[1], halved)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5_000])
def test_arrays_are_asked_for_one_by_one_and_let_go(tmp_path: Path, max_shard_bytes: int) -> None:
    """Experts of one array lie in several shards and the array is made once; none outlives the next one's making."""
    config = ModelConfig.from_hf(config_json("qwen3_moe"))
    params, made, told = expected(config), [], []

    def leaf_at(layer: int | None, leaf: str) -> Any:
        assert [name for name, old in made if old() is not None] == []
        array = (params if layer is None else params["layers"][layer])[leaf] + 0
        made.append(((layer, leaf), weakref.ref(array)))
        return array

    options: dict[str, Any] = {"max_shard_bytes": max_shard_bytes, "progress": lambda *item: told.append(item)}
    save_leaves(config, leaf_at, tmp_path / "model", **options)
    assert len({name for name, _ in made}) == len(made) == len(leaves(params))
    assert [what for what, _ in told] == [leaf if i is None else f"layer {i} {leaf}" for (i, leaf), _ in made]
    shares = [share for _, share in told]
    assert (shares == sorted(shares), shares[-1]) == (True, 1)
    assert_same(qwenjax.load(tmp_path / "model")[1], params)


@pytest.mark.parametrize("cut", [KeyboardInterrupt, MemoryError])
def test_a_save_that_is_cut_off_leaves_what_was_there(tmp_path: Path, cut: type[BaseException]) -> None:
    config = tiny.config()
    params = tiny.params(config)
    qwenjax.save(config, params, tmp_path / "model")

    def leaf_at(layer: int | None, leaf: str) -> Any:
        if layer == 1:
            raise cut
        return (params if layer is None else params["layers"][layer])[leaf] * 0

    with pytest.raises(cut):
        save_leaves(config, leaf_at, tmp_path / "model", overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert_same(qwenjax.load(tmp_path / "model")[1], params)


def test_an_empty_folder_that_is_there_is_filled_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its permissions stay, a shell that stands in it stays there, and a link to it stays a link."""
    config = tiny.config()
    for name in ("real", "here"):
        (tmp_path / name).mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    qwenjax.save(config, tiny.params(config), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert_same(qwenjax.load(tmp_path / "real")[1], tiny.params(config))
    monkeypatch.chdir(tmp_path / "here")
    qwenjax.save(config, tiny.params(config), ".")
    assert sorted(os.listdir(".")) == ["config.json", "model.safetensors"]
    assert (tmp_path / "here").stat().st_mode & 0o777 == 0o700


def test_nothing_is_left_of_a_save_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("qwenjax.checkpoint.saving._write_json", full)
    config = tiny.config()
    with pytest.raises(InputError) as caught:
        qwenjax.save(config, tiny.params(config), tmp_path / "model")
    assert str(caught.value) == (
        f"{tmp_path / 'model'}: can't be written (No space left on device). Choose another folder."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_can_not_be_written(tmp_path: Path) -> None:
    config = tiny.config()
    params = tiny.params(config)
    (tmp_path / "file").write_text("")
    long = tmp_path / ("x" * 300)
    for target, problem, remedy in (
        (tmp_path / "file", "is a file, not a folder", "Name a new folder."),
        (tmp_path / "file" / "model", "can't be written (File exists)", "Choose another folder."),
        (long, "can't be written (File name too long)", "Choose another folder."),
    ):
        with pytest.raises(InputError) as caught:
            qwenjax.save(config, params, target)
        assert str(caught.value) == f"{target}: {problem}. {remedy}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_parameters_of_another_config_are_refused_with_all_that_is_wrong(tmp_path: Path) -> None:
    config = tiny.config()
    params = tiny.params(config)
    del params["layers"][1]["q_norm"]
    params["extra"] = params["final_norm"]
    params["lm_head"] = params["lm_head"][:-1]
    params["layers"][0]["o_proj"] = params["layers"][0]["o_proj"].astype(jnp.int32)
    with pytest.raises(InputError) as caught:
        qwenjax.save(config, params, tmp_path / "model")
    assert str(caught.value) == (
        "params: aren't those of this config:\n"
        "  dtypes: float32, int32, expected one of float32, bfloat16, float16 for all arrays\n"
        "  misshapen: lm_head is [100, 40], expected [101, 40]\n"
        "  missing: layers.1.q_norm [16]\n"
        "  unexpected: extra. Save them with their own config."
    )
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("qwenjax.checkpoint.saving.shutil.disk_usage", lambda path: Usage)
    config = tiny.config()
    needed = sum(value.nbytes for value in tiny.state_dict(config).values())
    with pytest.raises(InputError, match=f"needs {needed} bytes, and the disk has 1000 left"):
        qwenjax.save(config, tiny.params(config), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("argument", "value"), [("spelling", "3"), ("max_shard_bytes", 0), ("max_shard_bytes", 1.5)])
def test_arguments_of_save_are_checked(tmp_path: Path, argument: str, value: Any) -> None:
    config = tiny.config()
    with pytest.raises(InputError, match=rf"^{argument} = {value!r}: "):
        qwenjax.save(config, tiny.params(config), tmp_path / "model", **{argument: value})
    assert list(tmp_path.iterdir()) == []
