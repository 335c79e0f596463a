"""The safetensors files of a checkpoint folder: which they are, and what their headers say, checked before use.

A file is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, and the tensors' bytes one
after another without gaps (github.com/huggingface/safetensors, "Format").

They are read here and not with the safetensors library, which tells the first fault of a file in its own words, knows
nothing of the others, and hands out copies: from the page cache to their places tensors take 2.4 times as long with it
(0.69 GB of bfloat16, 1.1 against 2.7 GB/s, its version 0.8). Tests hold this reader against it.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from qwenjax.config import read_json
from qwenjax.errors import InputError
from qwenjax.field_reader import plain_integer

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
MOST_AXES = 64
_LONGEST_LIST = 100  # keys that are told one by one
LONGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses longer ones too
_AGAIN = "Download the file again."
_NUMBERED = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.safetensors")
_OTHER_FORMATS = (  # how files begin that are taken for safetensors
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "Fetch it with `git lfs pull`."),
    (b"PK\x03\x04", "is a PyTorch archive, not safetensors", "Convert it with save_pretrained of transformers."),
    (b"GGUF", "is a GGUF file, not safetensors", "Use the checkpoint that it was made from."),
    (b"<", "is a web page, not safetensors", _AGAIN),
)
_OTHER_FILES = ("*.bin", "*.gguf", "*.pt", "*.pth")


class StoredTensor(NamedTuple):
    """Where a tensor's bytes lie; `offset` counts from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by its key, from the files that its index names or that are there.

    Reads headers only. Raises InputError naming each file that is missing, cut short, not safetensors or
    contradicts itself, its index or another file.
    """
    index_path = folder / INDEX_FILE
    if os.path.isfile(index_path):
        weight_map = _read_index(index_path)
        paths = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in paths if not os.path.isfile(path)]
        if missing:
            names = ", ".join(missing)
            raise InputError(str(index_path), None, f"names files that aren't there: {names}", "Download them.")
        single = folder / SINGLE_FILE
        if os.path.isfile(single) and single not in paths:
            raise InputError(str(single), None, f"lies beside {INDEX_FILE}, which doesn't name it", "Remove one.")
        tensors = _merge(folder, paths)
        _check_index(index_path, weight_map, tensors)
        return tensors
    return _merge(folder, _files_without_index(folder))


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that one safetensors file says it holds, after checking that it can and does."""
    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = int.from_bytes(start, "little")
            _check_start(path, start + file.read(24), length, total)
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise InputError(
            str(path), None, f"can't be read ({error.strerror})", "Check the file and its permissions."
        ) from None
    entries = _parse(path, text)
    data = 8 + length
    tensors, spans = {}, []
    for key, entry in entries.items():
        dtype, shape, begin, end = _read_entry(path, key, entry)
        tensors[key] = StoredTensor(path, dtype, shape, data + begin)
        spans.append((begin, end, key))
    _check_spans(path, sorted(spans), total - data)
    return tensors


def describe_stored(folder: Path) -> list[dict[str, Any]]:
    """One row for each safetensors file of a checkpoint folder, from headers alone; [] where there is none.

    file; tensors, how many; bytes of the tensors; dtypes, the tensors of each by its name in safetensors, sorted.
    """
    if not os.path.isfile(folder / INDEX_FILE) and not any(folder.glob("*.safetensors")):
        return []
    files: dict[str, list[StoredTensor]] = {}
    for tensor in find_tensors(folder).values():
        files.setdefault(tensor.path.name, []).append(tensor)
    return [
        {
            "file": name,
            "tensors": len(tensors),
            # Checked before: from the first tensor on the file holds nothing else.
            "bytes": tensors[0].path.stat().st_size - min(tensor.offset for tensor in tensors),
            "dtypes": dict(sorted(Counter(tensor.dtype for tensor in tensors).items())),
        }
        for name, tensors in sorted(files.items())
    ]


def _check_start(path: Path, start: bytes, length: int, total: int) -> None:
    if total < 8:
        raise InputError(str(path), None, f"has {total} bytes, too few for a safetensors file", _AGAIN)
    if length <= min(total - 8, LONGEST_HEADER):
        return
    for magic, problem, remedy in _OTHER_FORMATS:
        if start.startswith(magic):
            raise InputError(str(path), None, problem, remedy)
    limit = f"the file has {total}" if length > total - 8 else f"safetensors allows {LONGEST_HEADER}"
    problem = f"says that its header has {length} bytes, but {limit}: it is cut short or isn't safetensors"
    raise InputError(str(path), None, problem, _AGAIN)


def _parse(path: Path, text: bytes) -> Mapping[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) < len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(str(path), None, f"names {twice} twice in its header", _AGAIN)
        return result

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
    except InputError:
        raise
    except (ValueError, RecursionError):
        raise InputError(str(path), None, "has a header that isn't JSON: it isn't safetensors", _AGAIN) from None
    if not isinstance(header, dict):
        problem = f"has a header that is a JSON {type(header).__name__}, not an object"
        raise InputError(str(path), None, problem, _AGAIN)
    return {key: entry for key, entry in header.items() if key != "__metadata__"}


def _read_entry(path: Path, key: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and the two offsets of a header's entry."""
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (entry.get(name) for name in ("dtype", "shape", "data_offsets"))
    if (
        not isinstance(dtype, str)
        or not _counts(shape)
        or not _counts(offsets)
        or len(offsets) != 2
        or len(shape) > MOST_AXES
    ):
        problem = f"has no dtype, shape and two data_offsets for {key} in its header"
        raise InputError(str(path), None, problem, _AGAIN)
    begin, end = offsets
    # A dtype that isn't known here has an unknown size; if the tensor is wanted, its dtype is refused.
    needed = -(-prod(shape) * BITS[dtype] // 8) if dtype in BITS else end - begin
    if end < begin or needed != end - begin:
        problem = f"gives {key}, {dtype} {list(shape)}, {end - begin} bytes in its header where {needed} are needed"
        raise InputError(str(path), None, problem, _AGAIN)
    return dtype, tuple(shape), begin, end


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(plain_integer(item) and item >= 0 for item in value)


def _check_spans(path: Path, spans: Iterable[tuple[int, int, str]], size: int) -> None:
    """Tensors must follow each other from the first byte to the last."""
    position, before = 0, ""
    for begin, end, key in spans:
        if begin < position:
            raise InputError(str(path), None, f"has overlapping tensors: {before} and {key}", _AGAIN)
        if begin > position:
            problem = f"has a hole of {begin - position} bytes before {key}"
            raise InputError(str(path), None, problem, _AGAIN)
        position, before = end, key
    if position > size:
        problem = f"is cut short: its tensors need {position} bytes, {size} are there"
        raise InputError(str(path), None, problem, _AGAIN)
    if position < size:
        problem = f"has {size - position} bytes at its end that belong to no tensor"
        raise InputError(str(path), None, problem, _AGAIN)


def _read_index(path: Path) -> dict[str, str]:
    """Which file holds which tensor, by an index's word."""
    again = "Download the index again."
    try:
        weight_map = read_json(path).get("weight_map")
    except InputError as error:
        raise InputError(error.field, error.value, error.problem, again) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(str(path), None, "has no weight_map, an object of tensors and their files", again)
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or re.search(r"[/\\]", name):
            problem = f"names {name!r} for {key}, which is no safetensors file of the folder"
            raise InputError(str(path), None, problem, again)
    return weight_map


def _check_index(path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    wrong = []
    for key, name in weight_map.items():
        if key not in tensors:
            wrong.append(f"{key}: not in {name}")
        elif tensors[key].path.name != name:
            wrong.append(f"{key}: in {tensors[key].path.name}, not in {name}")
    wrong += [f"{key}: in {tensors[key].path.name}, not in the index" for key in tensors.keys() - weight_map.keys()]
    if wrong:
        problem = f"disagrees with the files: {_listed(sorted(wrong))}"
        raise InputError(str(path), None, problem, "Download the index and the files again.")


def _listed(faults: list[str]) -> str:
    rest = len(faults) - _LONGEST_LIST
    return "; ".join([*faults[:_LONGEST_LIST], *([f"and {rest} more"] if rest > 0 else [])])


def _files_without_index(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    single = folder / SINGLE_FILE
    numbered = [match for path in paths if (match := _NUMBERED.fullmatch(path.name))]
    if single in paths and numbered:
        raise InputError(str(folder), None, f"has both {SINGLE_FILE} and {numbered[0][0]}, and no index", "Keep one.")
    if single in paths:
        return [single]
    if not paths:
        others = sorted(path.name for pattern in _OTHER_FILES for path in folder.glob(pattern))
        there = f" (there: {', '.join(others)}, which aren't read)" if others else ""
        remedy = "Convert them with save_pretrained of transformers." if others else "Download the weights too."
        raise InputError(str(folder), None, f"the folder has no .safetensors file{there}", remedy)
    sets = {(match[1], match[3]) for match in numbered}
    expected = {f"{stem}-{i:05}-of-{count}.safetensors" for stem, count in sets for i in range(1, int(count) + 1)}
    missing = sorted(expected - {path.name for path in paths})
    if missing:
        raise InputError(str(folder), None, f"shards are missing: {', '.join(missing)}", "Download them.")
    return paths


def _merge(folder: Path, paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of all files; a tensor in two files is an error."""
    tensors: dict[str, StoredTensor] = {}
    twice = []
    for path, header in zip(paths, _read_headers(folder, paths), strict=True):
        twice += [f"{key} in {tensors[key].path.name} and {path.name}" for key in header if key in tensors]
        tensors |= header
    if twice:
        raise InputError(str(folder), None, f"tensors are stored twice: {_listed(twice)}", "Remove the stale file.")
    return tensors


def _read_headers(folder: Path, paths: Iterable[Path]) -> list[dict[str, StoredTensor]]:
    """The headers of all files; those that can't be used are told in one error."""
    headers, errors = [], []
    for path in paths:
        try:
            headers.append(read_header(path))
        except InputError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        told = "; ".join(f"{error.field} {error.problem}" for error in errors)
        raise InputError(str(folder), None, f"{len(errors)} files can't be used: {told}", errors[0].remedy)
    return headers
