"""Files that can't be trusted: each fault is one error that names the file, before a tensor is read."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import config_json, header_of, tiny_folder, write_file, write_index
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import qwenjax
from qwenjax.checkpoint.shards import BITS, describe_stored, find_tensors, read_header
from qwenjax.errors import InputError

AGAIN = "Download the file again."
STATE = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(5, np.float16),
    "c": np.zeros((0, 2), np.int32),
}


def error_of(folder: Path) -> str:
    with pytest.raises(InputError) as caught:
        qwenjax.load(folder)
    return str(caught.value)


# One file


def header_error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read_header(path)
    assert caught.value.field == str(path)
    return str(caught.value).removeprefix(f"{path}: ")


def test_a_header_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, STATE, pad=3)
    tensors = read_header(path)
    start = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert {key: tensor[1:] for key, tensor in tensors.items()} == {
        "a": ("F32", (2, 3), start),
        "b": ("F16", (5,), start + 24),
        "c": ("I32", (0, 2), start + 34),
    }


@pytest.mark.parametrize("size", [0, 7, 8, 20, 150])
def test_a_file_cut_short_inside_its_header(tmp_path: Path, size: int) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, STATE)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.write_bytes(whole[:size])
    assert header_error(path) == (
        f"has {size} bytes, too few for a safetensors file. {AGAIN}"
        if size < 8
        else f"says that its header has {length} bytes, but the file has {size}: "
        f"it is cut short or isn't safetensors. {AGAIN}"
    )


def test_a_file_cut_short_inside_its_tensors_or_too_long(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, STATE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert header_error(path) == f"is cut short: its tensors need 34 bytes, 33 are there. {AGAIN}"
    path.write_bytes(whole + b"12")
    assert header_error(path) == f"has 2 bytes at its end that belong to no tensor. {AGAIN}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
         "is a Git LFS pointer, not the file itself. Fetch it with `git lfs pull`."),
        (b"PK\x03\x04" + b"\x14\x00\x08\x08" * 20,
         "is a PyTorch archive, not safetensors. Convert it with save_pretrained of transformers."),
        (b"GGUF\x03\x00\x00\x00" * 9, "is a GGUF file, not safetensors. Use the checkpoint that it was made from."),
        (b"<!DOCTYPE html><html>", f"is a web page, not safetensors. {AGAIN}"),
        (b"\x80\x02}q\x00" * 9, "says that its header has 9007735434379917952 bytes, but the file has 45: "
         f"it is cut short or isn't safetensors. {AGAIN}"),
    ],
)  # fmt: skip
def test_files_that_are_something_else(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    length = int.from_bytes(content[:8], "little")
    assert header_error(path) == told.replace("9007735434379917952", str(length))


def test_a_header_may_have_as_many_bytes_as_other_files_have_letters(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    length = len(json.dumps(header_of(STATE)))
    pad = -(length - ord("<")) % 256  # the file then begins with "<"
    write_file(path, STATE, pad=pad)
    assert path.read_bytes()[:1] == b"<"
    assert set(read_header(path)) == set(STATE)


def test_a_header_longer_than_safetensors_allows(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)  # a hole on the disk: no bytes are written
    assert header_error(path) == (
        "says that its header has 100000001 bytes, but safetensors allows 100000000: "
        f"it is cut short or isn't safetensors. {AGAIN}"
    )


@pytest.mark.parametrize(
    ("header", "told"),
    [
        (b"{\"a\": ", "has a header that isn't JSON: it isn't safetensors"),
        (b"\xff\xfe{}", "has a header that isn't JSON: it isn't safetensors"),
        (b"[" * 100_000, "has a header that isn't JSON: it isn't safetensors"),
        (b"[1, 2]", "has a header that is a JSON list, not an object"),
        (b'{"a": 1, "a": 2}', "names a twice in its header"),
    ],
)  # fmt: skip
def test_headers_that_are_no_json_object(tmp_path: Path, header: bytes, told: str) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {}, header)
    assert header_error(path) == f"{told}. {AGAIN}"


def entry(**changes: Any) -> dict[str, Any]:
    return {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | changes}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ({"a": 1}, "has no dtype, shape and two data_offsets for a in its header"),
        (entry(dtype=None), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(shape=[2, -3]), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(shape=[1] * 65), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(shape=[2.0, 3]), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(shape=[True, 6]), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(data_offsets=[0]), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(data_offsets=[-24, 0]), "has no dtype, shape and two data_offsets for a in its header"),
        (entry(data_offsets=[24, 0]), "gives a, F32 [2, 3], -24 bytes in its header where 24 are needed"),
        (entry(data_offsets=[0, 23]), "gives a, F32 [2, 3], 23 bytes in its header where 24 are needed"),
        (entry(dtype="BF16"), "gives a, BF16 [2, 3], 24 bytes in its header where 12 are needed"),
        (entry(shape=[2**99]), f"gives a, F32 [{2**99}], 24 bytes in its header where {2**101} are needed"),
        (entry(data_offsets=[8, 32]), "has a hole of 8 bytes before a"),
        ({**entry(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]}}, "has overlapping tensors: a and b"),
        ({**entry(), "b": {"dtype": "U8", "shape": [4], "data_offsets": [25, 29]}}, "has a hole of 1 bytes before b"),
        ({**entry(), "b": {"dtype": "U8", "shape": [9], "data_offsets": [24, 33]}},
         "is cut short: its tensors need 33 bytes, 24 are there"),
    ],
)  # fmt: skip
def test_headers_that_lie(tmp_path: Path, header: Any, told: str) -> None:
    path = tmp_path / "a.safetensors"
    write_file(path, {"a": STATE["a"]}, header)
    assert header_error(path) == f"{told}. {AGAIN}"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_file_gives_anything_but_an_input_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "a.safetensors"
    write_file(path, STATE)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        tensors = read_header(path)
    except InputError:
        return
    size = path.stat().st_size  # the damage was in names or values: what is read lies inside the file
    assert all(8 < tensor.offset <= size for tensor in tensors.values())
    assert (
        sum(prod(tensor.shape) * BITS[tensor.dtype] // 8 for tensor in tensors.values() if tensor.dtype in BITS) < size
    )
    if all(tensor.dtype in BITS for tensor in tensors.values()):
        assert library_reads(path) == {key: (tensor.dtype, tensor.shape) for key, tensor in tensors.items()}


def library_reads(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What the safetensors library finds in a file."""
    with safe_open(path, framework="np") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (it is no mapping)
        return {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in slices.items()}


@pytest.mark.parametrize("dtype", BITS)
def test_every_dtype_that_the_library_reads_has_its_size(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "a.safetensors"
    data = np.zeros(6 * BITS[dtype] // 8, np.uint8)
    header = {"a": {"dtype": dtype, "shape": [3, 2], "data_offsets": [0, data.nbytes]}}
    write_file(path, {"a": data}, header)
    assert library_reads(path) == {key: (t.dtype, t.shape) for key, t in read_header(path).items()}


# The folder and its index


def test_an_index_that_names_missing_files(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path, shards=4)
    index = write_index(folder)
    for i in (2, 4):
        (folder / f"model-{i:05}-of-00004.safetensors").unlink()
    names = "model-00002-of-00004.safetensors, model-00004-of-00004.safetensors"
    assert error_of(folder) == f"{index}: names files that aren't there: {names}. Download them."


def test_an_index_that_disagrees_with_its_files(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path, shards=2)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index = write_index(folder, **{"model.norm.weight": two, "ghost": one, "lm_head.weight": None})
    where = [path.name for path in sorted(folder.glob("*.safetensors")) if b"model.norm.weight" in path.read_bytes()]
    head = [path.name for path in sorted(folder.glob("*.safetensors")) if b"lm_head" in path.read_bytes()]
    assert (where, head) == ([one], [two])
    assert error_of(folder) == (
        f"{index}: disagrees with the files: ghost: not in {one}; lm_head.weight: in {two}, not in the index; "
        f"model.norm.weight: in {one}, not in {two}. Download the index and the files again."
    )


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path, shards=3)
    path = folder / "model-00003-of-00003.safetensors"
    part = {key: state[key] for key in list(state)[2::3]}
    write_file(path, {**part, "model.embed_tokens.weight": state["model.embed_tokens.weight"]})
    told = f"model.embed_tokens.weight in model-00001-of-00003.safetensors and {path.name}"
    expected = f"{folder}: tensors are stored twice: {told}. Remove the stale file."
    assert error_of(folder) == expected
    write_index(folder)
    assert error_of(folder) == expected


def test_long_lists_of_faults_end(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        write_file(tmp_path / f"{name}.safetensors", {f"k{i:03}": np.ones(1, np.float32) for i in range(103)})
    with pytest.raises(InputError) as caught:
        find_tensors(tmp_path)
    assert caught.value.problem.startswith("tensors are stored twice: k000 in model-00001-of-00002.safetensors and ")
    assert caught.value.problem.count(";") == 100
    assert caught.value.problem.endswith("; and 3 more")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", ": isn't valid JSON (Expecting property name enclosed in double quotes, line 1 column 2)"),
        ("[]", ": holds a JSON list, not an object"),
        ("{}", ": has no weight_map, an object of tensors and their files"),
        ('{"weight_map": {}}', ": has no weight_map, an object of tensors and their files"),
        ('{"weight_map": {"a": 3}}', ": names 3 for a, which is no safetensors file of the folder"),
        ('{"weight_map": {"a": "../x.safetensors"}}',
         ": names '../x.safetensors' for a, which is no safetensors file of the folder"),
        ('{"weight_map": {"a": "x.bin"}}', ": names 'x.bin' for a, which is no safetensors file of the folder"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', ": a: is given twice"),
    ],
)  # fmt: skip
def test_an_index_that_is_none(tmp_path: Path, text: str, told: str) -> None:
    folder, _ = tiny_folder(tmp_path, shards=2)
    index = folder / "model.safetensors.index.json"
    index.write_text(text)
    assert error_of(folder) == f"{index}{told}. Download the index again."


def test_shards_that_are_missing_without_an_index(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    expected = f"{folder}: shards are missing: model-00002-of-00003.safetensors. Download them."
    assert error_of(folder) == expected


def test_numbers_in_a_file_name_are_not_believed_beyond_reason(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-99999999999999.safetensors")
    qwenjax.load(folder)


def test_two_sets_of_files_in_one_folder(tmp_path: Path) -> None:
    folder, state = tiny_folder(tmp_path, shards=2)
    write_file(folder / "model.safetensors", state)
    expected = f"{folder}: has both model.safetensors and model-00001-of-00002.safetensors, and no index. Keep one."
    assert error_of(folder) == expected
    write_index(folder)
    expected = "lies beside model.safetensors.index.json, which doesn't name it. Remove one."
    assert error_of(folder) == f"{folder / 'model.safetensors'}: {expected}"


def test_files_beside_an_index_are_left_alone(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path, shards=2)
    write_index(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"not read")
    qwenjax.load(folder)


def test_every_damaged_file_is_told(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path, shards=3)
    paths = sorted(folder.glob("*.safetensors"))
    paths[0].write_bytes(b"123")
    size = paths[2].stat().st_size
    paths[2].write_bytes(paths[2].read_bytes()[:-10])
    data = size - 8 - int.from_bytes(paths[2].read_bytes()[:8], "little")
    assert error_of(folder) == (
        f"{folder}: 2 files can't be used: {paths[0]} has 3 bytes, too few for a safetensors file; "
        f"{paths[2]} is cut short: its tensors need {data} bytes, {data - 10} are there. {AGAIN}"
    )


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json("qwen3")))
    assert error_of(tmp_path) == (f"{tmp_path}: the folder has no .safetensors file. Download the weights too.")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "model.gguf").write_bytes(b"")
    assert error_of(tmp_path) == (
        f"{tmp_path}: the folder has no .safetensors file (there: model.gguf, pytorch_model.bin, which aren't read). "
        "Convert them with save_pretrained of transformers."
    )


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path)
    (folder / "config.json").unlink()
    assert error_of(folder) == (f"{folder}: the folder has no config.json. Name a Hugging Face checkpoint folder.")


def test_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    folder, _ = tiny_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone")
    told = "{}: can't be read ({}). Check the file and its permissions."
    assert error_of(folder) == told.format(folder / "model.safetensors", "No such file or directory")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert error_of(folder) == told.format(folder / "model.safetensors", "Is a directory")


def test_what_is_stored_is_described_file_by_file(tmp_path: Path) -> None:
    assert describe_stored(tmp_path) == []
    folder, state = tiny_folder(tmp_path, shards=3)
    path = folder / "model-00002-of-00003.safetensors"
    part = {key: state[key] for key in list(state)[1::3]}
    key = next(iter(part))
    write_file(path, {**part, key: part[key].astype(np.float16)})
    write_index(folder)
    rows = describe_stored(folder)
    sizes = [sum(value.nbytes for value in list(state.values())[i::3]) for i in range(3)]
    sizes[1] -= part[key].nbytes // 2
    assert rows == [
        {
            "file": f"model-0000{i + 1}-of-00003.safetensors",
            "tensors": len(list(state)[i::3]),
            "bytes": sizes[i],
            "dtypes": {"F16": 1, "F32": len(part) - 1} if i == 1 else {"F32": len(list(state)[i::3])},
        }
        for i in range(3)
    ]
    path.write_bytes(b"")
    with pytest.raises(InputError, match="has 0 bytes, too few for a safetensors file"):
        describe_stored(folder)


def test_headers_are_read_and_judged_without_jax() -> None:
    modules = ("checkpoint.shards", "checkpoint.layout", "checkpoint.plan", "checkpoint.hub", "hf_writer")
    program = f"import sys, {', '.join(f'qwenjax.{name}' for name in modules)}\nprint(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "'qwenjax.checkpoint.plan'" in done.stdout
    assert not [name for name in ("'jax'", "'numpy'", "'huggingface_hub'") if name in done.stdout]
