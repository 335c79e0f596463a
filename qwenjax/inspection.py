"""A config as it was read: the architecture, what was defaulted or ignored, and the parameter tree by leaf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import groupby
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, shape, size
from qwenjax.ops import Scope, layers_of, leaf_letters, weights_of
from qwenjax.tables import Table

_PLACE: dict[Scope, str] = {"model": "once", "layer": "every layer", "dense": "dense layers", "sparse": "sparse layers"}
_TITLES = {"default": "Taken by default", "ignored": "Ignored", "warning": "Warnings"}


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
        "num_params": sum(row["elements"] for row in rows),
        "rows": rows,
        "notes": config.notes,
    }


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
    rows = [[name, _shown(value)] for name, value in facts.items()]
    rows.append(["sliding_windows", _windows(config["sliding_windows"])])
    yield Table("Architecture as read", ("field", "value"), rows, text=("field", "value"))
    yield _tree(record["rows"])
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
