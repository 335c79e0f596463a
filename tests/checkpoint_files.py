"""Checkpoint folders of tiny models as the tests need them: whole, split, renamed, or damaged on purpose."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tiny

from qwenjax.config import ModelConfig

Array = np.ndarray[Any, np.dtype[Any]]
State = dict[str, Array]
NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float64": "F64", "int32": "I32", "int64": "I64", "uint8": "U8",
}  # fmt: skip
FLOAT8 = np.dtype(jnp.float8_e4m3fn)
BFLOAT16 = np.dtype(jnp.bfloat16)


def header_of(state: Mapping[str, Array]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, value in state.items():
        end = position + value.nbytes
        header[key] = {
            "dtype": NAMES[value.dtype.name],
            "shape": list(value.shape),
            "data_offsets": [position, end],
        }
        position = end
    return header


def write_file(path: Path, state: Mapping[str, Array], header: Any = None, pad: int = 0) -> None:
    """A safetensors file by the published format; `header` in place of the true one, `pad` blanks after it."""
    text = (header if isinstance(header, bytes) else json.dumps(header or header_of(state)).encode()) + b" " * pad
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in state.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_folder(folder: Path, data: Mapping[str, Any], state: Mapping[str, Array], shards: int = 0) -> Path:
    """config.json and model.safetensors, or that many shards without an index; keys are dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(data))
    if not shards:
        write_file(folder / "model.safetensors", state)
    for i in range(shards):
        part = {key: state[key] for key in list(state)[i::shards]}
        write_file(folder / f"model-{i + 1:05}-of-{shards:05}.safetensors", part)
    return folder


def write_index(folder: Path, **changes: str | None) -> Path:
    """An index of the shards that are there; `changes` move a key to another file, or drop it."""
    weight_map: dict[str, Any] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        weight_map |= {key: path.name for key in header if key != "__metadata__"}
    weight_map |= changes
    kept = {key: name for key, name in weight_map.items() if name is not None}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": kept}))
    return index


def tiny_folder(folder: Path, model_type: str = "qwen3", shards: int = 0, **changes: Any) -> tuple[Path, State]:
    data = config_json(model_type, **changes)
    state = dict(tiny.state_dict(ModelConfig.from_hf(data)))
    return write_folder(folder, data, state, shards), state


def config_json(model_type: str, **changes: Any) -> dict[str, Any]:
    if not model_type.endswith("_moe"):
        return tiny.config_json(model_type, **changes)
    sparse = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    shared = {"shared_expert_intermediate_size": 36} if model_type == "qwen2_moe" else {}
    return tiny.config_json(model_type, **(sparse | shared | changes))


def leaves(tree: Any, above: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {above: tree}
    return {name: leaf for key, value in tree.items() for name, leaf in leaves(value, f"{above}.{key}").items()}


def assert_same(params: Any, expected: Any) -> None:
    """Equal trees: names, shapes, dtypes and every bit of value."""
    found, wanted = leaves(params), leaves(expected)
    assert sorted(found) == sorted(wanted)
    for name, leaf in found.items():
        assert leaf.dtype == wanted[name].dtype, name
        assert leaf.shape == wanted[name].shape, name
        assert np.asarray(leaf).tobytes() == np.asarray(wanted[name]).tobytes(), name
