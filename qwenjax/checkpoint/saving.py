"""`save`: a config and its parameter tree as a checkpoint folder in the Hugging Face layout.

The safetensors library writes a file from tensors that are all in memory; here they come one by one and go.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from qwenjax.checkpoint.layout import Tensor, tensors_of
from qwenjax.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from qwenjax.config import ModelConfig
from qwenjax.errors import InputError
from qwenjax.hf_writer import Spelling, to_hf
from qwenjax.progress import Progress, silent
from qwenjax.weights import Params, param_shapes

Array = np.ndarray[Any, np.dtype[Any]]
STORED_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
MAX_SHARD_BYTES = 5_000_000_000
_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
LeafAt = Callable[[int | None, str], Any]  # an array of the parameter tree by its layer, None outside them, and name


def save(
    config: ModelConfig,
    params: Params,
    folder: str | os.PathLike[str],
    *,
    spelling: Spelling = "4.x",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Writes config.json and safetensors files of at most `max_shard_bytes` of tensors each (one tensor may be more).

    spelling: of config.json, as transformers 4.x or 5.x writes it. Experts are a tensor each. The folder appears when
    all is written. One that holds files is refused, unless `overwrite`: then config and weights are replaced, and
    other files, such as the tokenizer's, stay.
    """
    check_target(Path(folder), overwrite)
    dtype = _check_params(config, params)

    def leaf_at(layer: int | None, leaf: str) -> Any:
        # A JAX array keeps the host copy that is made of it: the copy's goes with the copy.
        return (params if layer is None else params["layers"][layer])[leaf].copy()

    options = {"spelling": spelling, "max_shard_bytes": max_shard_bytes, "overwrite": overwrite}
    save_leaves(replace(config, dtype=dtype), leaf_at, folder, **options, progress=progress)  # type: ignore[arg-type]


def save_leaves(
    config: ModelConfig,
    leaf_at: LeafAt,
    folder: str | os.PathLike[str],
    *,
    spelling: Spelling = "4.x",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: Progress = silent,
) -> None:
    """Writes the same checkpoint from arrays that are asked for one by one, as they are written, in config.dtype.

    One array is held at a time, so that a model may be larger than memory.
    """
    target, dtype = Path(folder), str(config.dtype)
    check_target(target, overwrite)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
        raise InputError("max_shard_bytes", max_shard_bytes, "must be a positive integer", "Qwen's shards: 5000000000.")
    data = to_hf(config, spelling)
    tensors = _by_layer(config)
    size = np.dtype(dtype).itemsize
    shards = _split(tensors, max_shard_bytes // size)
    check_space(target, sum(prod(tensor.stored_shape) for tensor in tensors) * size)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.parent / f".{target.name}.{token_hex(4)}.partial"
        partial.mkdir()
        try:
            _write(partial, data, shards, dtype, _arrays(leaf_at, tensors, progress))
            _publish(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(str(folder), None, f"can't be written ({error.strerror or error})", "Choose another folder.")


def check_target(folder: Path, overwrite: bool = False) -> None:
    """Refuses to write over a file, or into a folder that holds files unless told."""
    try:
        is_file, filled = folder.exists() and not folder.is_dir(), folder.is_dir() and any(folder.iterdir())
    except OSError as error:  # a name too long, or a folder that can't be entered
        raise _unwritable(folder, error) from error
    if is_file:
        raise InputError(str(folder), None, "is a file, not a folder", "Name a new folder.")
    if filled and not overwrite:
        remedy = "Name a new folder, or overwrite it (overwrite=True, --overwrite)."
        raise InputError(str(folder), None, "already holds files", remedy)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuses what the disk has no room for."""
    above = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(above).free
    if needed_bytes > free:
        problem = f"needs {needed_bytes} bytes, and the disk has {free} left"
        raise InputError(str(folder), None, problem, "Choose another disk, fewer layers or a smaller dtype.")


def _check_params(config: ModelConfig, params: Params) -> str:
    """The dtype of all arrays, after checking that they are those of the config."""
    if config.quantization is not None:
        problem = "the parameters here are plain arrays"
        remedy = "Save them with dataclasses.replace(config, quantization=None)."
        raise InputError("quantization", config.quantization.method, problem, remedy)
    expected = {name: leaf.shape for name, leaf in _leaves(param_shapes(config))}
    found = dict(_leaves(params))
    faults = [f"missing: {name} {list(expected[name])}" for name in expected.keys() - found.keys()]
    faults += [f"unexpected: {name}" for name in found.keys() - expected.keys()]
    faults += [
        f"misshapen: {name} is {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    dtypes = sorted({str(leaf.dtype) for leaf in found.values()})
    if len(dtypes) > 1 or not STORED_NAMES.keys() >= set(dtypes):
        faults.append(f"dtypes: {', '.join(dtypes)}, expected one of {', '.join(STORED_NAMES)} for all arrays")
    if faults:
        problem = "\n  ".join(["aren't those of this config:", *sorted(faults)])
        raise InputError("params", None, problem, "Save them with their own config.")
    return dtypes[0]


def _leaves(tree: Params, above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{above}{name}"
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _by_layer(config: ModelConfig) -> list[Tensor]:
    """Tensors of one layer together, those of one array next to each other: embedding, layers, norm and head."""
    tensors = list(tensors_of(config))
    first = {leaf: i for i, leaf in reversed(list(enumerate(tensor.leaf for tensor in tensors)))}
    last = config.num_hidden_layers

    def order(tensor: Tensor) -> tuple[int, int]:
        outside = -1 if tensor.leaf == "embed_tokens" else last
        return (outside if tensor.layer is None else tensor.layer, first[tensor.leaf])

    return sorted(tensors, key=order)


def _split(tensors: Sequence[Tensor], limit: int) -> list[list[Tensor]]:
    """Runs of tensors of at most `limit` elements; a larger tensor is a run of its own."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        elements = prod(tensor.stored_shape)
        if shards[-1] and filled + elements > limit:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += elements
    return shards


def _arrays(leaf_at: LeafAt, tensors: Sequence[Tensor], progress: Progress) -> Iterator[Array]:
    """The tensors one after another as host arrays; those of one leaf follow each other, and each leaf comes once."""
    behind, total = 0, sum(prod(tensor.stored_shape) for tensor in tensors)
    for (layer, leaf), of_leaf in groupby(tensors, key=lambda tensor: (tensor.layer, tensor.leaf)):
        whole = np.asarray(leaf_at(layer, leaf))
        for tensor in of_leaf:
            yield whole[tensor.place]
            behind += prod(tensor.stored_shape)
        del whole  # before the next one is made
        progress(leaf if layer is None else f"layer {layer} {leaf}", behind / total)


def _write(
    folder: Path, config: dict[str, Any], shards: Sequence[Sequence[Tensor]], dtype: str, arrays: Iterator[Array]
) -> None:
    count, size = len(shards), np.dtype(dtype).itemsize
    names = [SINGLE_FILE] if count == 1 else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    for name, tensors in zip(names, shards, strict=True):
        _write_shard(folder / name, tensors, dtype, arrays)
    next(arrays, None)  # the last array's progress
    if count > 1:
        weight_map = {t.key: name for name, tensors in zip(names, shards, strict=True) for t in tensors}
        total = sum(prod(t.stored_shape) for tensors in shards for t in tensors) * size
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / INDEX_FILE, index)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_shard(path: Path, tensors: Sequence[Tensor], dtype: str, arrays: Iterator[Array]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in tensors:
        end = position + prod(tensor.stored_shape) * np.dtype(dtype).itemsize
        header[tensor.key] = {
            "dtype": STORED_NAMES[dtype],
            "shape": tensor.stored_shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in tensors:
            file.write(np.ascontiguousarray(next(arrays)).view(np.uint8).data)


def _publish(partial: Path, target: Path) -> None:
    """Gives a finished folder its name, or moves its files into the one that is there."""
    if not target.exists():
        os.replace(partial, target)
        return
    for path in target.iterdir():
        if _WEIGHTS.fullmatch(path.name):
            path.unlink()
    # config.json last: a folder in which the weights are half moved has no index that fits.
    for path in sorted(partial.iterdir(), key=lambda path: path.suffix == ".json"):
        os.replace(path, target / path.name)
