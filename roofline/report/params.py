"""The account of parameters: totals, the bill of materials, the matrices of a layer, and what the files hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.known_models import KnownModel
from qwenjax.tables import Table
from roofline.bill import BillRow, LayerMatmul
from roofline.count import DtypePolicy, ParamCounts
from roofline.report.units import NOTHING, gib, percent, quantity, short_count, whole
from roofline.stored import StoredCount


def params_record(
    config: ModelConfig,
    policy: DtypePolicy,
    counts: ParamCounts,
    bill: Sequence[BillRow],
    matmuls: Sequence[LayerMatmul],
    stored: StoredCount,
    known: KnownModel | None,
) -> dict[str, Any]:
    """`known` are the published facts where MODEL was a known model's name."""
    return {
        "model": config.name,
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        "dtype": policy.weight,
        "kv_dtype": policy.kv,
        **vars(counts),
        "bill": bill,
        "matmuls": matmuls,
        "stored": {
            "stored": stored.stored,
            "differences": [{"reason": reason, "elements": elements} for reason, elements in stored.differences],
            "published": known.stored_params if known else None,
            "published_note": known.stored_note if known else None,
            "source": known.source if known else None,
        },
    }


def params_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield _headline(record)
    yield _bill(record)
    flops, attention = record["flops_per_token"], record["attention_flops"]
    yield (
        f"\nOne token with logits costs {quantity(flops['total'], 'FLOP')}, without them "
        f"{quantity(flops['backbone'], 'FLOP')} (matrix products, 2 for each multiply-add)."
    )
    yield (
        f"Attention comes on top: {whole(attention['decode_per_context_token'])} FLOP for each attended token of a "
        f"decode step, {whole(attention['prefill_causal_per_token_squared'])} FLOP x S^2 for a causal prefill of S."
    )
    yield _matmuls(record)
    yield from _stored(record)


def _headline(record: dict[str, Any]) -> str:
    total, active, size = record["num_params"], record["num_active_params"], record["weight_bytes"]
    sparse = f"{whole(active)} ({short_count(active)}, {percent(active / total)}) active a token, "
    used = "" if active == total else sparse
    return (
        f"{record['model'] or record['model_type']}: {whole(total)} parameters ({short_count(total)}), {used}"
        f"{quantity(size, 'B')} ({gib(size)}) in {record['dtype']}, "
        f"{whole(record['kv_bytes_per_token'])} B of KV cache a token in {record['kv_dtype']}"
    )


def _bill(record: dict[str, Any]) -> Table:
    total, flops = record["num_params"], record["flops_per_token"]["total"]
    cached = record["kv_bytes_per_token"]
    rows = [
        [
            row.component,
            whole(row.weights),
            percent(row.weights / total),
            whole(row.flops_per_token) if row.flops_per_token else NOTHING,
            percent(row.flops_per_token / flops) if row.flops_per_token else NOTHING,
            whole(row.kv_bytes_per_token) if row.kv_bytes_per_token else NOTHING,
        ]
        for row in record["bill"]
        if row.weights or row.flops_per_token
    ]
    rows.append(["total", whole(total), percent(1), whole(flops), percent(1), whole(cached)])
    columns = ("component", "weights", "share", "FLOP/token", "share of FLOP", "KV B/token")
    return Table(f"Where {short_count(total)} parameters live", columns, rows, text=("component",), totals=True)


def _matmuls(record: dict[str, Any]) -> Table:
    rows = [
        [
            row.name,
            f"[{row.in_features}, {row.out_features}]",
            whole(row.copies),
            whole(row.layers),
            whole(row.weights),
            whole(row.flops_per_token),
        ]
        for row in record["matmuls"]
    ]
    columns = ("matrix", "[in, out]", "copies", "layers", "weights", "FLOP/token")
    return Table("Matrix products of one layer", columns, rows, text=("matrix",))


def _stored(record: dict[str, Any]) -> Iterator[str]:
    """What the files hold, where that is known or differs from the architecture."""
    stored, published = record["stored"], record["stored"]["published"]
    terms = "".join(f"; {d['reason']}: {d['elements']:+,}" for d in stored["differences"])
    if terms or published is not None:
        yield f"\nThe files hold {whole(stored['stored'])} elements{terms}."
    if published is not None:
        agrees = "the same" if published == stored["stored"] else f"{whole(published)}, which isn't explained here"
        yield f"Published: {agrees} ({stored['source']})."
