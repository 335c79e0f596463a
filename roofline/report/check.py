"""What the three witnesses say of each step: what the headline answers, then products, then all other work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from qwenjax.config import ModelConfig
from qwenjax.tables import Table
from roofline.report.units import quantity, whole

if TYPE_CHECKING:
    from roofline.check import CheckRow, StepCheck


def check_record(config: ModelConfig, checks: Sequence[StepCheck]) -> dict[str, Any]:
    """Rows of all steps, each with its phase; totals of all, and of each step beside the lowered program's figure."""
    steps = [
        {
            "phase": _phase(check),
            "batch": check.step.batch,
            "query_len": check.step.query_len,
            "context": check.step.kv_len,
            "dtype": check.step.dtype,
            **check.totals,
            "program_flops": check.program_flops,
            "reported_flops": check.reported_flops,
            "rounding_bound_fraction": check.rounding_bound,
            "holds": check.holds,
        }
        for check in checks
    ]
    totals = {name: sum(check.totals[name] for check in checks) for name in checks[0].totals}
    return {
        "model": config.name,
        "attention": "dense",
        "steps": steps,
        "rows": [_row(check, row) for check in checks for row in check.rows],
        "remainders": [
            {"phase": _phase(check), **vars(remainder)} for check in checks for remainder in check.remainders
        ],
        "totals": totals,
        "holds": all(check.holds for check in checks),
    }


def _phase(check: StepCheck) -> str:
    sampled = all(row.work_class == "sampling" for row in check.rows)
    return f"{check.step.phase} sampling" if sampled else check.step.phase


def _row(check: StepCheck, row: CheckRow) -> dict[str, Any]:
    fields = {("class" if name == "work_class" else name): value for name, value in vars(row).items()}
    return {"phase": _phase(check), **fields}


def check_text(record: dict[str, Any]) -> Iterator[str | Table]:
    """The verdict, then the tables of each step."""
    yield _headline(record)
    yield "Hand formulas, jaxpr and XLA's cost analysis of each equation; attention dense, loops times their turns."
    for step in record["steps"]:
        rows = [row for row in record["rows"] if row["phase"] == step["phase"]]
        title = (
            f"{step['phase']}: batch {whole(step['batch'])}, new tokens {whole(step['query_len'])}, "
            f"attended {whole(step['context'])}, {step['dtype']}"
        )
        products = [row for row in rows if row["kind"] != "elementwise"]
        if products:
            yield _products(f"{title}; matrix products, FLOPs", products)
        yield _elementwise(f"{title}; other work, FLOPs", [row for row in rows if row["kind"] == "elementwise"])
        yield "\n" + _program(step)
    if record["remainders"]:
        yield _remainders(record["remainders"])


def _headline(record: dict[str, Any]) -> str:
    totals, steps = record["totals"], len(record["steps"])
    of_steps = f"of {steps} steps" if steps > 1 else "of the step"
    if record["holds"]:
        return (
            f"{record['model']}: every FLOP {of_steps} is explained, {whole(totals['compiler_flops'])} of them; "
            f"unexplained: 0 FLOPs, 0 transcendentals."
        )
    return (
        f"{record['model']}: {whole(totals['unexplained_flops'])} FLOPs and "
        f"{whole(totals['unexplained_transcendentals'])} transcendentals {of_steps} are unexplained, "
        f"of {whole(totals['compiler_flops'])} FLOPs."
    )


def _products(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    fields = ("hand_flops", "jaxpr_flops", "compiler_flops", "difference", "reported_flops", "causal_flops")
    body = [[row["op"], row["kind"], *(whole(row[field]) for field in fields)] for row in rows]
    body.append(["total", "", *(whole(sum(row[field] or 0 for row in rows)) for field in fields[:-1]), ""])
    columns = ("op", "kind", "hand", "jaxpr", "compiler", "difference", "loop bodies once", "causal")
    return Table(title, columns, body, text=("op", "kind"), totals=True)


def _elementwise(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    fields = ("hand_flops", "compiler_flops", "difference", "hand_transcendentals", "compiler_transcendentals")
    body = [[row["op"], row["class"], *(whole(row[field]) for field in fields)] for row in rows]
    body.append(["total", "", *(whole(sum(row[field] for row in rows)) for field in fields)])
    columns = ("op", "class", "hand", "compiler", "difference", "transcendentals by hand", "compiler's")
    return Table(title, columns, body, text=("op", "class"), totals=True)


def _program(step: dict[str, Any]) -> str:
    """The figure that cost_analysis gives for the whole program, and why it isn't the sum above."""
    program, parts, executed = step["program_flops"], step["reported_flops"], step["compiler_flops"]
    text = f"cost_analysis of the whole lowered program: {whole(program)}; its parts sum to {whole(parts)}"
    if program != parts:
        bound = f"{step['rounding_bound_fraction']:.1g}"
        text += f" (float32 sums round: {program / parts - 1:+.1e}, at most {bound})"
    if parts != executed:
        text += f"; with each loop's body once. Times their turns: {quantity(executed, 'FLOP')}, {whole(executed)}"
    return f"{text}."


def _remainders(remainders: Sequence[dict[str, Any]]) -> Table:
    body = [
        [
            row["phase"],
            row["op"],
            row["work_class"],
            row["scope"] or "(none)",
            row["primitive"],
            whole(row["flops"]),
            whole(row["transcendentals"]),
        ]
        for row in remainders
    ]
    columns = ("step", "op", "class", "scope", "primitive", "FLOPs", "transcendentals")
    return Table("What stands in the rows that don't come out", columns, body, text=columns[:5])
