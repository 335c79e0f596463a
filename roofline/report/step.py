"""One forward step: what each op computes and moves, the least time that takes, and a measured time beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwenjax.config import ModelConfig
from qwenjax.dims import Step
from qwenjax.errors import InputError
from qwenjax.tables import Table
from roofline.count import CountRow, sum_rows
from roofline.hardware import Hardware
from roofline.predict import StepTime
from roofline.profile import Profile
from roofline.report.units import column, decimal, percent, quantity, rate, whole
from roofline.utilization import compute_mbu, compute_mfu

_MOVED = ("weight_bytes", "kv_read_bytes", "kv_write_bytes", "activation_bytes")


def step_record(
    config: ModelConfig,
    step: Step,
    phase: str,
    settings: Mapping[str, Any],
    counts: Sequence[CountRow],
    timed: tuple[Hardware, StepTime, Profile] | None,
    measured: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Without a device the times, and what follows from them, are None. `settings` are the conventions that count.

    `measured` is what a measured time implies, see `measured_record`.
    """
    hardware, times, profile = timed or (None, None, None)
    ops = times.ops if times else (None,) * len(counts)
    totals = sum_rows(tuple(counts))
    return {
        "model": config.name,
        "hardware": hardware.id if hardware else None,
        "phase": phase,
        "batch": step.batch,
        "query_len": step.query_len,
        "context": step.kv_len,
        **settings,
        "profile": None if profile is None else profile.summary,
        "device": times.device if times else None,
        "rows": [
            {
                **vars(row),
                "intensity": row.flops / row.bytes if row.bytes else None,
                "time_s": op.time_s if op else None,
                "bound": op.bound if op else None,
            }
            for row, op in zip(counts, ops, strict=True)
        ],
        "communication": times.comms if times else [],
        "totals": {
            **totals,
            "intensity": totals["flops"] / totals["bytes"],
            "tokens": step.batch * step.query_len,
            "tokens_per_s": step.batch * step.query_len / times.time_s if times else None,
            **{name: getattr(times, name) if times else None for name in _TIMED},
        },
        "measured": measured,
    }


def measured_record(counts: Sequence[CountRow], tokens: int, time_s: float, times: StepTime | None) -> dict[str, Any]:
    """What a time that somebody measured for the step implies; a fraction above 1 is None and named in `problems`."""
    totals = sum_rows(tuple(counts))
    fractions: dict[str, float | None] = {"mfu": None, "mbu": None}
    problems = []
    if times:
        device = times.device
        parts = {
            "mfu": (compute_mfu, totals["flops"], device.flops_per_s),
            "mbu": (compute_mbu, totals["bytes"], device.bandwidth_bytes_per_s),
        }
        for name, (compute, amount, peak) in parts.items():
            try:
                fractions[name] = compute(amount, time_s, peak)
            except InputError as error:
                problems.append(str(error))
    return {
        "time_s": time_s,
        "tokens_per_s": tokens / time_s,
        "implied_bandwidth_bytes_per_s": totals["bytes"] / time_s,
        "implied_flops_per_s": totals["flops"] / time_s,
        **fractions,
        "bound_fraction": times.time_s / time_s if times else None,
        "problems": problems,
    }


_TIMED = ("time_s", "bound", "mfu", "mbu", "compute_s", "memory_s", "communication_s", "overhead_s")


def step_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield _headline(record)
    yield _conventions(record)
    if record["measured"]:
        yield _measured(record["measured"])
    yield _ops(record)
    if record["communication"]:
        yield _communication(record)
    yield from _terms(record)


def _headline(record: dict[str, Any]) -> str:
    totals, phase = record["totals"], record["phase"]
    what = f"{record['model']} {phase} of batch {whole(record['batch'])}"
    if totals["time_s"] is None:
        work = f"{quantity(totals['flops'], 'FLOP')} and {quantity(totals['bytes'], 'B')} a step"
        return f"{what}: {work}; --hardware gives times and limits"
    return (
        f"{what} on {record['hardware']}: at most {rate(totals['tokens_per_s'])}, at least "
        f"{quantity(totals['time_s'], 's')} a step, limited by {totals['bound']} "
        f"(mfu {percent(totals['mfu'])}, mbu {percent(totals['mbu'])})"
    )


def _conventions(record: dict[str, Any]) -> str:
    devices = record["tp"] * record["ep"]
    parts = [
        f"new tokens of a sequence: {whole(record['query_len'])}, attended: {whole(record['context'])}",
        f"{record['dtype']} weights, {record['kv_dtype']} cache",
        f"{record['attention']} attention, {record['logits']} logits",
    ]
    if record["distinct_experts"] is not None:
        parts.append(f"{whole(record['distinct_experts'])} distinct experts a layer ({record['experts']})")
    if devices > 1:
        parts.append(f"one of {devices} devices (tp {record['tp']}, ep {record['ep']})")
    return "; ".join(parts)


def _measured(measured: dict[str, Any]) -> str:
    """A time that somebody measured, as the bandwidth and rates that it implies."""
    implied = quantity(measured["implied_bandwidth_bytes_per_s"], "B/s")
    text = (
        f"Measured {quantity(measured['time_s'], 's')}: {rate(measured['tokens_per_s'])}, implies {implied} "
        f"and {quantity(measured['implied_flops_per_s'], 'FLOP/s')}"
    )
    if measured["bound_fraction"] is None:
        return text
    share = percent(measured["bound_fraction"])
    return f"{text}; mfu {percent(measured['mfu'])}, mbu {percent(measured['mbu'])}; {share} of the bound's speed"


def _ops(record: dict[str, Any]) -> Table:
    totals, rows, timed = record["totals"], record["rows"], record["totals"]["time_s"] is not None
    work, flops = column([row["flops"] for row in rows], "FLOP")
    size, moved = column([row["weight_bytes"] for row in rows], "B")
    unit, seconds = column([row["time_s"] for row in rows], "s")

    def cells(name: str, layers: str, row: dict[str, Any]) -> list[str]:
        counts = [flops(row["flops"]), *(moved(row[field]) for field in _MOVED), decimal(row["intensity"])]
        return [name, layers, *counts, *([seconds(row["time_s"]), row["bound"]] if timed else [])]

    body = [cells(row["op"], whole(row["layers"]), row) for row in rows]
    ops_s = sum(row["time_s"] for row in rows) if timed else None
    body.append(cells("total", "", {**totals, "time_s": ops_s, "bound": ""}))
    moves = [f"{name}, {size}" for name in ("weights", "KV read", "KV written", "activations")]
    times = [f"time, {unit}", "bound"] if timed else []
    columns = ("op", "layers", work, *moves, "FLOP/B", *times)
    return Table("Ops of the step, all layers", columns, body, text=("op", "bound"), totals=True)


def _communication(record: dict[str, Any]) -> Table:
    rows = [
        [
            row.op,
            row.kind,
            whole(row.devices),
            whole(row.count),
            quantity(row.payload_bytes, "B"),
            quantity(row.sent_bytes, "B"),
        ]
        for row in record["communication"]
    ]
    columns = ("after", "collective", "devices", "calls", "bytes a call", "sent by one device")
    return Table("Collectives of the step", columns, rows, text=("after", "collective"))


def _terms(record: dict[str, Any]) -> Iterator[str]:
    totals = record["totals"]
    yield "\nTime and intensity count weights and KV cache; activations can stay on the chip."
    if totals["time_s"] is not None:
        yield (
            f"Compute alone takes {quantity(totals['compute_s'], 's')}, memory alone "
            f"{quantity(totals['memory_s'], 's')}, communication {quantity(totals['communication_s'], 's')}, "
            f"overhead {quantity(totals['overhead_s'], 's')}."
        )
        device = record["device"]
        yield (
            f"Profile {record['profile']['name']} ({record['profile']['source']}), at "
            f"{quantity(device.flops_per_s, 'FLOP/s')} and {quantity(device.bandwidth_bytes_per_s, 'B/s')}."
        )
