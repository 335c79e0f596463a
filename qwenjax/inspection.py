"""A config as it was read: the architecture, what was defaulted or ignored, the parameter tree by leaf, the files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import groupby
from pathlib import Path
from typing import Any

from qwenjax.checkpoint.counting import count_tensors
from qwenjax.checkpoint.plan import plan_loading
from qwenjax.checkpoint.shards import describe_stored, find_tensors
from qwenjax.config import ModelConfig
from qwenjax.dims import dims, shape, size
from qwenjax.errors import InputError
from qwenjax.hf_keys import Note
from qwenjax.ops import Scope, layers_of, leaf_letters, weights_of
from qwenjax.tables import Table

_PLACE: dict[Scope, str] = {"model": "once", "layer": "every layer", "dense": "dense layers", "sparse": "sparse layers"}
# What the first Qwen3 models' config.json says; huggingface.co/Qwen/Qwen3-8B, "Processing Long Texts", read 2025.
_QWEN3_POSITIONS = 40960
_TITLES = {"default": "Taken by default", "ignored": "Ignored", "warning": "Warnings"}


def inspect_model(model: str) -> dict[str, Any]:
    """The record of a known model's name, a config.json, or a checkpoint folder, whose files are then counted too."""
    config = ModelConfig.from_hf(model)
    record = inspection_record(config)
    folder = Path(model)
    if not os.path.isdir(folder) or not any(folder.glob("*.safetensors")):
        return record
    stored, notes = _files(folder, config)
    return {**record, "stored": stored, "notes": (*config.notes, *notes)}


def _files(folder: Path, config: ModelConfig) -> tuple[dict[str, Any] | None, tuple[Note, ...]]:
    """What the files hold, and a warning where they can't be read or aren't this config's; the config stands alone."""
    try:
        tensors = find_tensors(folder)
    except InputError as error:
        return None, (Note("warning", error.field, f"{error.problem}. {error.remedy}"),)
    totals = asdict(count_tensors(tensors, config.quantization.bits if config.quantization else None))
    stored = {**totals, "files": describe_stored(folder)}
    try:
        plan_loading(folder, config, tensors)
    except InputError as error:
        problem = error.problem.splitlines()[0].removesuffix(":")
        return stored, (Note("warning", error.field, f"{problem}. {error.remedy}"),)
    return stored, ()


def inspection_record(config: ModelConfig) -> dict[str, Any]:
    """`rows` are the leaves: shape, how many layers have one, elements in all, and the checkpoint tensors in it."""
    rows = _leaves(config)
    kept = (field.name for field in fields(config) if field.name not in ("name", "notes"))
    return {
        "model": config.name,
        "config": {name: getattr(config, name) for name in kept},
        "is_moe": config.is_moe,
        "qk_norm": config.qk_norm,
        "sparse_layers": config.sparse_layers,
        "context_length": config.context_length,
        "context": _context(config),
        "num_params": sum(row["elements"] for row in rows),
        "rows": rows,
        "stored": None,
        "notes": config.notes,
    }


def _context(config: ModelConfig) -> dict[str, Any]:
    """The lengths that are quoted for one model, each with where it comes from; tokens."""
    scaling, stated = config.rope_scaling, config.max_position_embeddings
    lengths = {"max_position_embeddings": stated}
    if scaling is None:
        text = f"{stated} positions, as max_position_embeddings says; no RoPE scaling stretches them"
        if config.model_type.startswith("qwen3") and stated == _QWEN3_POSITIONS:
            text += "; Qwen3's model cards call 32768 of them native, which YaRN stretches 4 times to 131072"
        return {**lengths, "original_max_position_embeddings": None, "scaled_positions": None, "explanation": text}
    original, kind = scaling.original_max_position_embeddings, {"yarn": "YaRN"}.get(scaling.rope_type, "linear scaling")
    scaled = int(scaling.factor * original)
    text = (
        f"{stated} positions, as max_position_embeddings says; {original} before stretching, which {kind} stretches "
        f"{scaling.factor:g} times to {scaled}; the longer of the first and the last counts here: "
        f"{config.context_length}"
    )
    return {**lengths, "original_max_position_embeddings": original, "scaled_positions": scaled, "explanation": text}


def _leaves(config: ModelConfig) -> list[dict[str, Any]]:
    """One row for each array name of the parameter tree; q, k and v lie in one array, and so do gate and up."""
    rows: dict[str, dict[str, Any]] = {}
    for weight in weights_of(config):
        letters, sizes = leaf_letters(weight.leaf), dims(config, block=weight.block)
        layers = layers_of(config, weight.scope)
        row = {
            "leaf": weight.leaf,
            "letters": letters,
            "shape": shape(letters, sizes),
            "scope": weight.scope,
            "layers": layers,
            "elements": int(size(letters, sizes)) * layers,
            "tensors": [],
        }
        rows.setdefault(weight.leaf, row)["tensors"].append(weight.key)
    return list(rows.values())


def inspection_text(record: dict[str, Any]) -> Iterator[str | Table]:
    config = record["config"]
    kind = f"{len(record['sparse_layers'])} of them mixtures of experts" if record["is_moe"] else "dense"
    yield (
        f"{record['model'] or config['model_type']}: {config['model_type']}, {config['num_hidden_layers']} layers "
        f"({kind}), {record['num_params']:,} parameters"
    )
    facts = {name: value for name, value in config.items() if name != "sliding_windows"}
    facts |= {name: record[name] for name in ("qk_norm", "context_length")}
    facts["context"] = record["context"]["explanation"]
    rows = [[name, _shown(value)] for name, value in facts.items()]
    rows.append(["sliding_windows", _windows(config["sliding_windows"])])
    yield Table("Architecture as read", ("field", "value"), rows, text=("field", "value"))
    yield _tree(record["rows"])
    if record["stored"]:
        yield _stored_table(record["stored"], record["num_params"])
        yield _files_table(record["stored"]["files"])
    for note_kind, title in _TITLES.items():
        notes = [[note.field, note.text] for note in record["notes"] if note.kind == note_kind]
        if notes:
            yield Table(title, ("field", "what and why"), notes, text=("field", "what and why"))


def _tree(leaves: list[dict[str, Any]]) -> Table:
    rows = [
        [
            row["leaf"],
            row["letters"],
            str(list(row["shape"])),
            _PLACE[row["scope"]],
            f"{row['layers']:,}",
            f"{row['elements']:,}",
            ", ".join(row["tensors"]),
        ]
        for row in leaves
    ]
    total = sum(row["elements"] for row in leaves)
    rows.append(["total", "", "", "", "", f"{total:,}", ""])
    columns = ("leaf", "letters", "shape", "where", "copies", "elements", "checkpoint tensors")
    texts = ("leaf", "letters", "where", "checkpoint tensors")
    return Table("Parameter tree", columns, rows, text=texts, totals=True)


def _stored_table(stored: dict[str, Any], num_params: int) -> Table:
    """What the files hold beside what the architecture has."""
    difference = stored["num_weights"] - num_params
    names = {
        "num_tensors": "tensors",
        "num_bytes": "bytes",
        "num_weights": "weights, unpacked",
        "num_quantization_values": "scales, zero points and group orders",
    }
    rows = [[text, f"{stored[name]:,}"] for name, text in names.items()]
    rows.append(["weights beyond the architecture's", f"{difference:+,}" if difference else "none"])
    rows.append(["lm_head stored", _shown(stored["lm_head_stored"])])
    if stored["unknown_width"]:
        rows.append(["packed tensors of unknown width, not counted", f"{len(stored['unknown_width']):,}"])
    return Table("What the files hold", ("what", "count"), rows, text=("what",))


def _files_table(files: list[dict[str, Any]]) -> Table:
    rows = []
    for row in files:
        kinds = ", ".join(f"{count} {name}" for name, count in row["dtypes"].items())
        rows.append([row["file"], f"{row['tensors']:,}", f"{row['bytes']:,}", kinds])
    return Table("Files", ("file", "tensors", "bytes", "dtypes"), rows, text=("file", "dtypes"))


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _windows(windows: tuple[int | None, ...]) -> str:
    """Runs of layers that see alike: 28 layers see all, 4 see 4096."""
    runs = [(window, len(list(run))) for window, run in groupby(windows)]
    return "; ".join(f"{count} layers: {'all positions' if w is None else f'{w} positions'}" for w, count in runs)
