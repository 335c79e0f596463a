"""What is known: models side by side, and chips with every figure's unit, kind, source and date."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import dims, size
from qwenjax.known_models import KnownModel
from qwenjax.tables import Table
from roofline.count import DtypePolicy, count_params
from roofline.hardware import Hardware, describe_hardware
from roofline.report.units import NOTHING, decimal, gib, percent, quantity, short_count, whole

_SIZES = (
    "model_type",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "context_length",
    "rope_theta",
    "tie_word_embeddings",
    "qkv_bias",
    "qk_norm",
)
_SPARSE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def models_record(models: Sequence[tuple[ModelConfig, KnownModel | None]], policy: DtypePolicy) -> dict[str, Any]:
    """One row for each model, all with the same fields; what a dense model has no value for is None."""
    rows = [_model_row(config, known, policy) for config, known in models]
    return {"dtype": policy.weight, "kv_dtype": policy.kv, "rows": rows}


def _model_row(config: ModelConfig, known: KnownModel | None, policy: DtypePolicy) -> dict[str, Any]:
    counts = count_params(config, policy.weight, policy.kv)
    sizes = dims(config)
    return {
        "name": config.name,
        **{name: getattr(config, name) for name in _SIZES},
        "query_width_minus_hidden_size": size("NH", sizes) - size("D", sizes),
        **{name: getattr(config, name) if config.is_moe else None for name in (*_SPARSE, "norm_topk_prob")},
        "num_sparse_layers": len(config.sparse_layers),
        "quantization": config.quantization.method if config.quantization else None,
        "num_params": counts.num_params,
        "num_active_params": counts.num_active_params,
        "active_fraction": counts.num_active_params / counts.num_params,
        "weight_bytes": counts.weight_bytes,
        "kv_bytes_per_token": counts.kv_bytes_per_token,
        "flops_per_token": counts.flops_per_token["total"],
        "stored_params": known.stored_params if known else None,
        "stored_note": known.stored_note if known else None,
        "hf_id": known.hf_id if known else None,
        "source": known.source if known else None,
    }


def models_text(record: dict[str, Any]) -> Iterator[str | Table]:
    """Side by side; a * marks what differs between the models."""
    rows = record["rows"]
    names = [row["name"] or "config" for row in rows]
    fields = [field for field in rows[0] if field not in ("name", "source", "hf_id", "stored_note")]
    yield f"{' against '.join(names)} ({record['dtype']} weights, {record['kv_dtype']} cache)"
    body = [
        [field, *(_cell(field, row[field]) for row in rows), "*" if len({repr(row[field]) for row in rows}) > 1 else ""]
        for field in fields
    ]
    columns = ["fact", *names, "differs"]
    if len(rows) == 1:
        columns, body = columns[:-1], [line[:-1] for line in body]
    yield Table("Architecture and counts", _distinct(columns), body, text=("fact", "differs"))
    for row in rows:
        if row["source"]:
            note = f" (stored: {row['stored_note']})" if row["stored_note"] else ""
            yield f"\n{row['hf_id']}: {row['source']}{note}"


def _distinct(columns: Sequence[str]) -> list[str]:
    return [name if columns.index(name) == i else f"{name} ({i})" for i, name in enumerate(columns)]


def model_list_text(record: dict[str, Any]) -> Iterator[str | Table]:
    rows = record["rows"]
    yield f"{len(rows)} known models; `roofline models NAME` gives one's facts and sources, several names compare"
    body = [
        [
            row["hf_id"],
            row["model_type"],
            whole(row["num_hidden_layers"]),
            whole(row["hidden_size"]),
            short_count(row["num_params"]),
            short_count(row["num_active_params"]),
            quantity(row["weight_bytes"], "B"),
            whole(row["kv_bytes_per_token"]),
            whole(row["context_length"]),
            row["quantization"] or NOTHING,
        ]
        for row in rows
    ]
    columns = (
        "model",
        "type",
        "layers",
        "hidden",
        "parameters",
        "active",
        f"weights, {record['dtype']}",
        "KV B/token",
        "context",
        "stored as",
    )
    yield Table("Models", columns, body, text=("model", "type", "stored as"))


def _cell(field: str, value: Any) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field == "active_fraction":
        return percent(value)
    if field == "weight_bytes":
        return f"{quantity(value, 'B')}, {gib(value)}"
    return value if isinstance(value, str) else whole(value)


def hardware_record(chips: Sequence[Hardware]) -> dict[str, Any]:
    """One row for each chip: what a roofline needs of it."""
    return {"rows": [_chip_row(chip) for chip in chips]}


def _chip_row(chip: Hardware) -> dict[str, Any]:
    known = "bfloat16" in chip.peak_flops_per_s
    return {
        "id": chip.id,
        "name": chip.name,
        "vendor": chip.vendor,
        "architecture": chip.architecture,
        "launch_year": chip.launch_year,
        "memory_bytes": chip.memory_bytes,
        "usable_memory_bytes": chip.usable_memory_bytes,
        "peak_bandwidth_bytes_per_s": chip.peak_bandwidth_bytes_per_s,
        "measured_bandwidth_bytes_per_s": chip.measured_bandwidth_bytes_per_s,
        "peak_bfloat16_flops_per_s": chip.peak_flops_per_s["bfloat16"] if known else None,
        "ridge_intensity_bfloat16": chip.ridge_intensity("bfloat16") if known else None,
    }


def hardware_text(record: dict[str, Any]) -> Iterator[str | Table]:
    rows = record["rows"]
    yield f"{len(rows)} chips; `roofline hardware ID` gives every figure with its source"
    body = [
        [
            row["id"],
            row["name"],
            row["architecture"],
            gib(row["usable_memory_bytes"]),
            quantity(row["peak_bandwidth_bytes_per_s"], "B/s"),
            quantity(row["peak_bfloat16_flops_per_s"], "FLOP/s"),
            decimal(row["ridge_intensity_bfloat16"], 0),
        ]
        for row in rows
    ]
    columns = ("id", "name", "architecture", "usable memory", "peak bandwidth", "peak bfloat16", "ridge, FLOP/B")
    yield Table("Chips", columns, body, text=("id", "name", "architecture"))


def chip_record(chip: Hardware) -> dict[str, Any]:
    """One chip whole: its identity, links and notes, `rows` with every figure, and what calibration measured."""
    return {
        **_chip_row(chip),
        "compute_capability": chip.compute_capability,
        "memory_type": chip.memory_type,
        "links": [
            {"name": k.name, "generation": k.generation, "lanes": k.lanes, "one_way_bytes_per_s": k.one_way_bytes_per_s}
            for k in chip.links
        ],
        "rows": describe_hardware(chip),
        "measured": chip.measured,
        "remarks": chip.notes,
    }


def chip_text(record: dict[str, Any]) -> Iterator[str | Table]:
    year = f", {record['launch_year']}" if record["launch_year"] else ""
    yield (
        f"{record['id']}: {record['name']} ({record['architecture']}{year}), {gib(record['usable_memory_bytes'])} "
        f"usable, {quantity(record['peak_bandwidth_bytes_per_s'], 'B/s')}, "
        f"{quantity(record['peak_bfloat16_flops_per_s'], 'FLOP/s')} in bfloat16"
    )
    body = [
        [
            row["name"],
            _figure(row["value"], row["unit"]),
            row["kind"],
            row["date"] or NOTHING,
            "; ".join(part for part in (row["source"], row["sparsity"], row["note"]) if part),
        ]
        for row in record["rows"]
    ]
    columns = ("figure", "value", "kind", "date", "source")
    yield Table("Figures", columns, body, text=("figure", "kind", "date", "source"))
    for remark in record["remarks"]:
        yield f"\n{remark}"


def _figure(value: float, unit: str) -> str:
    if unit == "count":
        return whole(value)
    if unit == "B":
        return f"{whole(value)} B"
    return quantity(value, unit)
