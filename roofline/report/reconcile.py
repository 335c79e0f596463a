"""An engine's figures beside ours: the line that answers, then the rows, what they leave open, and the parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.tables import Table
from roofline.findings import Finding, all_agree
from roofline.log_bill import bill_of_log
from roofline.report.units import NOTHING, decimal, gib, percent, quantity, whole

if TYPE_CHECKING:
    from roofline.engine_run import EngineRun
    from roofline.hardware import Hardware
    from roofline.reconcile import LogAccount
    from roofline.reconcile_counters import CounterReport
    from roofline.vllm_log import Conflict, StartupLog
    from roofline.vllm_metrics import CounterDelta


def reconcile_record(
    config: ModelConfig,
    hardware: Hardware | None,
    log: tuple[StartupLog, EngineRun, LogAccount] | None,
    counters: tuple[CounterDelta, CounterReport] | None,
) -> dict[str, Any]:
    """Rows {term, unit, engine, ours, delta, delta_fraction, cause, source, kind, tolerance, agrees}, and facts."""
    findings = (*(log[2].findings() if log else ()), *(counters[1].findings if counters else ()))
    return {
        "model": config.name,
        "hardware": hardware.id if hardware else None,
        "agrees": all_agree(findings),
        "log": _log_facts(*log[:2]) if log else None,
        "metrics": _metrics_facts(*counters) if counters else None,
        "bill": [vars(row) for row in bill_of_log(log[2])] if log else [],
        "rows": [_row(finding) for finding in findings],
        "parts": [vars(part) for part in counters[1].parts] if counters else [],
    }


def _row(finding: Finding) -> dict[str, Any]:
    derived = {name: getattr(finding, name) for name in ("delta", "delta_fraction", "agrees")}
    return {**vars(finding), **derived}


def _log_facts(log: StartupLog, run: EngineRun) -> dict[str, Any]:
    return {
        "path": log.path,
        "version": run.version_text or None,
        "model": log.texts.get("model"),
        "tp": run.tp,
        "pp": run.pp,
        "kv_dtype": run.kv_dtype,
        "weights": run.weights.name if run.weights else "bfloat16",
        "max_model_len": run.max_model_len,
        "starts": log.starts,
        "ranks": log.ranks,
        "missing": log.missing,
        "conflicts": [_conflict(conflict) for conflict in log.conflicts],
    }


def _conflict(conflict: Conflict) -> dict[str, Any]:
    first, last = conflict.first, conflict.last
    return {
        "field": conflict.field,
        "rank": last.rank or None,
        "first_line": first.line,
        "first": first.value,
        "last_line": last.line,
        "last": last.value,
    }


def _metrics_facts(delta: CounterDelta, report: CounterReport) -> dict[str, Any]:
    return {
        **vars(delta),
        "prompt_tokens_per_request": delta.prompt_tokens / report.requests,
        "output_tokens_per_request": delta.output_tokens / report.requests,
    }


def reconcile_text(record: dict[str, Any]) -> Iterator[str | Table]:
    yield _headline(record)
    for name in ("log", "metrics"):
        if record[name]:
            yield _about_log(record["log"]) if name == "log" else _about_metrics(record["metrics"])
    rows = [[_term(row), *_figures(row), _verdict(row), row["cause"]] for row in record["rows"]]
    columns = ("term", "engine", "ours", "ours less engine", "of it", "agrees", "cause")
    yield Table("The engine's figures and ours", columns, rows, text=("term", "agrees", "cause"))
    if record["bill"]:
        yield _bill(record["bill"])
    if record["parts"]:
        yield _parts(record["parts"])


def _headline(record: dict[str, Any]) -> str:
    rows = record["rows"]
    checked = [row for row in rows if row["agrees"] is not None]
    wrong = [row["term"] for row in checked if not row["agrees"]]
    verdict = (
        f"{len(checked) - len(wrong)} of {len(checked)} exact figures agree, not {', '.join(wrong)}"
        if wrong
        else f"all {len(checked)} exact figures agree"
    )
    parts = [f"{record['model']}: {verdict}", *_pool_words(rows), *_counter_words(rows)]
    return "; ".join(parts)


def _pool_words(rows: list[dict[str, Any]]) -> Iterator[str]:
    tokens = next((row for row in rows if row["term"] == "KV tokens of that pool"), None)
    rules = next((row for row in rows if row["term"] == "KV tokens predicted"), None)
    if tokens is not None:
        yield f"KV pool of {whole(tokens['engine'])} tokens, {whole(tokens['ours'])} by the printed size"
    if rules is not None:
        yield f"{whole(rules['ours'])} predicted ({_signed(rules['delta_fraction'])})"


def _counter_words(rows: list[dict[str, Any]]) -> Iterator[str]:
    counted = next((row for row in rows if row["term"] == "estimated FLOPs an output token"), None)
    corrected = next((row for row in rows if row["term"] == "corrected FLOPs an output token"), None)
    if counted is not None and corrected is not None:
        said, formula, right = (
            quantity(row, "FLOP") for row in (counted["engine"], counted["ours"], corrected["ours"])
        )
        yield f"counter {said} an output token, {formula} by its own formula, {right} corrected"


def _about_log(log: dict[str, Any]) -> str:
    version = f"vLLM {log['version']}" if log["version"] else "vLLM of a version that the log doesn't say"
    text = f"Log: {version}, TP {log['tp']}, cache {log['kv_dtype']}, weights {log['weights']}."
    if log["starts"] > 1:
        text += f" It has {log['starts']} starts; the last is taken."
    if log["ranks"]:
        text += f" Ranks: {', '.join(log['ranks'])}."
    if log["missing"]:
        text += f" Not in the log: {', '.join(log['missing'])}."
    for conflict in log["conflicts"]:
        text += (
            f" Lines {conflict['first_line']} and {conflict['last_line']} disagree on {conflict['field']}; "
            f"the last is taken."
        )
    return text


def _about_metrics(metrics: dict[str, Any]) -> str:
    text = (
        f"Counters: {whole(metrics['requests'])} requests, on average {decimal(metrics['prompt_tokens_per_request'])} "
        f"tokens in and {decimal(metrics['output_tokens_per_request'])} out"
    )
    steps = metrics["steps"]
    return f"{text}, {whole(steps)} steps." if steps else f"{text}; the page doesn't count steps."


def _term(row: dict[str, Any]) -> str:
    return row["term"] if row["kind"] == "exact" else f"{row['term']} *"


def _figures(row: dict[str, Any]) -> list[str]:
    write = {"B": gib, "B/token": _whole_bytes, "tokens": whole, "FLOP": _flops}.get(row["unit"], _two)
    if row["term"].endswith(("bytes read", "bytes written")):  # traffic, not sizes
        write = _traffic
    cells = [NOTHING if row[name] is None else write(row[name]) for name in ("engine", "ours", "delta")]
    return [*cells, _signed(row["delta_fraction"])]


def _whole_bytes(value: float) -> str:
    return f"{value:,.0f} B"


def _traffic(value: float) -> str:
    return quantity(value, "B")


def _flops(value: float) -> str:
    return quantity(value, "FLOP")


def _two(value: float) -> str:
    return decimal(value, 2)


def _signed(fraction: float | None) -> str:
    return NOTHING if fraction is None else f"{'+' if fraction >= 0 else '-'}{percent(abs(fraction))}"


def _verdict(row: dict[str, Any]) -> str:
    return {True: "yes", False: "no", None: NOTHING}[row["agrees"]]


def _bill(rows: list[dict[str, Any]]) -> Table:
    body = [[row["step"], gib(row["change_bytes"]), gib(row["left_bytes"]), row["source"]] for row in rows]
    columns = ("step", "change", "left", "source")
    return Table("From the device's memory to the cache", columns, body, text=("step", "source"))


def _parts(parts: list[dict[str, Any]]) -> Table:
    names = [
        f"{kind}_{figure}" for figure in ("flops", "read_bytes", "write_bytes") for kind in ("counter", "corrected")
    ]
    rows = [[part["part"], *(quantity(part[name], _unit(name)) for name in names)] for part in parts]
    totals = [quantity(sum(part[name] for part in parts), _unit(name)) for name in names]
    columns = ("part", "FLOPs", "corrected", "read", "corrected ", "written", "corrected  ")
    return Table("The counters by part of the model", columns, [*rows, ["total", *totals]], text=("part",), totals=True)


def _unit(name: str) -> str:
    return "FLOP" if name.endswith("flops") else "B"
