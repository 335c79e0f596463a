"""Batch against distinct experts against the weight bytes of a decode step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.tables import Table
from roofline.hardware import Hardware
from roofline.moe import ExpertsRow
from roofline.report.units import column, decimal, milliseconds, percent, quantity, whole


def experts_record(
    config: ModelConfig,
    hardware: Hardware | None,
    settings: Mapping[str, Any],
    rows: Sequence[ExpertsRow],
    touch_batch: int,
) -> dict[str, Any]:
    """touch_batch: the smallest batch whose expected distinct experts are touch_fraction of all."""
    return {
        "model": config.name,
        "hardware": hardware.id if hardware else None,
        **settings,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_sparse_layers": len(config.sparse_layers),
        "touch_batch": touch_batch,
        "rows": rows,
    }


def experts_text(record: dict[str, Any]) -> Iterator[str | Table]:
    rows, experts = record["rows"], record["num_experts"]
    first = rows[0]
    yield (
        f"{record['model']}: a decode step of batch {whole(first.batch)} reads {quantity(first.weight_bytes, 'B')} of "
        f"weights, {percent(first.saving)} less than with all {whole(experts)} experts; from batch "
        f"{whole(record['touch_batch'])} on {percent(record['touch_fraction'])} of the experts are touched"
    )
    where = f" on {record['hardware']} with {whole(record['context'])} tokens attended" if record["hardware"] else ""
    yield (
        f"Each token uses {record['num_experts_per_tok']} experts in each of {record['num_sparse_layers']} layers; "
        f"routing taken as uniform; {record['dtype']}; the embedding's rows are left out{where and '; times' + where}."
    )
    yield _table(rows, experts)


def _table(rows: Sequence[ExpertsRow], experts: int) -> Table:
    unit, read = column([row.weight_bytes for row in rows], "B")
    per_token_unit, per_token = column([row.weight_bytes_per_token for row in rows], "B")
    body = [
        [
            whole(row.batch),
            decimal(row.distinct_experts, 2),
            percent(row.distinct_experts / experts),
            read(row.weight_bytes),
            per_token(row.weight_bytes_per_token),
            percent(1 - row.saving),
            percent(row.saving),
            milliseconds(row.time_s),
        ]
        for row in rows
    ]
    columns = (
        "batch",
        "experts",
        "of all",
        f"weights, {unit}",
        f"a token, {per_token_unit}",
        "of all weights",
        "saved",
        "time, ms",
    )
    return Table("Distinct experts of a layer and weights read by a decode step", columns, body)
