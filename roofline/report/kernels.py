"""A step compiled for a chip that need not be there: its kernels, their totals, and what of it isn't real."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from qwenjax.tables import Table
from roofline.kernel_rows import OTHER, Kernel
from roofline.kernels import KernelReport, KernelTotals
from roofline.report.units import NOTHING, column, decimal, gib, percent, quantity, whole
from roofline.report.waterfall import waterfall_table
from roofline.waterfall import Waterfall

NOT_REAL = (
    "Compiled without the GPU: fusions, copies, aliasing, library calls and temporaries are what XLA makes for it.",
    "Not real: nothing is autotuned, so tilings, and whether Triton or cuBLAS runs a matrix product, can differ there.",
    "Times are each kernel's FLOPs at the peak rate or its bytes at the memory bandwidth, whichever takes longer: what "
    "a cache keeps, launches and waits are left out.",
)


def kernels_record(report: KernelReport, waterfall: Waterfall, model_layers: int) -> dict[str, Any]:
    """`kernels` and `rows` are the same list, in the order in which they run; `groups` sums it by op and kind."""
    job, compiled = report.job, report.compiled
    kernels = [_kernel(kernel) for kernel in report.kernels]
    return {
        "model": job.config.name,
        "hardware": job.hardware.id,
        "phase": job.step.phase,
        "batch": job.step.batch,
        "query_len": job.step.query_len,
        "context": job.step.kv_len,
        "dtype": job.dtype,
        "layers": job.config.num_hidden_layers,
        "model_layers": model_layers,
        "mesh": job.mesh,
        "devices": job.num_devices,
        "jax": compiled.jax,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "autotuned": False,
        "assumed_memory_bytes": compiled.assumed_memory_bytes,
        "kernels": kernels,
        "rows": kernels,
        "groups": _groups(report.kernels),
        "collectives": [row for row in kernels if row["collective"]],
        "totals": vars(report.totals),
        "waterfall": waterfall,
        "remarks": [*NOT_REAL, *_remarks(report)],
    }


def _kernel(kernel: Kernel) -> dict[str, Any]:
    collective = vars(kernel.collective) if kernel.collective else None
    return {**vars(kernel), "collective": collective}


def _groups(kernels: tuple[Kernel, ...]) -> list[dict[str, Any]]:
    """Kernels of one op and kind together, every run counted, in the order in which they first run."""
    groups: dict[tuple[str, str, bool], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.op, kernel.kind, kernel.in_layer), []).append(kernel)
    return [
        {
            "op": op,
            "kind": kind,
            "in_layer": in_layer,
            "count": sum(kernel.count for kernel in members),
            "at_most": any(kernel.at_most for kernel in members),
            "source": members[0].source,
            **{
                name: sum(kernel.count * getattr(kernel, name) for kernel in members)
                for name in ("flops", "read_bytes", "write_bytes")
            },
            "time_s": _time(members),
            "bound": max(members, key=lambda kernel: kernel.count * (kernel.time_s or 0.0)).bound,
        }
        for (op, kind, in_layer), members in groups.items()
    ]


def _time(members: list[Kernel]) -> float | None:
    known = [kernel.count * kernel.time_s for kernel in members if kernel.time_s is not None]
    return sum(known) if len(known) == len(members) else None


def _remarks(report: KernelReport) -> Iterator[str]:
    job, totals, kernels = report.job, report.totals, report.kernels
    if os.environ.get("XLA_FLAGS"):
        yield f"Compiled with XLA_FLAGS={os.environ['XLA_FLAGS']}."
    if report.compiled.assumed_memory_bytes is not None:
        yield (
            f"Weights and cache alone don't fit {job.hardware.id}: compiled as if it had memory enough, since short of "
            "it XLA computes things twice."
        )
    if totals.rematerialised:
        yield f"Kernels that compute again what memory was too short to keep: {whole(totals.rematerialised)}."
    if job.config.is_moe:
        yield _experts_remark(totals)
    kv_heads = job.config.num_key_value_heads
    if job.num_devices > kv_heads:
        yield f"{job.num_devices} devices share {kv_heads} KV heads: each has the cache and projections of a whole one."
    if totals.conditional_runs:
        yield (
            f"A condition decides {whole(totals.conditional_runs)} times whether work is done: these runs are counted "
            "as if all did it, so their sums are upper bounds."
        )
    if totals.flops > totals.dense_flops:
        more = totals.flops / totals.dense_flops - 1
        yield (
            f"The kernels compute {percent(more)} more FLOPs than the step needs: padding, blocks that may have no "
            "work, or what each device repeats."
        )
    missing = totals.dense_flops - totals.flops
    if 0 < missing <= totals.masked_flops:
        yield f"Attention leaves out what the mask hides: {quantity(missing, 'FLOP')} of whole squares."
    elif missing > 0:
        yield f"{quantity(missing, 'FLOP')} of the step are in kernels whose work can't be read."
    own = sum(kernel.count for kernel in kernels if kernel.is_own)
    if own:
        yield (
            f"Kernels of qwenjax's own (pallas): {whole(own)}; weights that they choose, cache and their FLOPs are the "
            "inventory's, the rest as their operands are shaped."
        )
    hidden = sum(kernel.count for kernel in kernels if kernel.source == "inventory") - own
    if hidden:
        yield f"Library calls that hide their work: {whole(hidden)}; their FLOPs and bytes are the inventory's."
    unnamed = sum(kernel.count for kernel in kernels if kernel.op == OTHER)
    if unnamed:
        yield f"Kernels without an op's name (`{OTHER}`): {whole(unnamed)}; loops, copies and what XLA adds."
    if any(kernel.time_s is None for kernel in kernels):
        yield "Collectives without a time cross hosts, or a chip whose links aren't known, and are not in the sum."


def kernels_text(record: dict[str, Any], every: bool = False) -> Iterator[str | Table]:
    totals = record["totals"]
    yield _headline(record)
    yield _setting(record)
    yield _every(record) if every else _by_op(record)
    if record["collectives"]:
        yield _collectives(record)
    yield from _sums(totals)
    yield waterfall_table(record["waterfall"])
    yield ""
    yield from record["remarks"]
    if record["plot"]:
        yield f"plot: {record['plot']}"


def _headline(record: dict[str, Any]) -> str:
    totals = record["totals"]
    shape = f"context {whole(record['context'])}"
    if record["phase"] == "prefill":
        shape = f"{whole(record['query_len'])} new tokens" + (
            f", {shape}" if record["query_len"] < record["context"] else ""
        )
    where = record["hardware"] if record["devices"] == 1 else f"each of {record['devices']} {record['hardware']}"
    fits = "" if totals["fits"] else "; it does not fit the card"
    most = "at most " if totals["conditional_runs"] else ""
    return (
        f"{record['model']} {record['phase']}, batch {whole(record['batch'])}, {shape} on {where}: "
        f"{most}{whole(totals['num_kernels'])} kernels, {decimal(totals['kernels_per_layer'])} a layer, "
        f"{decimal(totals['byte_ratio'], 3)} of the ideal bytes, {quantity(totals['temp_bytes'], 'B')} of temporaries; "
        f"not autotuned{fits}"
    )


def _setting(record: dict[str, Any]) -> str:
    cut = record["layers"] < record["model_layers"]
    layers = f"the first {record['layers']} of {record['model_layers']} layers" if cut else f"{record['layers']} layers"
    mesh = f"; mesh {record['mesh']}, heads, widths and vocabulary split" if record["devices"] > 1 else ""
    seconds = quantity(record["totals"]["compile_s"], "s")
    return f"{layers}, {record['dtype']}{mesh}; compiled in {seconds} by XLA of jax {record['jax']}"


def _by_op(record: dict[str, Any]) -> Table:
    groups, totals, layers = record["groups"], record["totals"], record["layers"]
    work, flops = column([group["flops"] for group in groups], "FLOP")
    size, moved = column([group["read_bytes"] for group in groups], "B")
    unit, seconds = column([group["time_s"] for group in groups], "s")
    body = [
        [
            group["op"],
            group["kind"] + (" (inventory)" if group["source"] == "inventory" else ""),
            ("<= " if group["at_most"] else "") + whole(group["count"]),
            decimal(group["count"] / layers) if group["in_layer"] else NOTHING,
            *(write(group[name]) for name, write in (("flops", flops), ("read_bytes", moved), ("write_bytes", moved))),
            seconds(group["time_s"]),
            group["bound"],
        ]
        for group in groups
    ]
    sums = (flops(totals["flops"]), *(moved(sum(g[name] for g in groups)) for name in ("read_bytes", "write_bytes")))
    counts = (whole(totals["num_kernels"]), decimal(totals["kernels_per_layer"]))
    body.append(["total", "", *counts, *sums, seconds(totals["predicted_s"]), ""])
    columns = ("op", "kind", "kernels", "a layer", work, f"read, {size}", f"written, {size}", f"time, {unit}", "bound")
    return Table("Kernels by op, all runs of the step", columns, body, text=("op", "kind", "bound"), totals=True)


def _every(record: dict[str, Any]) -> Table:
    body = [
        [
            row["name"],
            " + ".join(row["ops"]) or row["op"],
            row["kind"],
            ("<= " if row["at_most"] else "") + whole(row["count"]),
            quantity(row["flops"], "FLOP") if row["flops"] else NOTHING,
            quantity(row["read_bytes"], "B"),
            quantity(row["write_bytes"], "B"),
            quantity(row["time_s"], "s"),
            row["bound"],
        ]
        for row in record["kernels"]
    ]
    columns = ("kernel", "ops", "kind", "runs", "FLOPs", "read", "written", "time of one", "bound")
    return Table("Kernels in order, figures of one run", columns, body, text=("kernel", "ops", "kind", "bound"))


def _collectives(record: dict[str, Any]) -> Table:
    groups: dict[tuple[Any, ...], int] = {}
    for row in record["collectives"]:
        found = row["collective"]
        key = (
            row["op"],
            found["kind"],
            found["group_size"],
            found["payload_bytes"],
            found["sent_bytes"],
            row["time_s"],
        )
        groups[key] = groups.get(key, 0) + row["count"]
    body = [
        [op, kind, whole(size), whole(count), quantity(payload, "B"), quantity(sent, "B"), quantity(time_s, "s")]
        for (op, kind, size, payload, sent, time_s), count in groups.items()
    ]
    columns = ("op", "collective", "devices", "calls", "bytes a call", "sent by one device", "time a call")
    return Table("Collectives that the compiler put in", columns, body, text=("op", "collective"))


def _sums(totals: dict[str, Any]) -> Iterator[str]:
    yield (
        f"\n{quantity(totals['bytes'], 'B')} moved, of which weights and cache must be "
        f"{quantity(totals['ideal_bytes'], 'B')}; {quantity(totals['flops'], 'FLOP')}. The kernels take at least "
        f"{quantity(totals['predicted_s'], 's')}, the step itself {quantity(totals['bound_s'], 's')}."
    )
    fits = "fits" if totals["fits"] else "does not fit"
    yield (
        f"Memory: {gib(totals['argument_bytes'])} of arguments, {quantity(totals['alias_bytes'], 'B')} of them updated "
        f"in place, {quantity(totals['temp_bytes'], 'B')} of temporaries; {gib(totals['peak_bytes'])} at once, which "
        f"{fits} the card's {gib(totals['capacity_bytes'])}."
    )


def _experts_remark(totals: KernelTotals) -> str:
    once = "Ideal bytes take each layer's expected distinct experts once"
    more = totals.routed_ideal_bytes / totals.ideal_bytes
    if more == 1:
        return f"{once}, and so do the model's kernels."
    return (
        f"{once}; as this model reads them, once for each token's choice or block of rows, they are {decimal(more, 3)} "
        f"times that, and the kernels' {decimal(totals.bytes / totals.routed_ideal_bytes, 3)} of it."
    )
