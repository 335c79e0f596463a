"""Requests of one prompt and output length served together: times, rates and what limits them, by batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.tables import Table
from roofline.hardware import Hardware
from roofline.predict import Device
from roofline.report.units import decimal, milliseconds, percent, quantity, rate, whole
from roofline.request import Prediction

_SHOWN_SOURCES = 3  # of a profile, largest first; JSON has all


def predict_record(
    config: ModelConfig, hardware: Hardware, device: Device, settings: Mapping[str, Any], prediction: Prediction
) -> dict[str, Any]:
    return {
        "model": config.name,
        "hardware": hardware.id,
        **settings,
        "device": device,
        "profile": _profile(prediction),
        "rows": prediction.rows,
    }


def _profile(prediction: Prediction) -> dict[str, Any]:
    profile = prediction.profile
    return {**profile.summary, "sources": dict(profile.sources), "nearest": prediction.nearest or None}


def predict_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield _headline(record)
    profile = record["profile"]
    yield f"Profile {profile['name']}: {_source(profile)}. Validation: {profile['validation']}."
    if profile["nearest"]:
        yield f"The nearest profile, not one fitted here ({profile['nearest']}), so the interval is wider."
    device = record["device"]
    yield (
        f"{record['dtype']} weights, {record['kv_dtype']} cache; at {quantity(device.flops_per_s, 'FLOP/s')} and "
        f"{quantity(device.bandwidth_bytes_per_s, 'B/s')} a device, {record['tp'] * record['ep']} of them."
    )
    yield (
        "Fits: weights and the batch's whole KV cache are within the memory that the device reports; an engine needs "
        "more beside them, see `roofline memory`."
    )
    yield _table(record)


def _source(profile: Mapping[str, Any]) -> str:
    """Where a profile's rows are from: all of a few sources, the largest of many."""
    sources: Mapping[str, int] = profile["sources"]
    if len(sources) <= _SHOWN_SOURCES:
        return str(profile["source"])
    largest = sorted(sources, key=lambda name: (-sources[name], name))[:_SHOWN_SOURCES]
    listed = ", ".join(f"{name} ({whole(sources[name])})" for name in largest)
    rows = f"{whole(sum(sources.values()))} published measurements from {len(sources)} sources"
    return f"{rows}: {listed} and {len(sources) - _SHOWN_SOURCES} more"


def _headline(record: dict[str, Any]) -> str:
    rows = record["rows"]
    fitting = [row for row in rows if row.fits]
    best = max(fitting or rows, key=lambda row: row.throughput_tokens_per_s)
    bound = record["profile"]["name"] == "bound"
    least, most = ("at least ", "at most ") if bound else ("", "")
    each = "" if best.tpot_s is None else f"{least}{quantity(best.tpot_s, 's')} a token after that, "
    lengths = f"{whole(record['prompt'])} tokens in, {whole(record['output'])} out"
    where = f"{record['model']} on {record['hardware']}, {lengths}"
    fits = "" if fitting else ", which doesn't fit in memory" if len(rows) == 1 else ", none of which fits in memory"
    return (
        f"{where}, batch {whole(best.batch)}{fits}: first token after {least}{quantity(best.ttft_s, 's')}, {each}"
        f"{most}{rate(best.throughput_tokens_per_s)}, limited by {best.limited_by}"
        f"{' (a lower bound in time)' if bound else ''}"
    )


def _table(record: dict[str, Any]) -> Table:
    rows, bound = record["rows"], record["profile"]["name"] == "bound"
    body = [
        [
            whole(row.batch),
            "yes" if row.fits else "no",
            milliseconds(row.ttft_s),
            milliseconds(row.tpot_s),
            milliseconds(row.e2e_s),
            *([] if bound else [milliseconds(row.low), milliseconds(row.high)]),
            decimal(row.tokens_per_s_per_sequence),
            decimal(row.throughput_tokens_per_s),
            percent(row.mfu),
            percent(row.mbu),
            row.limited_by,
        ]
        for row in rows
    ]
    columns = (
        "batch",
        "fits",
        "first token, ms",
        "each later, ms",
        "all, ms",
        *(() if bound else ("low", "high")),
        "tokens/s a sequence",
        "tokens/s in all",
        "mfu",
        "mbu",
        "limited by",
    )
    return Table("By batch", columns, body, text=("fits", "limited by"))
